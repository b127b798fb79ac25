// The best of all tasks but one, for every number of slots left to that one: many alternatives from two dynamic
// programs.
//
// The sums of the tasks before i (prefix) and after i (suffix) are made once for one horizon. Joined at one column they
// are the best of all tasks but i within so many slots; an alternative that changes i alone needs that for each of i's
// counts. Counts that cannot win by the relaxation's bound are passed over, which leaves a few of them; where it leaves
// many, all columns are made at once. Keys are exact (planner/reward.h), so sums do not depend on how they are joined.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "planner/knapsack.h"
#include "planner/relaxation.h"

namespace unicron::planner {

class LeaveOneOut {
 public:
  struct Workspace {  // used by one object at a time
    Buffer prefix;
    Buffer suffix;
    Buffer middle;
  };

  struct Bounded {
    Best best;      // key, and count of the task that is changed (of the last task, where none is)
    int64_t bound;  // no less than the best key of the rows that the relaxation was made from
  };

  // `rows`: healthy tasks, at least one, perhaps with fewer counts than those that the relaxation was made from.
  // Alternatives have pools within `pools` and override tasks with at most overrides_max slots together.
  LeaveOneOut(const Problem& problem, const Scale& scale, std::vector<Row> rows, const Relaxation& relaxation,
              Pools pools, int64_t overrides_max, Workspace* workspace);

  // Several changed tasks cost a dynamic program over those from the first to the last of them. Quickest when
  // alternatives that change the same task come one after the other.
  Bounded best(const Alternative& alternative);
  // The slots of each task in a plan that reaches it.
  std::vector<int32_t> allocation(const Alternative& alternative, const Best& best);

 private:
  Row as_row(const Chain& chain, size_t num_rows) const;
  Bounded one_changed(const Override& changed, int32_t pool);
  // The best of all tasks but left_out_ at `column`, remembered.
  double others(int32_t column);
  void make_all_others();
  void forget_others();
  // From the prefix before the first of them to the suffix after the last.
  Bounded several_changed(const Alternative& alternative);
  // The column at which `before` and the last num_after tasks together are best within `slots`.
  int32_t meeting(const double* before, int32_t first, size_t num_after, int32_t slots) const;
  void trace_suffix(size_t num_after, int32_t column, std::vector<int32_t>* allocation) const;

  const Problem& problem_;
  Scale scale_;
  std::vector<Row> rows_;
  const Relaxation& relaxation_;
  Pools pools_;
  int64_t count_total_;  // no alternative gives out more
  Workspace* workspace_;
  Chain prefix_;
  Chain suffix_;  // row r covers the last r tasks
  std::vector<const Row*> prefix_rows_;
  std::vector<const Row*> suffix_rows_;

  // Of the task that was left out last:
  size_t left_out_ = SIZE_MAX;
  std::vector<double> others_storage_;  // per column, NaN where not known yet
  std::vector<int32_t> known_;          // columns
  bool all_known_ = false;
  std::vector<int32_t> staircase_;                              // 0, 1, 2, ... as counts of dense choices
  std::map<const Alternative*, std::vector<int32_t>> several_;  // allocations of those that change several tasks
};

}  // namespace unicron::planner
