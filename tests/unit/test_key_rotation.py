"""Keys are replaced in three steps, at each of which whatever is in use anywhere is admitted everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron.runtime import key_rotation, keys
from unicron.runtime.key_rotation import finish, make_node, node_publics, prepare, publics, revoke, revoked, use
from unicron.runtime.keyring import LOOK_S, KeyRing


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    keys.make_directory(tmp_path / "keys")
    return tmp_path / "keys"


def copy(source: Path, target: Path, names: tuple[str, ...]) -> None:
    """What a person does after a step: the files that a machine has, as they are now."""
    target.mkdir(mode=0o700, exist_ok=True)
    for old in [*target.iterdir()]:
        old.unlink()
    for name in names:
        for path in source.glob(f"{name}.*"):
            (target / path.name).write_bytes(path.read_bytes())
            (target / path.name).chmod(0o600)


STEPS = (prepare, use, finish)


@pytest.mark.parametrize("steps_here", range(4))
@pytest.mark.parametrize("steps_there", range(4))
def test_machines_one_step_apart_understand_each_other(directory: Path, steps_here: int, steps_there: int) -> None:
    """Here the coordinator's directory; there an agent's, copied some steps ago."""
    other = directory.parent / "other"
    for step in range(max(steps_here, steps_there) + 1):
        if step:
            STEPS[step - 1](directory)
        if step == steps_there:
            copy(directory, other, ("agent", "worker", "coordinator"))
        if step == steps_here:
            copy(directory, directory.parent / "here", tuple(keys.ROLES))
    here = directory.parent / "here"
    shown, wanted = publics(other, "agent")[0], publics(here, "agent")
    server, known = publics(here, "coordinator")[0], publics(other, "coordinator")
    if abs(steps_here - steps_there) <= 1:
        assert shown in wanted and server in known
    if {steps_here, steps_there} == {0, 3}:  # the former keys are of no use in the end
        assert shown not in wanted and server not in known


def test_steps_out_of_order_are_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(keys.KeyProblem, match="no next keys"):
        use(directory)
    with pytest.raises(keys.KeyProblem, match="nothing to finish"):
        finish(directory)
    prepare(directory)
    with pytest.raises(keys.KeyProblem, match="under way"):
        prepare(directory)
    use(directory)
    with pytest.raises(keys.KeyProblem, match="under way"):
        prepare(directory)
    finish(directory)
    before = publics(directory, "agent")
    prepare(directory, ("agent",))
    assert publics(directory, "agent")[0] == before[0] and len(publics(directory, "worker")) == 1
    with pytest.raises(keys.KeyProblem, match="no keys in"):
        prepare(tmp_path / "none")


def test_a_nodes_key_is_revoked_for_good(directory: Path) -> None:
    pair, other = make_node(directory, "n3"), make_node(directory, "n4")
    assert node_publics(directory) == {pair.public: "n3", other.public: "n4"}
    for _ in range(2):
        assert revoke(directory, "n3") == pair.public
    assert revoked(directory) == {pair.public: "n3"} and node_publics(directory) == {other.public: "n4"}
    again = make_node(directory, "n3")  # the machine is clean again
    assert node_publics(directory) == {other.public: "n4", again.public: "n3"}
    assert pair.public in revoked(directory)


def test_what_cannot_be_revoked_is_named(directory: Path) -> None:
    with pytest.raises(keys.KeyProblem, match="no key of its own"):
        revoke(directory, "n7")
    with pytest.raises(keys.KeyProblem, match="every agent: replace it"):
        revoke(directory, publics(directory, "agent")[0])
    prepare(directory)
    leaked = publics(directory, "client")[1]
    revoke(directory, leaked)
    assert leaked not in publics(directory, "client")
    with pytest.raises(keys.KeyProblem, match="no name of a node"):
        make_node(directory, "../n3")


def test_a_ring_sees_each_change_once(directory: Path) -> None:
    now = [0.0]
    ring = KeyRing(directory, lambda: now[0])
    now[0] += LOOK_S
    assert not ring.changed()
    for change in (prepare, use, finish, lambda folder: make_node(folder, "n1"), lambda folder: revoke(folder, "n1")):
        change(directory)
        assert not ring.changed()  # it looks twice a second, not in every turn
        now[0] += LOOK_S
        assert ring.changed()
        now[0] += LOOK_S
        assert not ring.changed()
    assert key_rotation.NODES in {path.name for path in directory.iterdir()}
