// Rewards, plans, the plan table and placement.
#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "planner/knapsack.h"
#include "planner/max_plus.h"
#include "planner/placement.h"
#include "planner/plan_table.h"
#include "read_array.h"
#include "register.h"

namespace py = pybind11;

namespace unicron::bindings {

namespace {

using planner::Alternative;
using planner::Override;
using planner::Plan;
using planner::PlanTable;
using planner::Problem;
using planner::Task;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

void register_problem(py::module_& module) {
  py::class_<Task>(module, "PlannerTask", py::is_final())
      .def(py::init([](int32_t current, double current_flops, const py::object& counts, const py::object& flops,
                       const py::object& transition_s) {
             return Task{current, current_flops, read_array<int32_t>(counts, "counts"),
                         read_array<double>(flops, "flops"), read_array<double>(transition_s, "transition_s")};
           }),
           py::arg("current"), py::arg("current_flops"), py::arg("counts"), py::arg("flops"), py::arg("transition_s"));
  py::class_<Override>(module, "PlannerOverride", py::is_final())
      .def(py::init([](int32_t task, const py::object& transition_s) {
             if (transition_s.is_none()) return Override{task, true, {}};
             return Override{task, false, read_array<double>(transition_s, "transition_s")};
           }),
           py::arg("task"), py::arg("transition_s"));
  py::class_<Alternative, std::shared_ptr<Alternative>>(module, "PlannerAlternative", py::is_final())
      .def(py::init<int32_t, std::vector<Override>, double, double>(), py::arg("pool"), py::arg("overrides"),
           py::arg("cost_flop"), py::arg("running_s"));
}

void register_plans(py::module_& module) {
  py::class_<Plan>(module, "PlannerPlan", py::is_final())
      .def_readonly("alternative", &Plan::alternative)
      .def_readonly("allocation", &Plan::allocation)
      .def_readonly("reward_flop", &Plan::reward_flop)
      .def_readonly("moves", &Plan::moves);
  py::class_<PlanTable>(module, "PlannerTable", py::is_final())
      .def_property_readonly("num_events", &PlanTable::num_events)
      .def("lookup", &PlanTable::lookup, py::arg("event"), py::return_value_policy::reference_internal)
      .def(
          "lookup_ns",
          [](const PlanTable& table, int64_t num_lookups) {
            std::vector<int64_t> ns;
            int64_t checked = 0;
            for (int64_t index = 0; index < num_lookups; ++index) {
              const int64_t event = index * 7919 % static_cast<int64_t>(table.num_events());
              const auto began = std::chrono::steady_clock::now();
              checked += table.lookup(event).allocation.front();
              ns.push_back((std::chrono::steady_clock::now() - began).count());
            }
            if (checked < 0) ns.clear();  // keeps the look-ups from being optimised away
            return ns;
          },
          py::arg("num_lookups"), ReleaseGil());
  py::class_<Problem>(module, "PlannerProblem", py::is_final())
      .def(py::init([](std::vector<Task> tasks, const py::object& running_s, double transition_s_max) {
             return Problem(std::move(tasks), read_array<double>(running_s, "running_s"), transition_s_max);
           }),
           py::arg("tasks"), py::arg("running_s"), py::arg("transition_s_max"))
      .def(
          "solve",
          [](const Problem& problem, const std::vector<Alternative>& alternatives) {
            return planner::solve(problem, alternatives);
          },
          py::arg("alternatives"), ReleaseGil())
      .def(
          "table",
          [](const Problem& problem, const std::vector<std::vector<std::shared_ptr<Alternative>>>& events) {
            std::vector<std::vector<const Alternative*>> pointers;
            for (const auto& event : events) {
              pointers.emplace_back();
              for (const auto& alternative : event) pointers.back().push_back(alternative.get());
            }
            return std::make_unique<PlanTable>(problem, pointers);
          },
          py::arg("events"), ReleaseGil());
}

// [task][node] slots and unplaced slots per task, with the number of moved slots.
std::tuple<std::vector<std::vector<int32_t>>, std::vector<int32_t>, int64_t> place(
    const std::vector<std::tuple<int32_t, int32_t, int32_t>>& nodes,
    const std::vector<std::tuple<int32_t, int32_t, std::vector<int32_t>>>& tasks) {
  std::vector<planner::NodeSpace> spaces;
  for (const auto& [slots, domain, faults] : nodes) spaces.push_back({slots, domain, faults});
  std::vector<planner::TaskNeed> needs;
  for (const auto& [count, group, current] : tasks) needs.push_back({count, group, current});
  planner::Placement placement = planner::place(spaces, needs);
  return {std::move(placement.slots), std::move(placement.unplaced), placement.moves};
}

}  // namespace

void register_planner(py::module_& module) {
  register_problem(module);
  register_plans(module);
  module.def(
      "planner_running_s",
      [](double prior_failures, double prior_slot_s, double failures, double slot_s, int64_t pool) {
        return planner::FailureRate{prior_failures, prior_slot_s, failures, slot_s}.running_s(pool);
      },
      py::arg("prior_failures"), py::arg("prior_slot_s"), py::arg("failures"), py::arg("slot_s"), py::arg("pool"));
  module.def("planner_instructions", [] { return std::string(planner::max_plus_instructions()); });
  module.def("planner_place", &place, py::arg("nodes"), py::arg("tasks"), ReleaseGil());
}

}  // namespace unicron::bindings
