"""The demo's judge: what it must pass, and every single thing it must not."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from unicron.demo import compare as judge
from unicron.demo import results, scenarios
from unicron.types import Layout

pytestmark = pytest.mark.timeout(60)

LAYOUT = Layout(tp=1, pp=1, dp=4, micro_batch=2, num_micro_batches=16)
HIT = scenarios.FAULT_ITERATION
SIZE = 8


class Folder:
    """A run's folder, written as record.py would."""

    def __init__(self, path, layout=LAYOUT, iterations=scenarios.ITERATIONS, magnitudes=False):
        path.mkdir()
        self.path, self.layout, self.iterations = path, layout, iterations
        for rank in range(layout.world_size):
            self._rank(rank, magnitudes)

    def _rank(self, rank, magnitudes):
        log = [{"event": "process", "pid": 100 + rank}]
        forwards = []
        share = self.layout.num_micro_batches // self.layout.dp
        first = self.layout.replica_of(rank) * share
        for iteration in range(self.iterations):
            log.append(self.line(iteration))
            for micro_batch in range(first, first + share):
                forwards.append({"iteration": iteration, "micro_batch": micro_batch, "pid": 1})
        self.write(f"rank_{rank}.jsonl", log)
        self.write(f"forwards_{rank}.jsonl", forwards)
        for iteration in scenarios.GRADIENT_WINDOW:
            self.gradient(iteration, rank, np.arange(SIZE) - 3.0)
            if magnitudes:
                name = f"magnitude_{iteration}_{rank}.npy"
                np.save(self.path / name, np.arange(SIZE, dtype=np.float32))
        self.state(rank, "ab" * 32, np.ones(SIZE))

    def line(self, iteration, **changed):
        return {
            "event": "iteration",
            "iteration": iteration,
            "loss": 5.5 - iteration * 0.05,
            "start_ns": iteration * 200_000_000,
            "commit_ns": (iteration + 1) * 200_000_000,
            "pid": 1,
            **changed,
        }

    def write(self, name, lines):
        with open(self.path / name, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def gradient(self, iteration, rank, values):
        np.save(self.path / f"gradient_{iteration}_{rank}.npy", values.astype(np.float32))

    def state(self, rank, digest, weights):
        facts = {"rank": rank, "sha256": digest, "parameters": 10, "tied": [], "iteration": 31}
        (self.path / f"state_{rank}.json").write_text(json.dumps(facts))
        np.save(self.path / f"weights_{rank}.npy", weights.astype(np.float32))


def incident(**changed):
    return {
        "id": "i1",
        "fault": "worker lost",
        "severity": "SEV2",
        "root": {"node": "n3", "rank": 3},
        "method": "process",
        "outcome": "healed",
        "detect_ms": 0.3,
        "decide_ms": 1.0,
        "resume_ms": 150.0,
        "lost_ms": 160.0,
        "state_source": "own_arena",
        "iterations_lost": 0,
        "micro_batches_recomputed": 3,
        "groups_kept": 0,
        "groups_rebuilt": 2,
        "cause": "signal 9",
        "text": "",
        "log": "/tmp/stderr.log",
        "iteration": HIT,
        "epoch": 2,
        **changed,
    }


@pytest.fixture
def reference(tmp_path):
    return results.load(Folder(tmp_path / "reference", magnitudes=True).path)


@pytest.fixture
def healed(tmp_path):
    """A run whose rank 3 was killed with two of four micro-batches summed, and replaced."""
    folder = Folder(tmp_path / "run")
    folder.write("rank_3.jsonl", [{"event": "process", "pid": 900}])
    again = [{"iteration": HIT, "micro_batch": m, "pid": 900} for m in (12, 13, 14)]
    folder.write("forwards_3.jsonl", again)
    return folder


def verdict(folder, reference, name="kill-compute", layout=LAYOUT, incidents=None, **observed):
    scenario = scenarios.make(name, layout)
    incidents = (incident(),) if incidents is None else tuple(incidents)
    observed.setdefault("task", {"outcome": "finished", "replicas": [0, 1, 2, 3]})
    return judge.compare(
        results.load(folder.path),
        reference,
        scenario,
        judge.Setting(layout, managed_median_ms=200.0),
        judge.Observed(incidents, **observed),
    )


def test_a_healed_run_passes_and_has_every_field(healed, reference):
    result = verdict(healed, reference)
    assert result["passed"], result["reasons"]
    assert result["outcome"] == "healed" and result["parameters"] == 10
    assert result["gradient"] == {"healed_max_rel_diff": 0.0}
    assert result["loss"]["first"] == 5.5 and result["loss"]["max_abs_diff"] == 0.0
    assert result["weights"]["sha256"] == result["weights"]["reference_sha256"]
    assert set(result) >= {
        *("scenario", "outcome", "layout", "optimizer", "recovery", "exact", "iterations"),
        *("parameters", "micro_batches", "loss", "gradient", "weights", "incidents"),
        *("iteration_ms", "left_behind"),
    }
    assert set(result["incidents"][0]) == set(judge.INCIDENT_FIELDS)
    json.dumps(result)


def reasons(folder, reference, **how):
    result = verdict(folder, reference, **how)
    assert not result["passed"]
    return " | ".join(result["reasons"])


def test_one_bit_of_the_gradient_is_too_much(healed, reference):
    values = (np.arange(SIZE) - 3.0).astype(np.float32)
    values[6] = np.nextafter(values[6], np.float32(10))
    healed.gradient(HIT, 1, values)
    assert "gradient differs" in reasons(healed, reference)


def test_one_differing_replica_is_seen(healed, reference):
    healed.state(2, "cd" * 32, np.ones(SIZE))
    assert "weights differ" in reasons(healed, reference)


def test_same_digest_everywhere_but_not_the_reference_s(healed, reference):
    for rank in range(4):
        healed.state(rank, "cd" * 32, np.full(SIZE, 1.5))
    assert "weights differ from the undisturbed run's, by at most 0.5" in reasons(healed, reference)


def test_too_much_computed_again(healed, reference):
    more = [{"iteration": HIT, "micro_batch": m, "pid": 1} for m in (0, 1)]
    healed.write("forwards_0.jsonl", more)
    assert "5 micro-batches began again, at most 4 may" in reasons(healed, reference)


def test_what_the_incident_says_must_be_what_was_counted(healed, reference):
    said = reasons(healed, reference, incidents=[incident(micro_batches_recomputed=2)])
    assert "say 2 micro-batches were computed again, 3 were" in said


def test_a_lost_node_may_have_begun_what_nobody_computed_again(tmp_path, reference):
    """It was ahead by one iteration, and the others dealt all of that one anew."""
    told = {count: incident(**{**NODE_LOST, "micro_batches_recomputed": count}) for count in (0, 2, 3, 4)}
    folder = resized(tmp_path)  # four were begun
    found = {count: verdict(folder, reference, name="node-lost", incidents=[told[count]]) for count in told}
    assert [found[count]["passed"] for count in told] == [True, False, False, True], found[0]["reasons"]


def test_an_interrupted_forward_elsewhere_counts_by_position(tmp_path, reference):
    """The same micro-batch begun by a dead rank and by a survivor is one computed again."""
    folder = Folder(tmp_path / "run")
    folder.write("forwards_0.jsonl", [{"iteration": HIT, "micro_batch": 12, "pid": 1}])
    assert judge.begun_again(results.load(folder.path), LAYOUT) == 1


def test_two_ranks_of_a_replica_count_once(tmp_path):
    layout = Layout(tp=1, pp=2, dp=2, num_micro_batches=8)
    folder = Folder(tmp_path / "run", layout)
    for rank in layout.replica_ranks(1):
        folder.write(f"forwards_{rank}.jsonl", [{"iteration": 3, "micro_batch": 5, "pid": 1}])
    assert judge.begun_again(results.load(folder.path), layout) == 1


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"severity": "SEV1"}, "severity is SEV1"),
        ({"method": "statistics"}, "seen by statistics"),
        ({"iterations_lost": 1}, "1 iterations lost"),
        ({"outcome": None}, "still open"),
        ({"outcome": "resized"}, "outcome is resized"),
    ],
)
def test_incidents_are_judged(healed, reference, changed, says):
    assert says in reasons(healed, reference, incidents=[incident(**changed)])


