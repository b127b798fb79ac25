"""What the cluster should do, decided by expected FLOP over all tasks: strict input, plans, and plans in words.

The arithmetic is native (csrc/planner); here are its inputs as people write them, what each way of answering a failure
costs, and the explanation. Pure: the same cluster and event always give the same plan.
"""

from unicron.planner.cluster import Cluster, PlannerProblem, check
from unicron.planner.planner import Decision, Planner

__all__ = ["Cluster", "Decision", "Planner", "PlannerProblem", "check"]
