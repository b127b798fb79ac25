"""Hardware checks: three answers, bad only when it stays bad, a hang costs the answer and not the asker."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from unicron.runtime.checks import gpu_compute, kernel_log, machine, network
from unicron.runtime.checks.check import Answer, Check, Look, Reading, bad, known_checks, ok, unknown, worst
from unicron.runtime.checks.supervise import look_with, run_checks, verdict
from unicron.runtime.hardware import HardwareWatch

pytestmark = pytest.mark.timeout(60)

XID = "NVRM: Xid (PCI:0000:3b:00): {}, pid=1, name=python, {}"


@pytest.fixture
def kmsg() -> Iterator[tuple[Path, int]]:
    """(path, descriptor to write records to): a pipe whose packets stay apart, as the kernel's records do."""
    reader, writer = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
    yield Path(f"/proc/self/fd/{reader}"), writer
    os.close(reader)
    os.close(writer)


def say(writer: int, number: int, text: str) -> None:
    os.write(writer, f"4,{number},1000,-;{text}\n SUBSYSTEM=pci\n".encode())


# ---------------------------------------------------------------- what an answer is worth


def test_the_worst_of_several_devices_is_named() -> None:
    readings = [ok("a"), bad("b is broken"), unknown("c"), bad("d too")]
    assert worst(readings, "") == Reading(Answer.BAD, "b is broken; d too")
    assert worst([unknown("c"), ok("a")], "").answer is Answer.OK
    assert worst([], "none here") == unknown("none here")


def test_bad_must_stay_bad() -> None:
    answers = [bad("once"), ok("well again")]
    flapping = Check("c", lambda look: answers.pop(0), tries=3, pause_s=0.0)
    assert look_with(flapping, Look()).answer is Answer.UNKNOWN
    assert look_with(Check("c", lambda look: bad("always"), tries=3, pause_s=0.0), Look()).answer is Answer.BAD


def test_what_a_check_raises_is_no_evidence() -> None:
    def fails(look: Look) -> Reading:
        raise RuntimeError("driver and library do not match")

    result = look_with(Check("c", fails, tries=3), Look())
    assert result.answer is Answer.UNKNOWN and "do not match" in result.reason
    assert verdict([result]) == ""


def test_every_answer_on_this_machine_has_a_reason_and_nothing_raises(tmp_path: Path) -> None:
    for check in known_checks().values():
        if not check.disturbs:
            result = look_with(check, Look(tmp_path))
            assert result.reason and not result.reason.startswith(("TypeError", "AttributeError", "NameError"))


# ---------------------------------------------------------------- the process around them

SLEEPER = """
import sys, time
name = sys.argv[sys.argv.index("--only") + 1].split(",")
for each in name:
    print('{"type":"begun","check":"%s"}' % each, flush=True)
    if each == "hangs":
        time.sleep(60)
    if each == "dies":
        sys.exit(1)
    print('{"type":"ended","result":{"check":"%s","answer":"ok","reason":"fine"}}' % each, flush=True)
"""


def test_a_check_that_hangs_or_dies_is_unknown_and_the_others_go_on(tmp_path: Path) -> None:
    names = ("first", "hangs", "between", "dies", "last")
    checks = {name: Check(name, lambda look: ok(""), limit_s=1.0) for name in names}
    begun = time.monotonic()
    results = run_checks(tmp_path, is_idle=True, checks=checks, child=(sys.executable, "-c", SLEEPER))
    assert [r.check for r in results] == list(names)
    answers = {r.check: (r.answer.value, r.reason) for r in results}
    assert answers["hangs"] == ("unknown", "no answer in 1 s")
    assert answers["dies"] == ("unknown", "its process ended in the middle of it")
    assert all(answers[name][0] == "ok" for name in ("first", "between", "last"))
    assert time.monotonic() - begun < 30


def test_what_disturbs_waits_for_an_idle_node(tmp_path: Path) -> None:
    checks = {"heavy": Check("heavy", lambda look: ok(""), disturbs=True)}
    (result,) = run_checks(tmp_path, is_idle=False, checks=checks, child=("/bin/false",))
    assert result.answer is Answer.UNKNOWN and "workers" in result.reason
    (result,) = run_checks(tmp_path, is_idle=True, only=["nonsense"], checks=checks, child=("/bin/false",))
    assert result.answer is Answer.UNKNOWN


def test_the_real_checks_of_an_agent(tmp_path: Path, kmsg: tuple[Path, int]) -> None:
    """The process an agent starts, and what comes back as an event; then a line in the kernel log."""
    path, writer = kmsg
    watch = HardwareWatch(tmp_path, checks=True, kernel_log=path)
    try:
        events: list[object] = []
        deadline = time.monotonic() + 50
        while not events and time.monotonic() < deadline:
            events += watch.serve()
            time.sleep(0.02)
        (checked,) = events
        answers = {name: answer for name, answer, _ in checked.checks}  # type: ignore[attr-defined]
        assert answers.keys() == known_checks().keys() and answers["shared_memory"] == "ok"
        assert (tmp_path / "checks.json").is_file()
        say(writer, 9, XID.format(79, "GPU has fallen off the bus."))
        say(writer, 10, "usb 1-1: new device")
        (failed,) = watch.serve()
        assert failed.severity == "SEV1" and "Xid 79" in failed.text  # type: ignore[union-attr]
    finally:
        watch.close()
    assert watch.fds == ()


# ---------------------------------------------------------------- one kind of hardware each