def test_no_incident_or_too_many(healed, reference):
    assert "0 incidents" in reasons(healed, reference, incidents=[])
    assert "2 incidents" in reasons(healed, reference, incidents=[incident(), incident(epoch=3)])


def test_incidents_that_end_together_tell_of_the_same_work():
    """A worker dies in the recovery of a lost node: two plans, and each incident tells of all that was done again."""
    times = {"opened_ms": 1000.0, "detect_ms": None, "resume_ms": 600.0, "epoch": 2}
    second = {"opened_ms": 1500.25, "detect_ms": 0.25, "resume_ms": 100.0, "epoch": 3}
    later = {**second, "opened_ms": 2000.0, "epoch": 4}
    told = [incident(**times), incident(**second), incident(**later)]
    assert judge.over_recoveries(judge.Observed(tuple(told[:2]), {}), "micro_batches_recomputed") == 3
    assert judge.over_recoveries(judge.Observed(tuple(told), {}), "micro_batches_recomputed") == 6


def test_left_behind(healed, reference):
    left = {"processes": 1, "shared_segments": 0}
    assert "1 processes left behind" in reasons(healed, reference, left_behind=left)


def test_a_loss_that_does_not_fall(tmp_path, reference):
    folder = Folder(tmp_path / "run", iterations=0)
    for rank in range(4):
        lines = [folder.line(i, loss=5.0) for i in range(scenarios.ITERATIONS)]
        folder.write(f"rank_{rank}.jsonl", lines)
    assert "the loss fell by 0.000" in reasons(folder, reference)


