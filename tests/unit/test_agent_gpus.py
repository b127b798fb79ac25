"""A role keeps its GPU, whatever becomes of the node's other roles and tasks."""

from __future__ import annotations

from machines import Agent
from unicron.agent import events as on
from unicron.agent import gpus
from unicron.agent.actions import GrantGpu
from unicron.agent.state import State, Worker
from unicron.agent.transitions import Phase
from unicron.messages import GpuRequest
from unicron.types import EpochPlan, Layout, Member, PlanKind

NODE = "n0"


def worker(name: str, rank: int, *, task: str = "t", waiting: bool = False, phase: Phase = Phase.READY) -> Worker:
    return Worker(name, task, 0, rank, waiting, 0, True, "", 1.0, phase=phase)


def gpu_of(state: State, rank: int, asks: str = "", *, task: str = "t", num_gpus: int = 4) -> int:
    if asks in state.workers:
        state.workers[asks].built_for = rank
    return gpus.gpu_of(state, NODE, GpuRequest(task, asks, rank, num_gpus))


def start(state: State, *workers: Worker) -> State:
    """Each asks for its GPU; a member's arena is kept from then on."""
    for each in workers:
        state.workers[each.name] = each
        gpu_of(state, each.rank, each.name, task=each.task)
        if not each.waiting:
            state.roles[each.task, each.rank] = f"arena-{each.name}"
    return state


def plan(state: State, *ranks: int, task: str = "t", elsewhere: tuple[int, ...] = ()) -> None:
    members = [Member(rank, NODE, f"w{rank}", 0) for rank in ranks]
    members += [Member(rank, "n9", f"x{rank}", 0) for rank in elsewhere]
    made = EpochPlan(task, 1, PlanKind.REPLACE, Layout(), (0,), tuple(members), (), (), "", "", "", (), "")
    state.plans[task] = made


def test_roles_are_counted_off_once() -> None:
    state = start(State(), *(worker(f"w{rank}", rank) for rank in (4, 1, 7)))
    assert [gpu_of(state, rank) for rank in (4, 1, 7)] == [0, 1, 2]


def test_heirs_find_their_predecessors_gpus_though_all_died() -> None:
    """A plan that names only one of the dead roles gave each of them GPU 0: NCCL refused ("Duplicate GPU")."""
    state = start(State(), *(worker(f"w{rank}", rank) for rank in range(3)))
    for each in state.workers.values():
        each.phase = Phase.GONE
    plan(state, 2)
    state.workers["h1"] = worker("h1", 1, waiting=True)
    assert gpu_of(state, 1, "h1") == 1
    assert [gpu_of(state, rank) for rank in (2, 0)] == [2, 0]


def test_an_understudy_gets_the_gpu_of_the_role_it_is_asked_to_take() -> None:
    state = start(State(), worker("w0", 0), worker("w1", 1), worker("u", 0, waiting=True))
    state.workers["w1"].phase = Phase.GONE
    assert gpu_of(state, 0) == 0
    assert gpu_of(state, 1, "u") == 1


def test_a_standby_keeps_its_gpu_for_a_role_it_did_not_guess() -> None:
    state = start(State(), worker("s", 0, waiting=True), worker("r", 3, waiting=True))
    assert gpu_of(state, 5, "s") == 0
    assert gpu_of(state, 6, "r") == 1


def test_tasks_of_one_node_have_gpus_of_their_own() -> None:
    state = start(State(), *(worker(f"{task}{rank}", rank, task=task) for task in "tu" for rank in (0, 1)))
    assert [gpu_of(state, rank, task="u") for rank in (0, 1)] == [2, 3]


def test_another_task_gets_what_a_narrower_one_left() -> None:
    """Its arenas are kept, and its roles come back to other ones: it is no reason to share a GPU with a living role."""
    state = start(State(), *(worker(f"w{rank}", rank) for rank in range(4)))
    plan(state, 0, 1)
    for rank in (2, 3):
        state.workers[f"w{rank}"].phase = Phase.GONE
    start(state, *(worker(f"v{rank}", rank, task="v") for rank in (0, 1)))
    assert [gpu_of(state, rank, task="v") for rank in (0, 1)] == [2, 3]
    for rank in (0, 1):  # the other way round: a role that comes back finds its GPU taken
        state.workers[f"w{rank}"].phase = Phase.GONE
    plan(state, 2)
    assert gpu_of(state, 2) == 0


def test_a_guess_of_a_role_that_left_gives_way() -> None:
    state = start(State(), worker("w0", 0), worker("u", 0, waiting=True))
    state.workers["w0"].phase = Phase.GONE
    del state.roles["t", 0]
    plan(state, elsewhere=(0,))
    assert gpu_of(state, 7, "joiner", num_gpus=1) == 0


def test_more_roles_than_gpus_are_refused() -> None:
    state = start(State(), worker("w0", 0), worker("w1", 1))
    assert gpu_of(state, 2, "w2", num_gpus=2) == -1
    assert gpu_of(state, 1, num_gpus=2) == 1


def test_the_agent_answers_by_role_and_says_why_not() -> None:
    agent = Agent()
    agent.live(("n0.w0", 0, 0, False), ("n0.w1", 0, 1, False), ("n0.w2", 1, 0, True))
    granted = {}
    for name, rank in (("n0.w1", 1), ("n0.w0", 0), ("n0.w2", 0), ("n0.w2", 1), ("n0.w2", 7)):
        actions = agent.feed(on.GpuRequested(f"{name}-{rank}", GpuRequest("t", name, rank, 2)))
        (grant,) = [action for action in actions if isinstance(action, GrantGpu)]
        granted[name, rank] = grant
    assert {role: grant.index for role, grant in granted.items()} == {
        ("n0.w1", 1): 0, ("n0.w0", 0): 1, ("n0.w2", 0): 1, ("n0.w2", 1): 0, ("n0.w2", 7): -1,
    }  # fmt: skip
    assert "all have roles" in granted["n0.w2", 7].reason
    assert [agent.machine.state.workers[name].status().gpu for name in ("n0.w0", "n0.w1")] == [True, True]
    assert not agent.machine.state.workers["n0.w2"].status().gpu, "the last that it asked for was refused"
