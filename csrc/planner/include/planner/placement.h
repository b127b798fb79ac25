// Counts become places: which node gives how many slots to which task.
//
// Rules, strongest first: a tensor-parallel group lies inside one node; only healthy slots count; what lies well stays
// (a task that keeps or grows moves nothing of what it has); nodes with fewer remembered faults first; few nodes a
// task; a new node in the failure domain (rack, switch) where the task has least, so that losing a domain costs the
// fewest replicas; the tightest fit, so that whole nodes stay free for wide groups.
//
// Tasks with wide groups are placed first and may push out narrower groups, fewest slots first, which are placed after
// them: this ends, because a group only gives way to a wider one. Rejected: an exact assignment. It is bin packing;
// with groups that divide each other this order finds a place whenever there is one, and only push-outs may be more
// than the fewest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace unicron::planner {

constexpr size_t kNodesMax = 1 << 16;

struct NodeSpace {
  int32_t slots = 0;   // healthy ones; 0 for a node that is lost, drained or isolated
  int32_t domain = 0;  // failure domain
  int32_t faults = 0;  // remembered against it
};

struct TaskNeed {
  int32_t count = 0;             // slots, a multiple of group
  int32_t group = 1;             // slots that must share a node (tp)
  std::vector<int32_t> current;  // slots per node before
};

struct Placement {
  std::vector<std::vector<int32_t>> slots;  // [task][node]
  std::vector<int32_t> unplaced;            // slots per task for which no node had room
  int64_t moves = 0;                        // slots that a task gets on a node beyond what it had there
};

// Throws kInvalidArgument for negative numbers, counts that are no multiple of the group, and wrong lengths.
Placement place(const std::vector<NodeSpace>& nodes, const std::vector<TaskNeed>& tasks);

}  // namespace unicron::planner