def test_a_run_that_did_not_end(tmp_path, reference):
    folder = Folder(tmp_path / "run", iterations=20)
    assert f"iteration {scenarios.ITERATIONS - 1} was not reached" in reasons(folder, reference)


def test_ranks_that_report_different_losses(healed, reference):
    healed.write("rank_2.jsonl", [healed.line(5, loss=1.0)])
    assert "iteration 5: rank" in reasons(healed, reference)


def test_a_replaced_worker_where_none_may_be(healed, reference):
    said = reasons(healed, reference, name="reset", incidents=[incident(severity="SEV3")])
    assert "1 workers were replaced, must be 0" in said


def test_half_a_line_is_not_a_line(healed, reference):
    with open(healed.path / "rank_3.jsonl", "a") as file:
        file.write('{"event": "iteration", "iter')
    assert verdict(healed, reference)["passed"]


# ------------------------------------------------------------------ other outcomes


def resized(tmp_path, factor=1.0):
    folder = Folder(tmp_path / "run")
    values = (np.arange(SIZE) - 3.0).astype(np.float32)
    values[6] += np.float32(24 * factor * 2.0**-23)  # 4 shares of magnitude 6
    for rank in range(3):
        folder.gradient(HIT, rank, values)
        folder.state(rank, "cd" * 32, np.ones(SIZE))
    again = [{"iteration": HIT, "micro_batch": m, "pid": 1} for m in (12, 13, 14, 15)]
    folder.write("forwards_0.jsonl", again)
    return folder


NODE_LOST = {
    "outcome": "resized",
    "severity": "SEV1",
    "fault": "node lost",
    "micro_batches_recomputed": 4,
}


def test_a_resized_run_passes_within_4_eps(tmp_path, reference):
    result = verdict(resized(tmp_path), reference, name="node-lost", incidents=[incident(**NODE_LOST)])
    assert result["passed"], result["reasons"]
    assert 0.5 * judge.EPS < result["gradient"]["healed_max_rel_diff"] <= 4 * judge.EPS


