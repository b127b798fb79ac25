// Rewards, the dynamic program, the plan table and placement of csrc/planner, against brute force on small clusters.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "planner/knapsack.h"
#include "planner/max_plus.h"
#include "planner/placement.h"
#include "planner/plan_table.h"
#include "planner/relaxation.h"
#include "planner/reward.h"

namespace unicron::planner {
namespace {

using Random = std::mt19937_64;

int32_t draw(Random& random, int32_t low, int32_t high) {
  return std::uniform_int_distribution<int32_t>(low, high)(random);
}

// Few distinct values, so that plans tie.
Task random_task(Random& random, int32_t pool) {
  Task task;
  const int32_t unit = draw(random, 1, 3);
  for (int32_t count = 0; count <= pool; count += count == 0 ? unit * draw(random, 1, 2) : unit) {
    if (count != 0 && draw(random, 0, 4) == 0) continue;  // a hole
    task.counts.push_back(count);
    task.flops.push_back(count == 0 ? 0 : draw(random, 1, 4) * 1e12 * std::sqrt(count));
    task.transition_s.push_back(draw(random, 0, 2) * 10.0);
  }
  const auto present = static_cast<size_t>(draw(random, 0, static_cast<int32_t>(task.counts.size()) - 1));
  task.current = task.counts[present];
  task.current_flops = task.flops[present];
  return task;
}

Override random_override(Random& random, const Problem& problem, int32_t task) {
  Override changed;
  changed.task = task;
  changed.is_absent = draw(random, 0, 2) == 0;
  if (changed.is_absent) return changed;
  for (size_t choice = 0; choice < problem.task(static_cast<size_t>(task)).counts.size(); ++choice) {
    const bool is_possible = choice == 0 || draw(random, 0, 3) != 0;
    changed.transition_s.push_back(is_possible ? draw(random, 1, 9) * 10.0 : std::numeric_limits<double>::infinity());
  }
  return changed;
}

Problem random_problem(Random& random, int32_t pool_max = 9, int32_t tasks_max = 4) {
  const int32_t pool = draw(random, 1, pool_max);
  std::vector<Task> tasks;
  for (int32_t index = draw(random, 1, tasks_max); index > 0; --index) tasks.push_back(random_task(random, pool));
  std::vector<double> running_s;
  for (int32_t slots = 0; slots <= pool; ++slots) running_s.push_back(1000.0 / std::max(slots, 1));
  return Problem(std::move(tasks), std::move(running_s), 100);
}

std::vector<Alternative> random_event(Random& random, const Problem& problem) {
  std::vector<Alternative> alternatives;
  for (int32_t index = draw(random, 1, 3); index > 0; --index) {
    Alternative alternative;
    alternative.pool = draw(random, 0, problem.pool_max());
    for (int32_t task = 0; task < static_cast<int32_t>(problem.num_tasks()); ++task) {
      if (draw(random, 0, 2) == 0) alternative.overrides.push_back(random_override(random, problem, task));
    }
    alternative.cost_flop = draw(random, 0, 1) * 1e12;
    alternative.running_s = draw(random, -1, 1) * 500.0;
    alternatives.push_back(std::move(alternative));
  }
  return alternatives;
}

PlanTable table_of(const Problem& problem, const std::vector<std::vector<Alternative>>& events) {
  std::vector<std::vector<const Alternative*>> pointers;
  for (const std::vector<Alternative>& event : events) {
    pointers.emplace_back();
    for (const Alternative& alternative : event) pointers.back().push_back(&alternative);
  }
  return PlanTable(problem, pointers);
}

double brute_force(const std::vector<Row>& rows, size_t task, int32_t slots) {
  if (task == rows.size()) return 0;
  double best = kNever;
  for (size_t choice = 0; choice < rows[task].counts.size() && rows[task].counts[choice] <= slots; ++choice) {
    best = std::max(best, rows[task].keys[choice] + brute_force(rows, task + 1, slots - rows[task].counts[choice]));
  }
  return best;
}

std::vector<Row> rows_of(const Problem& problem, const Alternative& alternative) {
  const Scale scale = problem.scale(problem.running_s(alternative));
  std::vector<Row> rows;
  for (size_t task = 0; task < problem.num_tasks(); ++task) {
    rows.push_back(problem.healthy_row(task, alternative.pool, scale));
  }
  for (const Override& changed : alternative.overrides) {
    rows[static_cast<size_t>(changed.task)] = problem.override_row(changed, alternative.pool, scale);
  }
  return rows;
}

double key_of(const std::vector<Row>& rows, const std::vector<int32_t>& allocation) {
  double key = 0;
  for (size_t task = 0; task < rows.size(); ++task) {
    const auto found = std::find(rows[task].counts.begin(), rows[task].counts.end(), allocation[task]);
    if (found == rows[task].counts.end()) return kNever;
    key += rows[task].keys[static_cast<size_t>(found - rows[task].counts.begin())];
  }
  return key;
}

void test_direct_solve_is_brute_force() {
  Random random(1);
  for (int round = 0; round < 3000; ++round) {
    const Problem problem = random_problem(random);
    for (const Alternative& alternative : random_event(random, problem)) {
      const std::vector<Row> rows = rows_of(problem, alternative);
      const Solution found = solve_alternative(problem, alternative);
      CHECK(found.key == brute_force(rows, 0, alternative.pool));
      CHECK(key_of(rows, found.allocation) == found.key);
    }
  }
}

void test_table_is_direct_solve(uint64_t seed, int num_rounds, int32_t pool_max, int32_t tasks_max) {
  Random random(seed);
  for (int round = 0; round < num_rounds; ++round) {
    const Problem problem = random_problem(random, pool_max, tasks_max);
    std::vector<std::vector<Alternative>> events;
    for (int event = 0; event < 12; ++event) events.push_back(random_event(random, problem));
    const PlanTable table = table_of(problem, events);
    for (size_t event = 0; event < events.size(); ++event) {
      const Plan& found = table.lookup(static_cast<int64_t>(event));
      const Plan direct = solve(problem, events[event]);
      CHECK(found.reward_flop == direct.reward_flop);
      CHECK(found.moves == direct.moves);
      CHECK(found.alternative == direct.alternative);
      const Alternative& won = events[event][static_cast<size_t>(found.alternative)];
      CHECK(key_of(rows_of(problem, won), found.allocation) == key_of(rows_of(problem, won), direct.allocation));
    }
  }
}

// Whatever the price, and with a gap as wide as the bound is off, the best plan is still there.
void test_bound_is_no_less() {
  Random random(5);
  for (int round = 0; round < 300; ++round) {
    const Problem problem = random_problem(random, 12, 5);
    const int32_t pool = draw(random, 0, problem.pool_max());
    const Alternative alternative{pool, {}, 0};
    const std::vector<Row> rows = rows_of(problem, alternative);
    const Relaxation relaxation(rows, problem.pool_max());
    const double best = brute_force(rows, 0, pool);
    if (best == kNever) continue;
    const int64_t bound = relaxation.bound(alternative, {});
    CHECK(static_cast<double>(bound) >= best);
    std::vector<Row> within;
    for (size_t task = 0; task < rows.size(); ++task) {
      within.push_back(relaxation.within(rows[task], task, bound - static_cast<int64_t>(best)));
    }
    CHECK(brute_force(within, 0, pool) == best);
  }
}

Task flat_task(int32_t current, int32_t most) {
  Task task;
  task.current = current;
  for (int32_t count = 0; count <= most; ++count) {
    task.counts.push_back(count);
    task.flops.push_back(count == 0 ? 0 : 1e12);
    task.transition_s.push_back(0);
  }
  task.current_flops = 1e12;
  return task;
}

void test_ties_move_least() {
  const Problem problem({flat_task(3, 6), flat_task(2, 6)}, {1, 1, 1, 1, 1, 1, 1}, 1);
  const Plan plan = solve(problem, {Alternative{6, {}, 0}});
  CHECK((plan.allocation == std::vector<int32_t>{3, 2}));
  CHECK(plan.moves == 0);
  const Plan smaller = solve(problem, {Alternative{4, {}, 0}});
  CHECK(smaller.moves == 1);
}

void test_alternatives_by_reward() {
  const Problem problem({flat_task(2, 4)}, {100, 100, 100, 100, 100}, 1000);
  const std::vector<double> restart(5, 30.0);
  const std::vector<double> standby(5, 5.0);
  Alternative in_place{2, {Override{0, false, restart}}, 0};
  Alternative spend{2, {Override{0, false, standby}}, 1e13};
  CHECK(solve(problem, {in_place, spend}).alternative == 1);
  spend.cost_flop = 3e13;  // the standby is worth more than 25 s of the task
  CHECK(solve(problem, {in_place, spend}).alternative == 0);
}

void test_failure_rate() {
  const FailureRate unseen{1, 1e6, 0, 0};
  CHECK(unseen.running_s(1) == 1e6);
  CHECK(std::abs(unseen.running_s(10) - 1e5) < 1e-6);
  CHECK(unseen.running_s(0) == 1e6);
  const FailureRate seen{1, 1e6, 9, 9e6};
  CHECK(std::abs(seen.running_s(1) - 1e6) < 1);
  CHECK(testing::throws<Error>([] { FailureRate{0, 1, 0, 0}.running_s(1); }));
}

double sum_at(const double* left, const std::vector<double>& right, int32_t last) {
  double best = kNever;
  for (int32_t at = 0; at <= last; ++at) best = std::max(best, left[at] + right[static_cast<size_t>(last - at)]);
  return best;
}

// Wide enough for whole tiles and for the one that overlaps, whatever instructions this machine has.
void test_max_plus() {
  Random random(3);
  for (const int32_t width : {1, 31, 32, 33, 64, 100, 257}) {
    std::vector<double> from(kColumnsPad + static_cast<size_t>(width), kNever);
    for (size_t at = kColumnsPad; at < from.size(); ++at) from[at] = draw(random, -50, 50);
    std::vector<int32_t> counts;
    std::vector<double> keys;
    for (int32_t count = 0; count < width; count += draw(random, 1, 4)) {
      counts.push_back(count);
      keys.push_back(draw(random, -50, 50));
    }
    std::vector<double> to(static_cast<size_t>(width));
    max_plus(from.data() + kColumnsPad, {counts.data(), keys.data(), counts.size()}, to.data(), 0, width - 1);
    for (int32_t at = 0; at < width; ++at) {
      double best = kNever;
      for (size_t choice = 0; choice < counts.size() && counts[choice] <= at; ++choice) {
        best = std::max(best, from[kColumnsPad + static_cast<size_t>(at - counts[choice])] + keys[choice]);
      }
      CHECK(to[static_cast<size_t>(at)] == best);
      CHECK(best_sum(from.data() + kColumnsPad, to.data() + at, at + 1) == sum_at(from.data() + kColumnsPad, to, at));
    }
  }
}

void test_bad_problems_are_refused() {
  const auto refused = [](const Task& task) { return testing::throws<Error>([&] { Problem({task}, {1, 1}, 10); }); };
  CHECK(!refused(Task{0, 0, {0, 1}, {0, 1}, {0, 1}}));
  CHECK(refused(Task{0, 0, {}, {}, {}}));
  CHECK(refused(Task{0, 0, {1, 0}, {0, 1}, {0, 1}}));
  CHECK(refused(Task{0, 0, {0, 1}, {0}, {0, 1}}));
  CHECK(refused(Task{0, 0, {0, 1}, {0, std::nan("")}, {0, 1}}));
  CHECK(refused(Task{0, 0, {0, 1}, {0, 1}, {0, 11}}));
  CHECK(refused(Task{0, -1, {0, 1}, {0, 1}, {0, 1}}));
  const Problem problem({Task{0, 0, {1}, {1}, {0}}}, {1, 1}, 10);
  CHECK(testing::throws<Error>([&] { solve(problem, {Alternative{2, {}, 0}}); }));  // a pool it does not know
  CHECK(testing::throws<Error>([&] { solve(problem, {Alternative{0, {}, 0}}); }));  // no plan fits
  CHECK(testing::throws<Error>([&] { table_of(problem, {{Alternative{0, {}, 0}}}); }));
  CHECK(testing::throws<Error>([&] { table_of(problem, {{Alternative{1, {}, 0}}}).lookup(1); }));
}

void test_placement() {
  const std::vector<NodeSpace> nodes{{8, 0, 0}, {8, 0, 0}, {5, 1, 0}, {8, 1, 3}};
  const Placement first = place(nodes, {{8, 4, {0, 0, 0, 0}}, {4, 1, {0, 0, 0, 0}}, {4, 4, {0, 0, 0, 0}}});
  CHECK(first.moves == 16);
  CHECK(first.slots[0][3] + first.slots[1][3] + first.slots[2][3] == 0);  // the node with faults is left alone
  for (const auto& slots : {first.slots[0], first.slots[2]}) {
    for (const int32_t held : slots) CHECK(held % 4 == 0);
  }
  // What lies well stays; the narrow task gives way to a group that fits nowhere else.
  const Placement second = place({{4, 0, 0}, {4, 1, 0}}, {{4, 4, {0, 0}}, {4, 1, {2, 2}}});
  CHECK((second.unplaced == std::vector<int32_t>{0, 0}));
  CHECK(second.moves == 6);
  const Placement none = place({{3, 0, 0}, {3, 0, 0}}, {{4, 4, {0, 0}}});
  CHECK((none.unplaced == std::vector<int32_t>{4}));
  CHECK(testing::throws<Error>([] { place({{3, 0, 0}}, {{3, 2, {0}}}); }));
}

}  // namespace
}  // namespace unicron::planner

int main() {
  unicron::planner::test_failure_rate();
  unicron::planner::test_max_plus();
  unicron::planner::test_direct_solve_is_brute_force();
  unicron::planner::test_table_is_direct_solve(2, 1000, 9, 4);
  unicron::planner::test_table_is_direct_solve(4, 60, 90, 14);  // many tasks: most counts are ruled out by the bound
  unicron::planner::test_bound_is_no_less();
  unicron::planner::test_ties_move_least();
  unicron::planner::test_alternatives_by_reward();
  unicron::planner::test_bad_problems_are_refused();
  unicron::planner::test_placement();
  return unicron::testing::num_failures;
}
