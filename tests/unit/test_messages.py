"""Messages that cannot be taken are refused by name: truncated, another version, too large, of unknown type."""

from __future__ import annotations

import msgspec
import pytest

from unicron.coordinator.journal import (
    JournalUnreadable,
    TaskHeld,
    TermBegan,
    decode_entry,
    encode_entry,
)
from unicron.messages import (
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    EndWorker,
    Malformed,
    MessageRefused,
    PublishEpoch,
    Reply,
    Request,
    StopTask,
    TooLarge,
    UnknownVersion,
    decode,
    encode,
)
from unicron.runtime.store_wire import Op, StoreMalformed, StoreRequest, decode_request
from unicron.runtime.store_wire import encode as encode_store
from unicron.types import Budgets, EpochPlan, Layout, Member, PlanKind

PLAN = EpochPlan("t", 3, PlanKind.SHRINK, Layout(dp=2), (1,), (Member(1, "n1", "n1.w0", 0),), (0,), (), "tcp://n1:7000")


@pytest.mark.parametrize("message", [EndWorker("t", "n0.w0", "evidence"), PublishEpoch(PLAN), Reply(ok=True)])
def test_round_trip(message: object) -> None:
    assert decode(encode(message)) == message


def test_every_truncation_is_refused() -> None:
    data = encode(PublishEpoch(PLAN))
    for length in range(len(data)):
        with pytest.raises(Malformed):
            decode(data[:length])


def test_other_version() -> None:
    data = encode(Reply(ok=True))
    with pytest.raises(UnknownVersion, match=f"version 9, this unicron speaks {PROTOCOL_VERSION}"):
        decode(b"\x09" + data[1:])
    for version in (PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1):
        assert decode(bytes((version,)) + data[1:]) == Reply(ok=True)
    for version in (PROTOCOL_VERSION - 2, PROTOCOL_VERSION + 2):
        with pytest.raises(UnknownVersion, match="one version at a time"):
            decode(bytes((version,)) + data[1:])


#: What 0.5.0 knows of what is in every plan: it refuses a plan with more.
OF_0_5_0 = {
    Layout: {"tp", "pp", "dp", "cp", "ep", "micro_batch", "num_micro_batches", "exact", "sharded", "buddy",
             "buddy_every"},
    Member: {"rank", "node", "worker", "incarnation"},
    EpochPlan: {"task", "epoch", "kind", "layout", "replicas", "members", "touched", "heirs", "store", "store_key",
                "restore", "incidents", "reason"},
    Budgets: {"iteration_ms", "first_iteration_ms", "evaluation_ms", "save_ms"},
}  # fmt: skip


@pytest.mark.parametrize("struct", OF_0_5_0)
def test_who_is_not_upgraded_yet_reads_what_says_nothing_new(struct: type[msgspec.Struct]) -> None:
    """Such a plan has no field that it does not know: a new one is left out while it has its default."""
    plan = msgspec.structs.replace(PLAN, layout=Layout(2, 1, 4, 1, 1, 2, 8, True, True, True, 3))
    made = {Layout: plan.layout, Member: plan.members[0], EpochPlan: plan, Budgets: Budgets(1.0, 2.0, 3.0, 4.0)}
    assert set(msgspec.to_builtins(made[struct])) <= OF_0_5_0[struct]


def test_too_large_both_ways() -> None:
    with pytest.raises(TooLarge, match="limit"):
        encode(Reply(ok=False, error="x" * MESSAGE_BYTES_MAX))
    with pytest.raises(TooLarge, match="limit"):
        decode(bytes(MESSAGE_BYTES_MAX + 1))


def test_unknown_type_and_unknown_field() -> None:
    version = bytes((PROTOCOL_VERSION,))
    with pytest.raises(Malformed):
        decode(version + msgspec.msgpack.encode({"message": "Takeover", "node": "n0"}))
    newer = {"message": "StopTask", "task": "t", "reason": "r", "more": 1}  # of a version that says more
    assert decode(version + msgspec.msgpack.encode(newer)) == StopTask("t", "r")
    with pytest.raises(Malformed):
        decode(version + msgspec.msgpack.encode({"message": "StopTask", "task": 7, "reason": "r"}))


def test_text_that_is_none_and_nesting_without_end() -> None:
    """Found by `make fuzz`: each ended the daemon that read it."""
    data = encode(StopTask("t", "because"))
    with pytest.raises(Malformed, match="utf-8"):
        decode(data.replace(b"because", b"be\xffause"))
    deep = encode(Request("submit", {"job": None})).removesuffix(b"\xc0") + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(Malformed, match="recursion"):
        decode(deep)
    entry = encode_entry(TaskHeld("t", True, "because"))
    with pytest.raises(JournalUnreadable):
        decode_entry(entry.replace(b"because", b"be\xffause"))
    with pytest.raises(StoreMalformed):
        decode_request(encode_store(StoreRequest(Op.GET, 1, ["t/1/key"])).replace(b"key", b"k\xffy"))


def test_refusals_have_one_base() -> None:
    for kind in (TooLarge, UnknownVersion, Malformed):
        assert issubclass(kind, MessageRefused)


def test_journal_entry_round_trip_and_refusals() -> None:
    data = encode_entry(TermBegan(4))
    assert decode_entry(data) == TermBegan(4)
    for broken in (b"", data[:-1], b"\x07" + data[1:], data[:1] + msgspec.msgpack.encode({"entry": "Nothing"})):
        with pytest.raises(JournalUnreadable):
            decode_entry(broken)
