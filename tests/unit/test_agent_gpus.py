"""A role keeps its GPU, whatever becomes of the node's other roles and tasks."""

from __future__ import annotations

from unicron.agent import gpus
from unicron.agent.state import Arena, State, Worker
from unicron.agent.transitions import Phase


def worker(name: str, rank: int, *, task: str = "t", waiting: bool = False, phase: Phase = Phase.READY) -> Worker:
    return Worker(name, task, 0, rank, waiting, 0, True, "", 1.0, phase=phase)


def node(*workers: Worker) -> State:
    state = State(workers={each.name: each for each in workers})
    for each in workers:
        gpus.index_of(state, each.task, each.rank)
        state.roles[each.task, each.rank] = f"arena-{each.name}"
    return state


def test_roles_are_counted_off_once() -> None:
    state = node(*(worker(f"w{rank}", rank) for rank in (4, 1, 7)))
    assert [gpus.index_of(state, "t", rank) for rank in (4, 1, 7)] == [0, 1, 2]
    assert [gpus.local_rank(state, "t", rank) for rank in (4, 1, 7)] == [0, 1, 2]


def test_an_heir_finds_its_predecessors_gpu_though_all_died() -> None:
    """A plan that names only one of two dead roles gave both of them GPU 0: NCCL refused ("Duplicate GPU")."""
    state = node(worker("w0", 0), worker("w1", 1))
    for each in state.workers.values():
        each.phase = Phase.GONE
    state.workers["w3"] = worker("w3", 1, waiting=True)
    assert gpus.index_of(state, "t", 1) == 1
    assert gpus.index_of(state, "t", 0) == 0


def test_an_understudy_gets_the_gpu_of_the_role_it_is_asked_to_take() -> None:
    state = node(worker("w0", 0), worker("w1", 1))
    state.workers["w2"] = worker("w2", 0, waiting=True)  # built for 0
    state.workers["w1"].phase = Phase.GONE
    assert gpus.index_of(state, "t", 0) == 0
    assert gpus.index_of(state, "t", 1, asks="w2") == 1


def test_a_standby_keeps_its_gpu_for_a_role_it_did_not_guess() -> None:
    state = State(workers={"w0": worker("w0", 0, waiting=True)})
    assert gpus.index_of(state, "t", 0) == 0
    assert gpus.index_of(state, "t", 5, asks="w0") == 0


def test_tasks_of_one_node_have_gpus_of_their_own() -> None:
    state = node(worker("a0", 0), worker("a1", 1))
    state.workers["b0"], state.workers["b1"] = worker("b0", 0, task="u"), worker("b1", 1, task="u")
    assert [gpus.index_of(state, "u", rank) for rank in (0, 1)] == [2, 3]
    assert [gpus.local_rank(state, "u", rank) for rank in (0, 1)] == [0, 1]


def test_gpus_of_roles_that_left_are_free_again() -> None:
    state = node(worker("w0", 0), worker("w1", 1))
    state.workers["w0"].phase = Phase.GONE
    state.arenas["arena-w0"] = Arena("arena-w0", "t", 0, "w0", 1, "")
    del state.roles["t", 0]
    assert gpus.index_of(state, "t", 9) == 0
