// Statistics of progress: how long phases usually take, and who is slow.
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "monitor/pace.h"
#include "monitor/phase_times.h"
#include "read_array.h"
#include "register.h"

namespace py = pybind11;

namespace unicron::bindings {

namespace {

using monitor::PaceSample;
using monitor::PaceTable;
using monitor::PhaseTimes;

const char* name_of(monitor::SlowKind kind) {
  switch (kind) {
    case monitor::SlowKind::kRank:
      return "rank";
    case monitor::SlowKind::kStage:
      return "stage";
    case monitor::SlowKind::kLink:
      return "link";
    case monitor::SlowKind::kDrift:
      break;
  }
  return "drift";
}

// Intervals that ended, one after another; those that would have been told while they lasted: (index, level, usual ms,
// budget ms of that level). stood_ms: as long as an agent watched each of them, which is not what a clock that was set
// says.
std::vector<std::tuple<int64_t, int, double, double>> replay_phases(PhaseTimes& times, const py::object& stages,
                                                                    const py::object& ms, const py::object& stood_ms) {
  const std::vector<int32_t> stage = read_array<int32_t>(stages, "stages");
  const std::vector<double> took = read_array<double>(ms, "ms");
  const std::vector<double> stood = read_array<double>(stood_ms, "stood_ms");
  if (stage.size() != took.size() || stage.size() != stood.size()) {
    throw Error(ErrorCode::kInvalidArgument, "stages, ms and stood_ms differ in length");
  }
  const py::gil_scoped_release release;
  std::vector<std::tuple<int64_t, int, double, double>> stalls;
  for (size_t index = 0; index < took.size(); ++index) {
    const monitor::Stall stall = times.judge(stage[index], stood[index]);
    if (stall != monitor::Stall::kNone) {
      const monitor::PhaseBudget budget = times.budget(stage[index]).value();
      const double budget_ms = stall == monitor::Stall::kSure ? budget.sure_ms : budget.suspect_ms;
      stalls.emplace_back(static_cast<int64_t>(index), static_cast<int>(stall), budget.usual_ms, budget_ms);
    }
    times.add(stage[index], took[index]);
  }
  return stalls;
}

using SlowTuple = std::tuple<std::string, int64_t, double, double, int64_t>;

std::vector<SlowTuple> look(PaceTable& table) {
  std::vector<SlowTuple> result;
  for (const monitor::Slow& slow : table.look()) {
    result.emplace_back(name_of(slow.kind), slow.subject, slow.usual_ms, slow.now_ms, slow.since);
  }
  return result;
}

// Whole iterations of all ranks: compute_ms [iteration][rank], waits_ms [iteration][rank][kind]. What came to be slow:
// (iteration, kind, subject).
std::vector<std::tuple<int64_t, std::string, int64_t>> replay_pace(PaceTable& table, int64_t num_ranks, int64_t first,
                                                                   const py::object& compute_ms,
                                                                   const py::object& waits_ms, int64_t look_every) {
  const std::vector<double> compute = read_array<double>(compute_ms, "compute_ms");
  const std::vector<double> waits = read_array<double>(waits_ms, "waits_ms");
  if (num_ranks < 1 || look_every < 1 || compute.size() % static_cast<size_t>(num_ranks) != 0 ||
      waits.size() != compute.size() * monitor::kWaitKinds) {
    throw Error(ErrorCode::kInvalidArgument, "compute_ms needs num_ranks values an iteration, waits_ms four of each");
  }
  const py::gil_scoped_release release;
  std::vector<std::tuple<int64_t, std::string, int64_t>> begun;
  std::set<std::pair<int, int64_t>> known;
  const int64_t num_iterations = static_cast<int64_t>(compute.size()) / num_ranks;
  for (int64_t index = 0; index < num_iterations; ++index) {
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      const auto at = static_cast<size_t>(index * num_ranks + rank);
      PaceSample sample{first + index, compute[at], {}};
      std::copy_n(waits.begin() + static_cast<std::ptrdiff_t>(at * monitor::kWaitKinds), monitor::kWaitKinds,
                  sample.waits_ms.begin());
      table.add(rank, sample);
    }
    if (index % look_every != 0) continue;
    std::set<std::pair<int, int64_t>> now;
    for (const monitor::Slow& slow : table.look()) {
      const std::pair<int, int64_t> key(static_cast<int>(slow.kind), slow.subject);
      if (known.count(key) == 0) begun.emplace_back(first + index, name_of(slow.kind), slow.subject);
      now.insert(key);
    }
    known = std::move(now);
  }
  return begun;
}

}  // namespace

void register_statistics(py::module_& module) {
  py::class_<PhaseTimes>(module, "PhaseTimes", py::is_final())
      .def(py::init<double, double>(), py::arg("sure_factor"), py::arg("floor_ms"))
      .def("add", &PhaseTimes::add, py::arg("stage"), py::arg("ms"))
      .def(
          "budget",
          [](const PhaseTimes& times, int64_t stage) -> std::optional<std::tuple<double, double, double>> {
            const auto budget = times.budget(stage);
            if (!budget.has_value()) return std::nullopt;
            return std::make_tuple(budget->usual_ms, budget->suspect_ms, budget->sure_ms);
          },
          py::arg("stage"))
      .def("replay", &replay_phases, py::arg("stages"), py::arg("ms"), py::arg("stood_ms"));
  py::class_<PaceTable>(module, "PaceTable", py::is_final())
      .def(py::init([](std::vector<int64_t> stages, const std::vector<std::pair<int64_t, std::vector<int64_t>>>& links,
                       double slow_ratio) {
             std::vector<monitor::Link> made;
             for (const auto& [kind, members] : links) made.push_back({kind, members});
             return PaceTable(std::move(stages), made, slow_ratio);
           }),
           py::arg("stages"), py::arg("links"), py::arg("slow_ratio"))
      .def(
          "add",
          [](PaceTable& table, int64_t rank, int64_t iteration, double compute_ms, const std::vector<double>& waits) {
            PaceSample sample{iteration, compute_ms, {}};
            if (waits.size() != sample.waits_ms.size()) {
              throw Error(ErrorCode::kInvalidArgument, "give one wait for each kind of group");
            }
            std::copy(waits.begin(), waits.end(), sample.waits_ms.begin());
            table.add(rank, sample);
          },
          py::arg("rank"), py::arg("iteration"), py::arg("compute_ms"), py::arg("waits_ms"))
      .def("forget", &PaceTable::forget, py::arg("rank"))
      .def("look", &look)
      .def("replay", &replay_pace, py::arg("num_ranks"), py::arg("first"), py::arg("compute_ms"), py::arg("waits_ms"),
           py::arg("look_every"));
}

}  // namespace unicron::bindings