def test_kernel_log_is_news_once(kmsg: tuple[Path, int]) -> None:
    path, writer = kmsg
    look = Look(kernel_log=path)
    say(writer, 1, "Linux version")
    say(writer, 2, XID.format(79, "GPU has fallen off the bus."))
    reading = kernel_log.kernel_log(look)
    assert reading.answer is Answer.BAD and "Xid 79" in reading.reason
    later = Look(kernel_log=path, before=look.now)
    say(writer, 2, XID.format(79, "GPU has fallen off the bus."))
    say(writer, 3, XID.format(13, "Graphics Exception"))  # the program's own fault
    assert kernel_log.kernel_log(later).answer is Answer.OK
    say(writer, 4, "mce: [Hardware Error]: Machine check: Uncorrected error, Fatal")
    assert kernel_log.kernel_log(Look(kernel_log=path, before=later.now)).answer is Answer.BAD


def test_a_kernel_log_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert kernel_log.kernel_log(Look(kernel_log=tmp_path / "none")).answer is Answer.UNKNOWN


def card(root: Path, name: str, *, crc: int, changes: int, state: str = "up") -> None:
    folder = root / "class/net" / name
    (folder / "statistics").mkdir(parents=True, exist_ok=True)
    (folder / "device").mkdir(exist_ok=True)
    (folder / "operstate").write_text(f"{state}\n")
    (folder / "carrier_changes").write_text(f"{changes}\n")
    (folder / "statistics/rx_crc_errors").write_text(f"{crc}\n")


def test_a_network_card_is_judged_by_what_is_new(tmp_path: Path) -> None:
    card(tmp_path, "eth0", crc=1_000_000, changes=90)
    look = Look(sys=tmp_path)
    assert network.interfaces(look).answer is Answer.OK  # the first look knows no growth
    card(tmp_path, "eth0", crc=1_000_050, changes=92)
    look = Look(sys=tmp_path, before=look.now)
    assert network.interfaces(look).answer is Answer.OK
    card(tmp_path, "eth0", crc=1_000_500, changes=92)
    reading = network.interfaces(Look(sys=tmp_path, before=look.now))
    assert reading.answer is Answer.BAD and "450 new rx_crc_errors" in reading.reason
    card(tmp_path, "eth0", crc=1_000_050, changes=99)
    reading = network.interfaces(Look(sys=tmp_path, before=look.now))
    assert reading.answer is Answer.BAD and "changed 7 times" in reading.reason
    card(tmp_path, "eth0", crc=0, changes=0)  # the driver was loaded anew
    assert network.interfaces(Look(sys=tmp_path, before=look.now)).answer is Answer.OK
    card(tmp_path, "eth0", crc=0, changes=0, state="down")
    assert network.interfaces(Look(sys=tmp_path)).answer is Answer.UNKNOWN


def test_an_address_that_the_agent_chose_must_stay(tmp_path: Path) -> None:
    assert network.addresses(Look()).answer is Answer.UNKNOWN
    assert network.addresses(Look(addresses=("127.0.0.1", "127.0.0.9"))).answer is Answer.OK
    gone = network.addresses(Look(addresses=("127.0.0.1", "192.0.2.77")))
    assert gone.answer is Answer.BAD and "has 192.0.2.77, which" in gone.reason
    watch = HardwareWatch(tmp_path, checks=False, addresses=("192.0.2.77", "192.0.2.77"))
    watch.check(is_idle=False)
    try:
        until = time.monotonic() + 60
        while not (told := watch.serve()) and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        watch.close()
    assert "addresses: no interface that is up has 192.0.2.77, which" in told[0].unfit


def test_infiniband_ports(tmp_path: Path) -> None:
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    (port / "counters").mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "counters/link_downed").write_text("3\n")
    look = Look(sys=tmp_path)
    assert network.infiniband(look) == ok("mlx5_0 port 1 is active")
    (port / "counters/link_downed").write_text("4\n")
    assert network.infiniband(Look(sys=tmp_path, before=look.now)).answer is Answer.BAD
    (port / "state").write_text("1: DOWN\n")
    assert network.infiniband(Look(sys=tmp_path)).answer is Answer.UNKNOWN
    assert network.infiniband(Look(sys=tmp_path / "none")).answer is Answer.UNKNOWN


def test_host_memory(tmp_path: Path) -> None:
    assert machine.host_memory(Look(sys=tmp_path)).answer is Answer.UNKNOWN
    controller = tmp_path / "devices/system/edac/mc/mc0"
    controller.mkdir(parents=True)
    (controller / "ce_count").write_text("12\n")
    (controller / "ue_count").write_text("0\n")
    look = Look(sys=tmp_path)
    assert machine.host_memory(look).answer is Answer.OK
    (controller / "ue_count").write_text("1\n")
    look = Look(sys=tmp_path, before=look.now)
    assert machine.host_memory(look).answer is Answer.BAD
    assert machine.host_memory(Look(sys=tmp_path, before=look.now)).answer is Answer.OK


def test_disk(tmp_path: Path) -> None:
    assert machine.disk(Look(tmp_path)).answer is Answer.OK
    assert machine.disk(Look(Path("/proc"))).answer is not Answer.OK


def test_gpu_checks_say_why_they_cannot_look(tmp_path: Path) -> None:
    if any(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*")):
        pytest.skip("there are GPUs here: tests/gpu/test_hardware_checks.py looks at them")
    for check in known_checks().values():
        if check.name.startswith("gpu_"):
            result = look_with(check, Look(tmp_path))
            assert result.answer is Answer.UNKNOWN and result.reason, check.name


def test_the_known_digest_does_not_depend_on_the_order_of_adding() -> None:
    left, right = gpu_compute.factors()
    flipped = left[:, ::-1] @ right[::-1]  # float32, another order
    assert gpu_compute.digest(flipped) == gpu_compute.product_digest()
    flipped[7, 9] += 1
    assert gpu_compute.digest(flipped) != gpu_compute.product_digest()
