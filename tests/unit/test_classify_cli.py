"""unicron classify: every kind of input, bounds, exit codes, and one line that says what to do."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unicron.cli import classify_input as inputs
from unicron.cli import main

pytestmark = pytest.mark.timeout(30)

FIELDS = {"id", "severity", "scope", "root_rank", "category", "reason"}
LATE = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=90, OpType=ALLREDUCE, Timeout(ms)=600000)"
DUMP = {
    "entries": [{"process_group": ["0", ""], "pg_id": 0, "collective_seq_id": 5, "state": "scheduled"}],
    "pg_config": {"0": {"name": "0", "ranks": "[0, 1]"}},
    "pg_status": {"0": {"last_enqueued_collective": 5, "last_completed_collective": 4}},
}
IDLE = {**DUMP, "entries": [], "pg_status": {"0": {"last_enqueued_collective": 4, "last_completed_collective": 4}}}
ERROR_FILE = {
    "message": {
        "message": "KeyError: 'labels'",
        "extraInfo": {"py_callstack": "Traceback (most recent call last):\nKeyError: 'labels'", "timestamp": "1"},
    }
}
SLURM = f"""0: iteration 1
1: iteration 1
0: {LATE}
1: Segmentation fault
slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***
1: frame
0: frame
"""

Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_json(*words: str) -> list[dict[str, Any]]:
        assert main(["classify", "--json", *words]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run_json


def write(path: Path, content: str | bytes | dict[str, Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
        content = json.dumps(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("plain.log", "all is well\nRuntimeError: CUDA error: device-side assert triggered\n", ("FATAL", None)),
        ("empty.log", "", ("INFO", None)),
        ("torch.log", f"[rank0]: {LATE}\n[rank1]: KeyError: 'x'\n", ("FATAL", "1")),
        ("slurm.out", SLURM, ("SEV2", "1")),
        ("brackets.log", "[0] fine\n[1] KeyError: 'x'\n", ("FATAL", "1")),
        ("structured.log", '{"message": "a"}\n{"message": "KeyError: x"}\n', ("FATAL", None)),
        ("carriage.log", "10%\r20%\rKeyError: 'x'\r", ("FATAL", None)),
        ("error.json", ERROR_FILE, ("FATAL", None)),
        ("0/error.json", ERROR_FILE, ("FATAL", "0")),
        ("old.json", {"message": "CUDA out of memory. Tried to allocate 1 GiB"}, ("FATAL", None)),
        ("set.json", {"dumps": {"0": DUMP, "1": IDLE}}, ("SEV2", "1")),
        ("trace_rank_0", DUMP, ("SEV2", "1")),
        ("pretty.json", json.dumps({"dumps": {"0": DUMP, "1": IDLE}}, indent=1), ("SEV2", "1")),
    ],
)
def test_a_file_of_each_kind(run: Run, tmp_path: Path, name: str, content: Any, wanted: tuple[str, str | None]) -> None:
    (found,) = run(write(tmp_path / name, content))
    assert found.keys() == {*FIELDS, "evidence"}
    assert (found["severity"], found["root_rank"]) == wanted, found


def test_json_lines_are_answered_line_by_line(run: Run, tmp_path: Path) -> None:
    rows = [
        {"id": "a", "text": "KeyError: 'x'", "severity": "INFO", "more": {"is": "left alone"}},
        {"id": 7, "ranks": {"0": LATE, "n1": "Segmentation fault"}},
        {"text": ""},
    ]
    found = run(write(tmp_path / "rows.jsonl", "\n\n".join(map(json.dumps, rows)) + "\n"))
    assert all(row.keys() == FIELDS for row in found)
    assert [(row["id"], row["severity"], row["root_rank"]) for row in found] == [
        ("a", "FATAL", None), ("7", "SEV2", "n1"), ("5", "INFO", None),
    ]  # fmt: skip


def test_folders(run: Run, tmp_path: Path) -> None:
    for rank, value in enumerate((DUMP, IDLE)):
        write(tmp_path / "dumps" / f"nccl_trace_rank_{rank}", value)
    assert run(str(tmp_path / "dumps"))[0]["root_rank"] == "1"
    write(tmp_path / "dumps" / "whole.json", {"dumps": {"0": DUMP, "1": IDLE}})
    assert [row["root_rank"] for row in run(str(tmp_path / "dumps"))] == ["1", "1"]
    write(tmp_path / "logs" / "0" / "stderr.log", LATE)
    write(tmp_path / "logs" / "1" / "stdout.log", "KeyError: 'x'")
    assert run(str(tmp_path / "logs"))[0]["root_rank"] == "1"


def test_a_torn_dump_counts_as_none(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "rank_0.json", DUMP)
    write(tmp_path / "rank_1.json", b"")
    assert main(["classify", "--json", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["root_rank"] == "1"
    assert "rank_1.json: is empty" in captured.err


def test_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"id": "x", "text": "KeyError: 1"}\n')))
    assert run()[0]["id"] == "x"


@pytest.mark.parametrize(
    ("name", "content", "words", "code", "reason"),
    [
        ("", None, [], 1, "does not exist"),
        ("a.jsonl", '{"id": "a", "text": "b"}\n{"id": "c"}\n', [], 1, "a.jsonl:2: has neither the field text nor"),
        ("a.jsonl", '{"id": "a", "text": "b"}\nnonsense\n', [], 1, "a.jsonl:2: "),
        ("a.jsonl", '{"id": "a", "ranks": {"0": 7}}\n', [], 1, "Expected `str`, got `int`"),
        ("a.json", '{"some": "thing"}', [], 1, "neither an error.json of torchrun"),
        ("a.json", '{"message": {"errorCode": 1}}', [], 1, "an error file without a message"),
        ("a.log", "x", ["--kind", "flight"], 1, "neither a pickle nor JSON"),
        ("a.log", "x", ["--kind", "logs"], 2, "is not a folder"),
        ("a.log", "x", ["--kind", "other"], 2, "unicron classify --help shows how"),
        ("d/readme.txt", "x", [], 1, "neither a pickle nor JSON"),
        ("d/.hidden", "x", [], 1, "holds neither dumps"),
        ("d/rank_0", b"\x80\x04cposix\nsystem\n.", [], 1, "holds more than plain values"),
        ("d/rank_0", b"", [], 1, "none of 1 dumps can be read"),
    ],
)
def test_errors_say_what_is_wrong(
    tmp_path: Path, capsys: Any, name: str, content: Any, words: list[str], code: int, reason: str
) -> None:
    path = tmp_path / name.split("/")[0] if name else tmp_path / "nowhere"
    if content is not None:
        write(tmp_path / name, content)
    assert main(["classify", *words, str(path)]) == code
    error = capsys.readouterr().err
    assert reason in error.splitlines()[-1]
    assert error.startswith("unicron classify: ")


def test_two_dumps_of_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a_rank_0", DUMP)
    write(tmp_path / "b_rank_0", DUMP)
    assert main(["classify", str(tmp_path)]) == 1
    assert "two dumps of rank 0: a_rank_0 and b_rank_0" in capsys.readouterr().err


def test_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["classify", write(tmp_path / "a.log", f"[rank0]: {LATE}\n[rank1]: KeyError: '[x]'\n")]) == 0
    told = capsys.readouterr().out
    assert "FATAL: code, data or configuration is wrong" in told
    assert "rank 1" in told
    assert "KeyError: '[x]'" in told
    assert told.index("program.exception") < told.index("echoes and notes") < told.index("watchdog.timeout")
    assert main(["classify", write(tmp_path / "a.jsonl", '{"id": "first", "text": "KeyError: 1"}\n')]) == 0
    assert "first" in capsys.readouterr().out


def test_garbage_and_long_lines_are_bounded(tmp_path: Path, run: Run) -> None:
    garbage = bytes(range(256)) * 4096 + b"\nEIO " + b"\xff" * 100 + b"\n" + b"a" * (3 << 20) + b"\nKeyError: 'x'\n"
    assert run(write(tmp_path / "a.log", garbage))[0]["severity"] == "FATAL"


def test_text_is_streamed() -> None:
    """Never more than a line's piece of a file is held."""

    class Endless(io.RawIOBase):
        asked_max = 0
        left = 200

        def readline(self, limit: int | None = -1, /) -> bytes:
            assert limit is not None
            self.asked_max = max(self.asked_max, limit)
            self.left -= 1
            return b"x" * limit if self.left > 0 else b""

    stream = Endless()
    pieces = sum(1 for _ in inputs.text_lines(b"head\n", stream))  # type: ignore[arg-type]
    assert pieces >= 199
    assert stream.asked_max == inputs.LINE_BYTES


def test_a_row_that_never_ends_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setattr(inputs, "ROW_BYTES_MAX", 100_000)
    text = '{"id": "a", "text": "' + "x" * 200_000 + '"}\n'
    assert main(["classify", "--kind", "jsonl", write(tmp_path / "a.jsonl", text)]) == 1
    assert "a line is longer than" in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["classify", "--help"]) == 0
    assert "Example: unicron classify" in capsys.readouterr().out
