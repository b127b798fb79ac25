#include "planner/placement.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <tuple>

#include "base/error.h"

namespace unicron::planner {

namespace {

constexpr size_t kNone = SIZE_MAX;

void require(bool is_true, const std::string& message) {
  if (!is_true) throw Error(ErrorCode::kInvalidArgument, message);
}

class Placer {
 public:
  Placer(const std::vector<NodeSpace>& nodes, const std::vector<TaskNeed>& tasks);
  Placement run();

 private:
  void give(size_t task, size_t node, int32_t slots);
  // A task that shrinks leaves nodes with remembered faults, then those where it has least.
  void release_surplus(size_t task);
  // Takes one group away from the task with the narrowest groups on the node, if narrower than `below`.
  void release_narrowest(size_t node, int32_t below);
  // Returns the slots that found no place.
  int32_t fill(size_t task);
  size_t best_node(size_t task, const std::vector<int32_t>& in_domain) const;
  // Pushes narrower groups off the node where that costs the fewest slots.
  size_t make_room(int32_t group);
  size_t num_domains() const;

  const std::vector<NodeSpace>& nodes_;
  const std::vector<TaskNeed>& tasks_;
  std::vector<std::vector<int32_t>> held_;  // [task][node]
  std::vector<int32_t> totals_;             // per task
  std::vector<int32_t> free_;               // per node
};

Placer::Placer(const std::vector<NodeSpace>& nodes, const std::vector<TaskNeed>& tasks)
    : nodes_(nodes), tasks_(tasks), held_(tasks.size()), totals_(tasks.size()) {
  for (const NodeSpace& node : nodes) free_.push_back(node.slots);
  for (size_t task = 0; task < tasks.size(); ++task) {
    held_[task].assign(nodes.size(), 0);
    for (size_t node = 0; node < nodes.size(); ++node) {
      const int32_t whole = std::min(tasks[task].current[node], nodes[node].slots);
      give(task, node, whole - whole % tasks[task].group);
    }
  }
}

Placement Placer::run() {
  for (size_t task = 0; task < tasks_.size(); ++task) release_surplus(task);
  for (size_t node = 0; node < nodes_.size(); ++node) {
    while (free_[node] < 0) release_narrowest(node, INT32_MAX);
  }
  std::vector<size_t> order(tasks_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [this](size_t a, size_t b) { return tasks_[a].group > tasks_[b].group; });
  Placement result;
  result.unplaced.assign(tasks_.size(), 0);
  for (const size_t task : order) result.unplaced[task] = fill(task);
  for (size_t task = 0; task < tasks_.size(); ++task) {
    for (size_t node = 0; node < nodes_.size(); ++node) {
      result.moves += std::max(0, held_[task][node] - tasks_[task].current[node]);
    }
  }
  result.slots = std::move(held_);
  return result;
}

void Placer::give(size_t task, size_t node, int32_t slots) {
  held_[task][node] += slots;
  totals_[task] += slots;
  free_[node] -= slots;
}

void Placer::release_surplus(size_t task) {
  while (totals_[task] > tasks_[task].count) {
    size_t worst = kNone;
    const auto rank = [&](size_t node) {
      const bool is_overfull = free_[node] < 0;
      return std::make_tuple(!is_overfull, -nodes_[node].faults, held_[task][node]);
    };
    for (size_t node = 0; node < nodes_.size(); ++node) {
      if (held_[task][node] > 0 && (worst == kNone || rank(node) < rank(worst))) worst = node;
    }
    give(task, worst, -tasks_[task].group);
  }
}

void Placer::release_narrowest(size_t node, int32_t below) {
  size_t narrowest = kNone;
  for (size_t task = 0; task < tasks_.size(); ++task) {
    if (held_[task][node] == 0 || tasks_[task].group >= below) continue;
    if (narrowest == kNone || tasks_[task].group < tasks_[narrowest].group) narrowest = task;
  }
  give(narrowest, node, -tasks_[narrowest].group);
}

int32_t Placer::fill(size_t task) {
  std::vector<int32_t> in_domain(num_domains());
  for (size_t node = 0; node < nodes_.size(); ++node) {
    in_domain[static_cast<size_t>(nodes_[node].domain)] += held_[task][node];
  }
  const int32_t group = tasks_[task].group;
  while (totals_[task] < tasks_[task].count) {
    size_t node = best_node(task, in_domain);
    if (node == kNone) node = make_room(group);
    if (node == kNone) break;
    give(task, node, group);
    in_domain[static_cast<size_t>(nodes_[node].domain)] += group;
  }
  return tasks_[task].count - totals_[task];
}

size_t Placer::best_node(size_t task, const std::vector<int32_t>& in_domain) const {
  const int32_t missing = tasks_[task].count - totals_[task];
  const auto rank = [&](size_t node) {
    const int32_t left = free_[node] - missing;
    return std::make_tuple(nodes_[node].faults, held_[task][node] == 0,
                           held_[task][node] == 0 ? in_domain[static_cast<size_t>(nodes_[node].domain)] : 0, left < 0,
                           std::abs(left));
  };
  size_t best = kNone;
  for (size_t node = 0; node < nodes_.size(); ++node) {
    if (free_[node] >= tasks_[task].group && (best == kNone || rank(node) < rank(best))) best = node;
  }
  return best;
}

size_t Placer::make_room(int32_t group) {
  size_t best = kNone;
  for (size_t node = 0; node < nodes_.size(); ++node) {
    int32_t space = free_[node];
    for (size_t task = 0; task < tasks_.size(); ++task) {
      if (tasks_[task].group < group) space += held_[task][node];
    }
    const auto rank = [&](size_t at) { return std::make_tuple(-free_[at], nodes_[at].faults); };
    if (space >= group && (best == kNone || rank(node) < rank(best))) best = node;
  }
  while (best != kNone && free_[best] < group) release_narrowest(best, group);
  return best;
}

size_t Placer::num_domains() const {
  int32_t most = -1;
  for (const NodeSpace& node : nodes_) most = std::max(most, node.domain);
  return static_cast<size_t>(most) + 1;
}

}  // namespace

Placement place(const std::vector<NodeSpace>& nodes, const std::vector<TaskNeed>& tasks) {
  require(nodes.size() <= kNodesMax, "too many nodes");
  for (const NodeSpace& node : nodes) {
    require(node.slots >= 0 && node.faults >= 0, "slots and faults of a node must be 0 or more");
    require(node.domain >= 0 && static_cast<size_t>(node.domain) < kNodesMax, "a failure domain is out of range");
  }
  for (const TaskNeed& task : tasks) {
    require(task.group >= 1 && task.count >= 0 && task.count % task.group == 0,
            "a task's count must be a multiple of its group");
    require(task.current.size() == nodes.size(), "current: one entry per node");
    require(std::all_of(task.current.begin(), task.current.end(), [](int32_t slots) { return slots >= 0; }),
            "current must be 0 or more");
  }
  return Placer(nodes, tasks).run();
}

}  // namespace unicron::planner