def test_the_first_differing_iteration_counts_whatever_the_incident_says(tmp_path, reference):
    late = incident(**NODE_LOST, iteration=HIT + 3)
    folder = resized(tmp_path, factor=8.0)
    said = reasons(folder, reference, name="node-lost", incidents=[late])
    assert "the gradient differs by 8.00 eps" in said


@pytest.mark.parametrize("known", [-1, scenarios.FAULT_ITERATION - 1])
@pytest.mark.parametrize("again", [(), (HIT,), (10,), (10, 11, HIT)])
def test_an_incident_that_does_not_know_the_iteration_is_no_authority(tmp_path, reference, known, again):
    """Who was lost with its node could not say where it was, nor what it had begun; a return to a checkpoint does more
    again than was interrupted. All gradients are the reference's."""
    healed = Folder(tmp_path / "run")
    healed.write("forwards_0.jsonl", [{"iteration": i, "micro_batch": 1, "pid": 1} for i in again])
    lost = incident(fault="node lost", severity="SEV1", iteration=known)
    result = verdict(healed, reference, name="node-standby", incidents=[lost])
    assert result["gradient"] == {"healed_max_rel_diff": 0.0}


def test_a_resized_run_beyond_4_eps(tmp_path, reference):
    folder = resized(tmp_path, factor=8.0)
    said = reasons(folder, reference, name="node-lost", incidents=[incident(**NODE_LOST)])
    assert "the gradient differs by 8.00 eps" in said


def test_a_task_that_did_not_grow_back(tmp_path, reference):
    said = reasons(
        resized(tmp_path),
        reference,
        name="node-lost",
        incidents=[incident(**NODE_LOST)],
        task={"outcome": "finished", "replicas": [0, 1, 2]},
    )
    assert "3 of 4 replicas at the end" in said


def test_the_coordinator_s_loss_must_not_pause_training(tmp_path, reference):
    folder = Folder(tmp_path / "run")
    result = verdict(folder, reference, name="coordinator", incidents=[])
    assert result["passed"] and result["outcome"] == "unaffected" and result["gradient"] is None
    for rank in range(4):
        folder.write(f"rank_{rank}.jsonl", [folder.line(scenarios.ITERATIONS, commit_ns=10_000_000_000)])
    assert "training paused" in reasons(folder, reference, name="coordinator", incidents=[])


def test_fatal(tmp_path, reference):
    folder = Folder(tmp_path / "run", iterations=HIT)
    first = incident(method="exception", text="ValueError: poisoned sample")
    second = {**first, "severity": "FATAL", "outcome": "stopped", "epoch": 0}
    task = {"outcome": "stopped", "replicas": []}
    result = verdict(folder, reference, name="fatal", incidents=[first, second], task=task)
    assert result["passed"], result["reasons"]
    assert (result["loss"], result["gradient"], result["weights"]) == (None, None, None)
    blamed = reasons(
        folder,
        reference,
        name="fatal",
        incidents=[first, {**second, "log": ""}],
        task=task,
        nodes_blamed=("n3",),
    )
    assert "where the log is" in blamed and "['n3'] are blamed" in blamed


# ------------------------------------------------------------------ elements


def test_a_managed_run_must_learn_what_an_unmanaged_one_does(tmp_path, reference):
    folder = Folder(tmp_path / "run")
    assert judge.early_loss_difference(results.load(folder.path), reference) == 0.0
    folder.write("rank_0.jsonl", [folder.line(0, loss=5.545)])
    difference = judge.early_loss_difference(results.load(folder.path), reference)
    assert difference > judge.UNMANAGED_LOSS_MAX


