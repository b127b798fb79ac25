// What an allocation is worth, in FLOP, and the same as integers that a dynamic program can add exactly.
//
// G(t, x -> x', how) = F(t, x') * D_running(n') - 1[changed or faulted] * F(t, x) * D_transition(t, x -> x', how), with
// F(t, x) = w(t) * T(t, x) in FLOP/s (Unicron, arXiv 2401.00134, plan generation). Every way to answer a failure (a
// standby, a restart in place, a smaller task, slots of others, waiting for repair) is an Alternative, so that one
// reward decides between them; neither paper says how.
//
// Rejected: sums of plain doubles. Their last bits depend on the order of the tasks, so equal plans would not tie, and
// a table made of prefix and suffix sums would differ from a direct solve. A key is a whole number below 2^53 instead:
// the reward in quanta, times a power of two, minus the slots moved. Sums of keys are exact in any order, and the
// greater key is the greater reward, or among equal ones the fewer moves. A quantum is about 2^-37 of the bound on the
// sum of all rewards at 8,192 slots (7e-12): rewards that differ by less count as equal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace unicron::planner {

constexpr int32_t kSlotsMax = 1 << 20;  // of a cluster, in the tasks' unit
constexpr size_t kTasksMax = 4096;
constexpr double kNever = -std::numeric_limits<double>::infinity();  // key of what is not allowed

// Failures per slot-second with a Gamma prior: the mean of the posterior, so that a cluster that has shown nothing yet
// has the prior's rate, and one that has run for long its own.
struct FailureRate {
  double prior_failures = 1;
  double prior_slot_s = 0;
  double failures = 0;  // seen
  double slot_s = 0;    // exposure in which they were seen

  double per_slot_s() const;
  // D_running(n'): expected seconds without a failure of `pool` slots; an empty pool counts as one slot.
  double running_s(int64_t pool) const;
};

struct Task {
  int32_t current = 0;               // slots before the event
  double current_flops = 0;          // F(t, x) in FLOP/s before the event: what a transition costs per second
  std::vector<int32_t> counts;       // reachable counts, ascending; 0 = not running
  std::vector<double> flops;         // F(t, x') in FLOP/s, one per count
  std::vector<double> transition_s;  // D_transition of a healthy task, one per count; not counted where nothing changes
};

// A task that an event changes: it is faulted (every count costs its transition, also the present one), or gone.
struct Override {
  int32_t task = 0;
  bool is_absent = false;            // finished: takes nothing, earns nothing
  std::vector<double> transition_s;  // one per count; infinity: this count cannot be reached this way
};

// One way to answer an event.
struct Alternative {
  int32_t pool = 0;                 // n': slots that can be given out
  std::vector<Override> overrides;  // ascending by task
  double cost_flop = 0;             // subtracted as a whole, e.g. the worth of a standby that would be spent
  // Seconds over which rewards are counted; below 0: D_running(pool). One for all alternatives of an event: D_running
  // falls as 1 / n', so rewards over their own horizons would make a cluster with fewer slots look as rich as one with
  // more.
  double running_s = -1;
};

// One task's choices as keys. Left out: what is not allowed, and what a smaller count does at least as well (T(t, x)
// has steps, and a change has a price, so that is often most of them).
struct Row {
  int32_t current = 0;
  std::vector<int32_t> counts;  // ascending
  std::vector<double> keys;     // ascending

  int32_t count_max() const { return counts.empty() ? 0 : counts.back(); }
};

// Power-of-two scales between FLOP and keys for one horizon, whatever the pool: what is made for one pool holds for
// all.
struct Scale {
  double quantum_flop = 1;
  double moves_base = 2;  // above any number of moves
  double running_s = 0;   // seconds over which rewards are counted

  double reward_flop(double key) const;
  int64_t moves(double key) const;
};

class Problem {
 public:
  // `running_s[n']`: D_running in seconds for pools 0 ... size - 1. `transition_s_max` bounds every finite transition.
  // Throws kInvalidArgument for arrays of different lengths, counts not ascending or out of range, and values that are
  // not finite or negative where they must not be.
  Problem(std::vector<Task> tasks, std::vector<double> running_s, double transition_s_max);

  size_t num_tasks() const { return tasks_.size(); }
  const Task& task(size_t index) const { return tasks_[index]; }
  int32_t pool_max() const { return static_cast<int32_t>(running_s_.size()) - 1; }
  // Throws kInvalidArgument for a pool, task or transition that this problem does not know.
  void check(const Alternative& alternative) const;
  double running_s(const Alternative& alternative) const;
  // The greatest count of a task within `pool`, 0 if there is none; that of a row may be less.
  int32_t count_max(size_t index, int32_t pool) const;
  Scale scale(double running_s) const;
  Row healthy_row(size_t index, int32_t pool, const Scale& scale) const;
  // A gone task has the single choice of no slots, worth nothing.
  Row override_row(const Override& changed, int32_t pool, const Scale& scale) const;

 private:
  Row make_row(size_t index, int32_t pool, const Scale& scale, const double* transition_s, bool is_present_free) const;

  std::vector<Task> tasks_;
  std::vector<double> running_s_;
  double transition_s_max_;
  double flops_bound_ = 0;       // sum over tasks of the greatest |F|
  double transition_bound_ = 0;  // FLOP: sum over tasks of F(t, x) * transition_s_max
  int64_t num_current_ = 0;      // slots in use before the event
};

}  // namespace unicron::planner
