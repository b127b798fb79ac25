"""Flight recorder dumps: who is guilty of a hang, and a reader that runs nothing of what it reads."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench_classify import shared_data
from unicron.diagnosis.dump import DumpProblem, DumpRefused, read_dump, read_pickle
from unicron.diagnosis.flight import Hang, analyse, diagnose_dumps, parse_dump

pytestmark = pytest.mark.timeout(30)

TRACES = shared_data() / "traces" / "flight_recorder"
PLAIN: list[Any] = [
    {}, [], (), None, True, False, 0, -1, 255, 70_000, 1 << 40, -(1 << 80), 1.5, "", "ä€\n",
    {"a": [1, (2, 3), (4, 5, 6, 7)]},
    {"entries": [{"sizes": [[4096, 1]], "state": "scheduled",
    "retired": False, "time": None, "x": (1,)}] * 3, 7: "seven"},
]  # fmt: skip


# ---------------------------------------------------------------- reading


def pickled(expression: str, protocol: int) -> bytes:
    """Made in another process: this one has no need of the module."""
    code = f"import pickle, sys; sys.stdout.buffer.write(pickle.dumps({expression}, {protocol}))"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=20).stdout


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_plain_values_are_read(protocol: int) -> None:
    assert read_pickle(pickled(repr(PLAIN), protocol)) == PLAIN


@pytest.mark.parametrize(
    "expression", ["print", "Exception('x')", "{1, 2}", "b'bytes'", "[complex(1, 2)]", "bytearray(3)"]
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_anything_else_is_refused(expression: str, protocol: int) -> None:
    with pytest.raises(DumpProblem, match=r"holds more than plain values at byte \d+"):
        read_pickle(pickled(expression, protocol))


def test_what_would_run_is_not_run(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    bomb = f"cposix\nsystem\n(Vtouch {target}\ntR.".encode()
    with pytest.raises(DumpRefused, match="posix system"):
        read_pickle(bomb)
    assert not target.exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\x80\x02}q\x00(", "not a whole pickle"),
        (b"\x80\x02.", "not a whole pickle"),
        (b"\x80\x02e.", "not a whole pickle"),
        (b"\x80\x02h\x07.", "not a whole pickle"),
        (b"\x80\x02]" + b"(" * 200 + b".", "nested more than"),
        (b"\x80\x02K\x01K\x02a.", "no list"),
        (b"\x80\x02K\x01K\x02K\x03s.", "no dict"),
        (b"\x80\x02}]K\x01s.", "a dict's key is a list"),
        (b"{", "neither a pickle nor JSON"),
        (b"\xff\xfe\x00", "neither a pickle nor JSON"),
    ],
)
def test_what_is_no_dump_says_so(content: bytes, reason: str) -> None:
    with pytest.raises(DumpProblem, match=reason):
        read_dump(content)


@pytest.mark.parametrize("value", [None, 7, "text", {}, {"entries": 3}])
def test_a_value_that_is_no_dump(value: Any) -> None:
    with pytest.raises(ValueError, match="not a flight recorder dump"):
        parse_dump(0, value)


def test_odd_fields_are_left_out() -> None:
    transfer = {"is_p2p": True, "profiling_name": "nccl:send 0->9"}
    entries = [7, None, {}, {"process_group": [], "collective_seq_id": "x"}, transfer]
    dump = parse_dump(3, {"entries": entries, "pg_config": {"0": 7}, "pg_status": {"0": None, "z": {}}})
    assert len(dump.entries) == 3
    assert analyse({3: dump}).guilty == ()


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.timeout(90)
def test_a_dump_that_torch_wrote(tmp_path: Path) -> None:
    """One rank over gloo: whatever torch puts into its dumps is read, and a run in order has nobody to blame."""
    script = f"""
import torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
dist.all_reduce(torch.ones(4))
open("{tmp_path}/dump", "wb").write(c10d._dump_fr_trace() if hasattr(c10d, "_dump_fr_trace") else b"")
"""
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=environment)
    content = (tmp_path / "dump").read_bytes()
    if not content:
        pytest.skip("this torch has no recorder for gloo")
    found = parse_dump(0, read_dump(content))
    assert found.groups
    assert analyse({0: found}).guilty == ()


# ---------------------------------------------------------------- who is guilty


def dump(rank: int, done: int, started: int, **changes: Any) -> dict[str, Any]:
    """A rank in one group of three that ended `done` collectives and started `started`."""
    entries = [
        {
            "record_id": number, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": number,
            "profiling_name": "nccl:all_reduce", "input_sizes": [[8]], "input_dtypes": ["Float"],
            "state": "completed" if number <= done else "scheduled", "is_p2p": False,
        }
        for number in range(1, started + 1)
    ]  # fmt: skip
    return {
        "entries": entries,
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}},
        "pg_status": {"0": {"last_enqueued_collective": started, "last_completed_collective": done}},
        **changes,
    }


def hang(*dumps: dict[str, Any]) -> Hang:
    return analyse({rank: parse_dump(rank, value) for rank, value in enumerate(dumps)})


def test_who_did_not_start_what_others_wait_in() -> None:
    found = hang(dump(0, 4, 5), dump(1, 4, 4), dump(2, 4, 6))
    assert found.guilty == (1,)
    assert found.waits == {0: (1,), 1: (), 2: (1,)}
    assert "waits for nobody" in found.reasons[1]


def test_whose_device_stopped() -> None:
    found = hang(dump(0, 7, 8), dump(1, 3, 8), dump(2, 7, 8))
    assert (found.guilty, found.stopped) == ((1,), (1,))


def test_who_wrote_no_dump() -> None:
    found = hang(dump(0, 4, 5), dump(1, 4, 5))
    assert (found.guilty, found.missing) == ((2,), (2,))


def test_all_in_the_same_collective_is_nobody() -> None:
    dumps = {rank: parse_dump(rank, dump(rank, 4, 5)) for rank in range(3)}
    assert analyse(dumps).guilty == ()
    found = diagnose_dumps(dumps)
    assert (found.root_rank, found.severity, found.scope) == (None, "SEV3", "link")


def test_nothing_pending_is_nothing() -> None:
    assert diagnose_dumps({rank: parse_dump(rank, dump(rank, 5, 5)) for rank in range(3)}).severity == "INFO"


@pytest.mark.parametrize(
    ("field", "value"),
    [("input_sizes", [[9]]), ("input_dtypes", ["Half"]), ("profiling_name", "nccl:broadcast")],
)
def test_who_called_something_else(field: str, value: Any) -> None:
    odd = dump(1, 4, 5)
    odd["entries"][4][field] = value
    dumps = {0: dump(0, 4, 5), 1: odd, 2: dump(2, 4, 5)}
    found = diagnose_dumps({rank: parse_dump(rank, content) for rank, content in dumps.items()})
    assert (found.root_rank, found.severity, found.scope) == ("1", "FATAL", "job")


def test_uneven_exchanges_are_no_mismatch() -> None:
    dumps = [dump(rank, 4, 5) for rank in range(3)]
    for rank, content in enumerate(dumps):
        content["entries"][4] |= {"profiling_name": "nccl:all_to_all", "input_sizes": [[rank]]}
    assert not hang(*dumps).mismatch


def test_a_transfer_gives_an_edge_and_no_comparison() -> None:
    waiting = dump(0, 4, 4)
    transfer = {
        "record_id": 9,
        "pg_id": 0,
        "process_group": ["0", ""],
        "p2p_seq_id": 3,
        "is_p2p": True,
        "state": "scheduled",
    }
    waiting["entries"].append({**transfer, "profiling_name": "nccl:recv 0<-2"})
    found = hang(waiting, dump(1, 4, 4), dump(2, 4, 4))
    assert (found.guilty, found.waits[0]) == ((2,), (2,))
    both = dump(2, 4, 4)
    both["entries"].append({**transfer, "profiling_name": "nccl:send 2->0"})
    assert hang(waiting, dump(1, 4, 4), both).guilty == ()


def test_a_dump_without_entries_is_filed_by_the_order_of_creation() -> None:
    silent = dump(1, 4, 4, entries=[])
    assert hang(dump(0, 4, 5), silent, dump(2, 4, 5)).guilty == (1,)


def test_a_circle_has_no_root() -> None:
    def crossed(rank: int, own: str, other: str) -> dict[str, Any]:
        content = dump(rank, 4, 4)
        content["pg_config"] = {name: {"name": name, "ranks": [0, 1]} for name in "01"}
        content["pg_status"] = {
            own: {"last_enqueued_collective": 5, "last_completed_collective": 4},
            other: {"last_enqueued_collective": 4, "last_completed_collective": 4},
        }
        pending = {**content["entries"][0], "record_id": 9, "pg_id": int(own), "process_group": [own, ""]}
        content["entries"] = [{**pending, "collective_seq_id": 5, "state": "scheduled"}]
        return content

    dumps = {0: parse_dump(0, crossed(0, "0", "1")), 1: parse_dump(1, crossed(1, "1", "0"))}
    assert analyse(dumps).in_circle
    assert diagnose_dumps(dumps).severity == "FATAL"


# ---------------------------------------------------------------- recorded hangs


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"{TRACES} is not there (UNICRON_SHARED_DATA)")
@pytest.mark.parametrize(("name", "guilty"), [("gpu_error_1st.json", (12, 14)), ("lock_gil_1st.json", (9, 14))])
def test_recorded_hangs(name: str, guilty: tuple[int, ...]) -> None:
    content = json.loads((TRACES / name).read_text())
    assert all(f"Rank {rank}," in content["ground_truth_injection"] for rank in guilty)
    dumps = {int(rank): parse_dump(int(rank), value) for rank, value in content["dumps"].items()}
    assert analyse(dumps).guilty == guilty
    # The same without the dumps of the guilty, which a stopped process cannot write.
    found = analyse({rank: value for rank, value in dumps.items() if rank not in guilty})
    assert set(found.missing) == set(guilty)
    assert set(found.guilty) == set(guilty)
