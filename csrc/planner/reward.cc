#include "planner/reward.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "base/error.h"

namespace unicron::planner {

namespace {

constexpr int kMantissaBits = 52;  // one below a double's 53, so that a sum that meets its bound is still exact

void require(bool is_true, const char* message) {
  if (!is_true) throw Error(ErrorCode::kInvalidArgument, message);
}

void require(bool is_true, const std::string& message) { require(is_true, message.c_str()); }

bool is_duration(double seconds) { return std::isfinite(seconds) && seconds >= 0; }

void check_task(const Task& task, size_t index, double transition_s_max) {
  const std::string who = "task " + std::to_string(index) + ": ";
  require(!task.counts.empty(), who + "no reachable count");
  require(task.counts.size() == task.flops.size() && task.counts.size() == task.transition_s.size(),
          who + "counts, flops and transition_s differ in length");
  require(task.counts.front() >= 0 && task.counts.back() <= kSlotsMax, who + "a count is out of range");
  require(std::adjacent_find(task.counts.begin(), task.counts.end(), std::greater_equal<>()) == task.counts.end(),
          who + "counts must ascend");
  require(task.current >= 0 && task.current <= kSlotsMax, who + "current is out of range");
  require(std::isfinite(task.current_flops) && task.current_flops >= 0,
          who + "current_flops must be finite, 0 or more");
  require(std::all_of(task.flops.begin(), task.flops.end(), [](double value) { return std::isfinite(value); }),
          who + "flops must be finite");
  require(std::all_of(task.transition_s.begin(), task.transition_s.end(),
                      [=](double seconds) { return is_duration(seconds) && seconds <= transition_s_max; }),
          who + "transition_s must lie between 0 and transition_s_max");
}

// std::nearbyint without the call: beyond 2^52 a double has no fraction. Exact for magnitudes up to 2^51, which holds
// for quanta because a key, at least twice as large, stays below 2^52.
double nearest(double value) {
  constexpr double kNoFraction = 6755399441055744.0;  // 1.5 * 2^52
  return (value + kNoFraction) - kNoFraction;
}

struct Points {
  const int32_t* counts;
  const double* flops;
  const double* transition_s;
  size_t size;
};

// For loops without branches: they become vector instructions.
#if defined(__GNUC__) && !defined(__clang__)
#define UNICRON_VECTORIZE __attribute__((optimize("tree-vectorize")))
#else
#define UNICRON_VECTORIZE
#endif

UNICRON_VECTORIZE bool is_each_within(const std::vector<double>& seconds, double most) {
  int num_bad = 0;
  for (const double value : seconds) {
    const bool is_finite_good = value >= 0 && value <= most;
    num_bad += is_finite_good || value == std::numeric_limits<double>::infinity() ? 0 : 1;
  }
  return num_bad == 0;
}

UNICRON_VECTORIZE void fill_keys(const Points& points, const Task& task, const Scale& scale, double* keys) {
  const double running_s = scale.running_s;
  const double quanta_per_flop = 1 / scale.quantum_flop;  // a power of two, so exact
  const double moves_base = scale.moves_base;
  const double current_flops = task.current_flops;
  const int32_t current = task.current;
  for (size_t at = 0; at < points.size; ++at) {
    const double reward_flop = points.flops[at] * running_s - current_flops * points.transition_s[at];
    const double moves = std::abs(points.counts[at] - current);
    keys[at] = nearest(reward_flop * quanta_per_flop) * moves_base - moves;
  }
}

double power_of_two_above(double value) { return std::exp2(std::ceil(std::log2(value))); }

}  // namespace

double FailureRate::per_slot_s() const {
  require(prior_failures > 0 && failures >= 0 && slot_s >= 0 && prior_slot_s > 0 &&
              std::isfinite(prior_failures + failures + slot_s + prior_slot_s),
          "a failure rate needs a positive prior and finite counts of 0 or more");
  return (prior_failures + failures) / (prior_slot_s + slot_s);
}

double FailureRate::running_s(int64_t pool) const {
  return 1.0 / (per_slot_s() * static_cast<double>(std::max<int64_t>(pool, 1)));
}

double Scale::reward_flop(double key) const { return std::ceil(key / moves_base) * quantum_flop; }

int64_t Scale::moves(double key) const { return static_cast<int64_t>(std::ceil(key / moves_base) * moves_base - key); }

Problem::Problem(std::vector<Task> tasks, std::vector<double> running_s, double transition_s_max)
    : tasks_(std::move(tasks)), running_s_(std::move(running_s)), transition_s_max_(transition_s_max) {
  require(tasks_.size() <= kTasksMax, "more than " + std::to_string(kTasksMax) + " tasks");
  require(!running_s_.empty() && running_s_.size() <= size_t{kSlotsMax} + 1, "running_s: one entry per pool size");
  require(std::all_of(running_s_.begin(), running_s_.end(), is_duration), "running_s must be finite, 0 or more");
  require(is_duration(transition_s_max), "transition_s_max must be finite, 0 or more");
  for (size_t index = 0; index < tasks_.size(); ++index) {
    const Task& task = tasks_[index];
    check_task(task, index, transition_s_max);
    double greatest = 0;
    for (const double flops : task.flops) greatest = std::max(greatest, std::abs(flops));
    flops_bound_ += greatest;
    transition_bound_ += task.current_flops * transition_s_max;
    num_current_ += task.current;
  }
}

void Problem::check(const Alternative& alternative) const {
  require(alternative.pool >= 0 && alternative.pool <= pool_max(), "pool is outside running_s");
  require(std::isfinite(alternative.running_s), "running_s must be finite");
  require(std::isfinite(alternative.cost_flop), "cost_flop must be finite");
  int32_t previous = -1;
  for (const Override& changed : alternative.overrides) {
    require(changed.task > previous && static_cast<size_t>(changed.task) < num_tasks(),
            "overrides must name each task once, ascending");
    previous = changed.task;
    if (changed.is_absent) continue;
    const Task& task = tasks_[static_cast<size_t>(changed.task)];
    require(changed.transition_s.size() == task.counts.size(), "an override has one transition per count");
    require(is_each_within(changed.transition_s, transition_s_max_),
            "transition_s must lie between 0 and transition_s_max, or be infinite");
  }
}

double Problem::running_s(const Alternative& alternative) const {
  return alternative.running_s < 0 ? running_s_[static_cast<size_t>(alternative.pool)] : alternative.running_s;
}

int32_t Problem::count_max(size_t index, int32_t pool) const {
  const std::vector<int32_t>& counts = tasks_[index].counts;
  const auto above = std::upper_bound(counts.begin(), counts.end(), pool);
  return above == counts.begin() ? 0 : *(above - 1);
}

Scale Problem::scale(double running_s) const {
  // A plan moves at most what is in use now and what it gives out.
  const double moves_base = power_of_two_above(static_cast<double>(num_current_ + pool_max() + 1));
  const double bound = flops_bound_ * running_s + transition_bound_;
  // Each of the m roundings adds at most half a quantum to a sum.
  const double room = std::exp2(kMantissaBits) / moves_base - static_cast<double>(num_tasks()) - 2;
  return Scale{bound > 0 ? power_of_two_above(bound / room) : 1.0, moves_base, running_s};
}

Row Problem::make_row(size_t index, int32_t pool, const Scale& scale, const double* transition_s,
                      bool is_present_free) const {
  const Task& task = tasks_[index];
  const auto end = std::upper_bound(task.counts.begin(), task.counts.end(), pool);
  const auto size = static_cast<size_t>(end - task.counts.begin());
  thread_local std::vector<double> keys;  // used again: hundreds of rows are made for one table
  thread_local std::vector<int32_t> counts;
  if (keys.size() < size) keys.resize(size);
  if (counts.size() < size) counts.resize(size);
  fill_keys({task.counts.data(), task.flops.data(), transition_s, size}, task, scale, keys.data());
  const auto present = std::lower_bound(task.counts.begin(), end, task.current);
  if (is_present_free && present != end && *present == task.current) {
    const auto at = static_cast<size_t>(present - task.counts.begin());
    const double nothing = 0;
    fill_keys({&task.counts[at], &task.flops[at], &nothing, 1}, task, scale, &keys[at]);
  }
  // An infinite transition makes minus infinity, or not a number: neither is above any key.
  size_t kept = 0;
  double best = kNever;
  for (size_t choice = 0; choice < size; ++choice) {
    const double key = keys[choice];
    const bool is_better = key > best;
    keys[kept] = key;
    counts[kept] = task.counts[choice];
    kept += is_better ? 1 : 0;
    best = is_better ? key : best;
  }
  const auto num_kept = static_cast<ptrdiff_t>(kept);
  return Row{task.current, {counts.begin(), counts.begin() + num_kept}, {keys.begin(), keys.begin() + num_kept}};
}

Row Problem::healthy_row(size_t index, int32_t pool, const Scale& scale) const {
  return make_row(index, pool, scale, tasks_[index].transition_s.data(), true);
}

Row Problem::override_row(const Override& changed, int32_t pool, const Scale& scale) const {
  if (changed.is_absent) return Row{0, {0}, {0.0}};
  return make_row(static_cast<size_t>(changed.task), pool, scale, changed.transition_s.data(), false);
}

}  // namespace unicron::planner
