#include "planner/plan_table.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/error.h"
#include "planner/leave_one_out.h"

namespace unicron::planner {

namespace {

struct Member {
  size_t event;
  int32_t index;  // of the alternative in its event
  const Alternative* alternative;
};

constexpr int32_t kNoTask = -1;

int32_t task_of(const Member& member) {
  const auto& overrides = member.alternative->overrides;
  return overrides.size() == 1 ? overrides.front().task : kNoTask;
}

// What has been found for each event, while horizon after horizon is solved.
class Found {
 public:
  Found(const Problem& problem, size_t num_events) : problem_(problem), entries_(num_events) {}

  // Takes the alternative's plan if it is better than what its event has. The allocation may follow later.
  void offer(const Member& member, Solution&& solution, int32_t count) {
    if (solution.key == kNever) return;
    Entry& entry = entries_[member.event];
    const Best best{solution.key, count};
    Plan plan = make_plan(problem_, *member.alternative, member.index, std::move(solution));
    const bool ties_earlier = !is_better(entry.plan, plan) && plan.alternative < entry.plan.alternative;
    if (entry.has_plan && !is_better(plan, entry.plan) && !ties_earlier) return;
    entry.best = best;
    entry.plan = std::move(plan);
    entry.has_plan = true;
  }

  // Plans without an allocation get it now; most alternatives lose, and never do.
  void complete(const std::vector<Member>& members, LeaveOneOut* sums) {
    for (const Member& member : members) {
      Entry& entry = entries_[member.event];
      if (!entry.has_plan || entry.plan.alternative != member.index || !entry.plan.allocation.empty()) continue;
      entry.plan.allocation = sums->allocation(*member.alternative, entry.best);
    }
  }

  std::vector<Plan> plans() && {
    std::vector<Plan> result;
    for (Entry& entry : entries_) {
      if (!entry.has_plan) {
        const size_t event = result.size();
        throw Error(ErrorCode::kInvalidArgument, "event " + std::to_string(event) + ": no alternative has a plan");
      }
      result.push_back(std::move(entry.plan));
    }
    return result;
  }

 private:
  struct Entry {
    Plan plan;
    Best best;
    bool has_plan = false;
  };

  const Problem& problem_;
  std::vector<Entry> entries_;
};

// All alternatives of one horizon, in an order in which each task is left out once.
void solve_horizon(const Problem& problem, double running_s, std::vector<Member> members,
                   LeaveOneOut::Workspace* workspace, Found* found) {
  constexpr size_t kDirectMax = 2;  // up to this many, prefix and suffix would not pay
  if (members.size() <= kDirectMax || problem.num_tasks() == 0) {
    for (const Member& member : members) found->offer(member, solve_alternative(problem, *member.alternative), 0);
    return;
  }
  Pools pools{members.front().alternative->pool, 0};
  for (const Member& member : members) {
    pools.least = std::min(pools.least, member.alternative->pool);
    pools.most = std::max(pools.most, member.alternative->pool);
  }
  LeaveOneOut sums(problem, pools, running_s, workspace);
  std::stable_sort(members.begin(), members.end(),
                   [](const Member& a, const Member& b) { return task_of(a) < task_of(b); });
  for (const Member& member : members) {
    const Best best = sums.best(*member.alternative);
    found->offer(member, Solution{best.key, {}}, best.count);
  }
  found->complete(members, &sums);
}

}  // namespace

PlanTable::PlanTable(const Problem& problem, const std::vector<std::vector<const Alternative*>>& events) {
  if (events.size() > kEventsMax) {
    throw Error(ErrorCode::kLimitExceeded, "more than " + std::to_string(kEventsMax) + " events in a plan table");
  }
  std::map<double, std::vector<Member>> horizons;
  for (size_t event = 0; event < events.size(); ++event) {
    for (size_t index = 0; index < events[event].size(); ++index) {
      const Alternative* alternative = events[event][index];
      problem.check(*alternative);
      horizons[problem.running_s(*alternative)].push_back({event, static_cast<int32_t>(index), alternative});
    }
  }
  Found found(problem, events.size());
  LeaveOneOut::Workspace workspace;
  for (auto& [running_s, members] : horizons) {
    solve_horizon(problem, running_s, std::move(members), &workspace, &found);
  }
  plans_ = std::move(found).plans();
}

const Plan& PlanTable::lookup(int64_t event) const {
  if (event < 0 || static_cast<size_t>(event) >= plans_.size()) {
    throw Error(ErrorCode::kInvalidArgument, "no event " + std::to_string(event) + " in the plan table");
  }
  return plans_[static_cast<size_t>(event)];
}

}  // namespace unicron::planner
