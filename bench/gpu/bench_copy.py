"""A peer's state by the copy engine, with and without a digest of what arrived.

plain: copy engine alone; overlapped: copy engine, and a kernel digests what has arrived; fused: one kernel copies and
digests. From the other GPU where there are two, else within one. Times are the GPU's own, between events.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
from unicron import _core

GIB = 1 << 30


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0], runs=9)
    parser.add_argument("--gib", type=float, nargs="*", default=[0.25, 1, 4], help="sizes")
    options = parser.parse_args()
    peers = [0, 1] if _core.num_cuda_devices() > 1 else [0]
    bench = common.Bench("copies between GPUs", unit="GB/s", configuration={"gpu": _core.cuda_device_name(0)})
    copier = _core.GpuCopier(0)
    for peer in peers:
        source = _core.GpuArena(peer, 0, True)
        target = _core.GpuArena(0, 0, True)
        for gib in options.gib:
            nbytes = int(gib * GIB)
            to, origin = target.allocate(nbytes), source.allocate(nbytes)
            # Mapped here by its descriptor, as an heir's peer is.
            (fd,), ((_, _, slab_bytes),) = source.export_all(), source.slabs()
            mapping = _core.GpuMapping(fd, slab_bytes, 0)
            os.close(fd)
            where = "the other GPU" if peer else "the same GPU"
            rates: dict[str, list[float]] = {"plain": [], "overlapped": [], "fused": []}
            for run in range(options.runs + 2):
                for mode, seen in rates.items():  # taking turns: a neighbour on the link meets all of them
                    _, ms = copier.copy(to, mapping.address, nbytes, mode, 30_000)
                    if run >= 2:
                        seen.append(nbytes / ms / 1e6)
            for mode, seen in rates.items():
                bench.add(f"{gib:g} GiB from {where}, {mode}", seen)
            target.free(to)
            del mapping
            source.free(origin)
    bench.finish(options)


if __name__ == "__main__":
    main()
