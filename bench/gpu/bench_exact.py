"""What exact mode's kernels cost on a GPU, beside the plain additions they take the place of (cupy).

Per element: accumulate reads 4 (bf16: 2) + 8 bytes and writes 8; back to float32 reads 8 and writes 4; squares read 4;
the plain addition reads 8 and writes 4.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
from unicron import _core


def timed_ms(cupy: Any, action: Callable[[], object], runs: int) -> list[float]:
    times = []
    for run in range(runs + 3):
        begun, ended = cupy.cuda.Event(), cupy.cuda.Event()
        begun.record()
        action()
        ended.record()
        ended.synchronize()
        if run >= 3:
            times.append(cupy.cuda.get_elapsed_time(begun, ended))
    return times


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0], runs=15)
    parser.add_argument("--million", type=int, default=350, help="parameters, in millions")
    options = parser.parse_args()
    import cupy

    count = options.million * 1_000_000
    stream = cupy.cuda.get_current_stream().ptr
    terms = cupy.random.standard_normal(count, dtype=cupy.float32)
    half = (terms.view(cupy.uint32) >> 16).astype(cupy.uint16)
    floats = cupy.zeros(count, dtype=cupy.float32)
    sums = cupy.zeros(count, dtype=cupy.int64)
    words = cupy.zeros(8, dtype=cupy.uint64)
    flags, parts = words.data.ptr, words.data.ptr + 32

    def accumulate(source: Any, bf16: bool) -> None:
        address, total = source.data.ptr, sums.data.ptr
        _core.gpu_exact_accumulate(0, total, address, count, bf16, 30, 1 << 20, flags, stream)

    cases: dict[str, tuple[int, Callable[[], object]]] = {
        "plain float32 addition": (12, lambda: cupy.add(floats, terms, out=floats)),
        "accumulate float32": (20, lambda: accumulate(terms, False)),
        "accumulate bf16": (18, lambda: accumulate(half, True)),
        "back to float32": (
            12, lambda: _core.gpu_exact_to_float(0, floats.data.ptr, sums.data.ptr, count, 30, stream),
        ),
        "sum of squares": (
            4, lambda: _core.gpu_exact_sum_squares(0, parts, terms.data.ptr, count, 30, flags, stream),
        ),
    }  # fmt: skip
    bench = common.Bench(
        "exact sums", unit="ms", baseline="plain float32 addition",
        configuration={"parameters": count, "gpu": _core.cuda_device_name(0)},
    )  # fmt: skip
    for name, (bytes_each, action) in cases.items():
        times = timed_ms(cupy, action, options.runs)
        bench.add(name, times, gb_per_s=round(count * bytes_each / sorted(times)[len(times) // 2] / 1e6))
    bench.finish(options)


if __name__ == "__main__":
    main()