def test_zero_over_zero_is_zero_and_something_over_zero_is_not():
    zeros, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
    assert judge.element_difference(zeros, zeros, zeros) == 0.0
    assert judge.element_difference(ones, zeros, zeros) == float("inf")
    assert judge.element_difference(ones, zeros, None) == float("inf")
    assert judge.element_difference(ones, zeros, 4 * ones) == 0.25
    assert judge.element_difference(ones * np.nan, zeros, ones) == float("inf")
    assert judge.element_difference(ones * np.nan, ones * np.inf, ones) == 0.0  # it overflowed in both
    assert judge.element_difference(np.array([np.inf, 1.0]), np.array([np.inf, 0.0]), np.array([np.nan, 4.0])) == 0.25
    assert judge.element_difference(ones, np.zeros(2), ones) == float("inf")


def test_magnitudes_of_tied_embeddings_are_those_of_both_stages(tmp_path):
    layout = Layout(tp=1, pp=2, dp=2, num_micro_batches=8)
    folder = Folder(tmp_path / "run", layout, magnitudes=True)
    for rank in range(4):
        facts = {"rank": rank, "sha256": "x", "parameters": 1, "tied": [[2, 4]], "iteration": 31}
        (folder.path / f"state_{rank}.json").write_text(json.dumps(facts))
    run = results.load(folder.path)
    own = judge.magnitude(run, HIT, 0, layout)
    expected = 2 * np.arange(SIZE, dtype=np.float64)
    expected[2:4] *= 2
    assert np.array_equal(own, expected)


@pytest.mark.parametrize("sizes", [(1, 1, 4), (2, 1, 2), (1, 2, 2)])
def test_every_scenario_can_be_made_at_every_layout(sizes):
    tp, pp, dp = sizes
    layout = Layout(tp=tp, pp=pp, dp=dp, micro_batch=2, num_micro_batches=4 * dp)
    for name in scenarios.names():
        scenario = scenarios.make(name, layout, seed=3)
        assert scenario.name == name and scenario.says
        for fault in scenario.faults:
            assert 0 <= fault.rank < layout.world_size
            assert fault.iteration < scenario.iterations + scenario.expect.at_end
        for act in scenario.acts:
            assert -1 <= act.node < dp and -1 <= act.replica < dp
    holders = scenarios.make("checkpoint", layout).faults
    assert {layout.replica_of(f.rank) for f in holders} == set(range(dp))
    assert not {"random-kills", "drain"} & set(scenarios.in_all()) and len(scenarios.in_all()) == 22


def test_random_kills_are_a_function_of_the_seed():
    one, same, other = (scenarios.make("random-kills", LAYOUT, seed) for seed in (1, 1, 2))
    assert one.faults == same.faults != other.faults and len(one.faults) == 30
    iterations = [fault.iteration for fault in one.faults]
    assert iterations == sorted(iterations) and iterations[-1] < one.iterations - 5


def test_a_layout_that_did_not_become_narrower_and_wide_again_is_told(healed, reference):
    expect = dataclasses.replace(scenarios.make("kill-compute", LAYOUT).expect, outcome="resized", narrowed_to=3)
    result = verdict(healed, reference)
    observed = judge.Observed((), {"replicas": [0, 1, 2, 3], "layout_changes": [{"to": "1,1,3,sharded"}]})
    (wrong,) = [text for text in judge._resized(result, observed, expect, LAYOUT) if "its layout had" in text]
    assert wrong == "its layout had [3] replicas, one after the other, must be [3, 4]"


def test_a_rank_of_another_layout_is_compared_by_its_place(tmp_path):
    wide = Layout(pp=2, dp=2, num_micro_batches=4)
    run = results.Run(states={1: {"place": [0, 1], "sha256": "b"}, 0: {"place": [0, 0], "sha256": "a"}})
    assert judge.ranks_at(run, wide) == {(0, 0, 0): [0], (0, 0, 1): [1]}
    run.begun.update({((0, 0), 3, 1): 1, ((0, 1), 3, 1): 1, ((0, 1), 4, 0): 2})
    assert judge.begun_again(run, wide) == 1, "two stages of one micro-batch are no repetition"
