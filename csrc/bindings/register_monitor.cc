// Pulse pages, the worker's monitor, the agent's supervisor, facts about processes and sockets.
#include <pybind11/stl.h>

#include <iterator>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "monitor/fatal_signal.h"
#include "monitor/process.h"
#include "monitor/pulse.h"
#include "monitor/sockets.h"
#include "monitor/supervisor.h"
#include "monitor/worker_monitor.h"
#include "register.h"
#include "waiting.h"

namespace py = pybind11;

namespace unicron::bindings {

namespace {

using monitor::PulseFields;
using monitor::PulsePage;
using monitor::Supervisor;
using monitor::WorkerMonitor;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

std::vector<Rank> to_ranks(const std::vector<int64_t>& values) {
  std::vector<Rank> ranks;
  ranks.reserve(values.size());
  for (const int64_t value : values) ranks.emplace_back(value);
  return ranks;
}

// A read-only property that loads one field of the page.
template <class Field>
auto load(Field PulseFields::* field) {
  return [field](const PulsePage& page) { return (page.fields().*field).load(std::memory_order_acquire); };
}

using IntervalTuple = std::tuple<int64_t, int64_t, double>;
using IterationTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, std::vector<int64_t>>;

std::pair<int64_t, std::vector<IntervalTuple>> read_intervals(const PulsePage& page, int64_t after) {
  std::vector<IntervalTuple> result;
  for (const monitor::Interval& interval : page.intervals(&after)) {
    result.emplace_back(interval.stage, interval.iteration, static_cast<double>(interval.ns) / 1e6);
  }
  return {after, result};
}

std::pair<int64_t, std::vector<IterationTuple>> read_iterations(const PulsePage& page, int64_t after) {
  std::vector<IterationTuple> result;
  for (const monitor::IterationSums& sums : page.iterations(&after)) {
    result.emplace_back(sums.iteration, sums.committed_ns, sums.compute_ns, sums.micro_batches,
                        std::vector<int64_t>(std::begin(sums.waits_ns), std::end(sums.waits_ns)));
  }
  return {after, result};
}

void register_pulse(py::module_& module) {
  module.attr("PULSE_PAGE_BYTES") = monitor::kPulsePageBytes;
  module.def(
      "create_pulse_pages", [](int64_t num_slots) { return monitor::create_pulse_pages(num_slots).release(); },
      py::arg("num_slots"));
  py::class_<PulsePage, monitor::PulsePagePtr>(module, "PulsePage", py::is_final())
      .def(py::init([](int fd, int64_t slot) { return std::make_shared<PulsePage>(fd, SlotId(slot)); }), py::arg("fd"),
           py::arg("slot"))
      .def("reset", &PulsePage::reset)
      .def("advance", &PulsePage::advance, py::arg("stage"), py::arg("iteration"), py::arg("micro_batch"),
           py::arg("declared_ms") = 0)
      .def("waited", &PulsePage::waited, py::arg("kind"), py::arg("begin_ns"))
      .def(
          "set_waiting",
          [](const PulsePage& page, bool waiting) { page.fields().waiting.store(waiting, std::memory_order_release); },
          py::arg("waiting"))
      .def("committed", &PulsePage::committed, py::arg("iteration"), py::arg("loss"))
      .def("take_fault", &PulsePage::take_fault, py::arg("point"), py::arg("iteration"), py::arg("micro_batch"))
      .def("arm_fault", &PulsePage::arm_fault, py::arg("kind"), py::arg("point"), py::arg("iteration"),
           py::arg("micro_batch"))
      .def("mark_fault", &PulsePage::mark_fault)
      .def_property_readonly("last_words", &PulsePage::last_words)
      .def("intervals", &read_intervals, py::arg("after"))
      .def("iterations", &read_iterations, py::arg("after"))
      .def_property_readonly("declared_ms", load(&PulseFields::declared_ms))
      .def_property_readonly("stage", load(&PulseFields::stage))
      .def_property_readonly("iteration", load(&PulseFields::iteration))
      .def_property_readonly("micro_batch", load(&PulseFields::micro_batch))
      .def_property_readonly("since_ns", load(&PulseFields::since_ns))
      .def_property_readonly("progress", load(&PulseFields::progress))
      .def_property_readonly("waiting", [](const PulsePage& page) { return page.fields().waiting.load() != 0; })
      .def_property_readonly("committed_iteration", load(&PulseFields::committed_iteration))
      .def_property_readonly("committed_ns", load(&PulseFields::committed_ns))
      .def_property_readonly("loss", load(&PulseFields::loss))
      .def_property_readonly("beat_ns", load(&PulseFields::beat_ns))
      .def_property_readonly("fault_ns", load(&PulseFields::fault_ns))
      .def_property_readonly("owner_pid", load(&PulseFields::owner_pid));
}

const char* name_of(monitor::GroupState state) {
  switch (state) {
    case monitor::GroupState::kWhole:
      return "whole";
    case monitor::GroupState::kShut:
      return "shut";
    case monitor::GroupState::kBroken:
      return "broken";
    case monitor::GroupState::kForgotten:
      break;
  }
  return "forgotten";
}

void register_worker_monitor(py::module_& module) {
  py::class_<WorkerMonitor, std::unique_ptr<WorkerMonitor, DeleteUnlessForked<WorkerMonitor>>>(module, "WorkerMonitor",
                                                                                               py::is_final())
      .def(py::init<int, const monitor::PulsePagePtr&>(), py::arg("control_fd"), py::arg("pulse"), ReleaseGil())
      .def(
          "register_group",
          [](WorkerMonitor& self, int64_t group, const std::vector<std::pair<int, ino_t>>& sockets,
             const std::vector<int64_t>& ranks, bool cross) {
            std::vector<monitor::SocketIdentity> known;
            for (const auto& [fd, inode] : sockets) known.push_back({fd, inode});
            self.groups().add(GroupId(group), known, to_ranks(ranks), cross);
          },
          py::arg("group"), py::arg("sockets"), py::arg("ranks"), py::arg("cross"), ReleaseGil())
      .def(
          "forget_group", [](WorkerMonitor& self, int64_t group) { self.groups().forget(GroupId(group)); },
          py::arg("group"), ReleaseGil())
      .def(
          "shut_groups",
          [](WorkerMonitor& self, const std::vector<int64_t>& touched) { return self.shut(to_ranks(touched)); },
          py::arg("touched"), ReleaseGil())
      .def(
          "group_state",
          [](WorkerMonitor& self, int64_t group) { return name_of(self.groups().state(GroupId(group))); },
          py::arg("group"), ReleaseGil())
      .def("attach_nccl", &WorkerMonitor::attach_nccl, py::arg("table"))
      .def("newest_epoch", [](const WorkerMonitor& self) { return self.newest_epoch().value(); })
      .def(
          "next_frame",
          [](WorkerMonitor& self, int64_t timeout_ms) -> std::optional<py::bytes> {
            const auto message = wait_in_slices(timeout_ms, [&](int64_t ms) { return self.next_frame(ms); });
            if (!message.has_value()) return std::nullopt;
            return py::bytes(*message);
          },
          py::arg("timeout_ms"))
      .def(
          "send",
          [](WorkerMonitor& self, const py::bytes& message, int64_t timeout_ms) {
            const std::string_view view = message;
            const py::gil_scoped_release release;
            self.send(view, timeout_ms);
          },
          py::arg("message"), py::arg("timeout_ms"))
      .def("close", &WorkerMonitor::close, ReleaseGil());
}

void register_supervisor(py::module_& module) {
  py::class_<Supervisor, std::unique_ptr<Supervisor, DeleteUnlessForked<Supervisor>>>(module, "Supervisor",
                                                                                      py::is_final())
      .def(py::init<>())
      .def("fileno", &Supervisor::fileno)
      .def(
          "watch",
          [](Supervisor& self, const monitor::PulsePagePtr& pulse, int64_t slot) {
            if (pulse->slot() != SlotId(slot)) {
              throw Error(ErrorCode::kInvalidArgument, "slot " + std::to_string(slot) +
                                                           " is not this pulse page's slot " +
                                                           std::to_string(pulse->slot().value()));
            }
            self.watch(pulse);
          },
          py::arg("pulse"), py::arg("slot"), ReleaseGil())
      .def(
          "unwatch", [](Supervisor& self, int64_t slot) { self.unwatch(SlotId(slot)); }, py::arg("slot"), ReleaseGil())
      .def("take_deaths",
           [](Supervisor& self) {
             std::vector<std::pair<int64_t, int64_t>> result;
             for (const monitor::Death& death : self.take_deaths()) {
               result.emplace_back(death.slot.value(), death.seen.ns);
             }
             return result;
           })
      .def("close", &Supervisor::close, ReleaseGil());
}

void register_facts(py::module_& module) {
  module.def("owner_gone", &monitor::owner_gone, py::arg("pid"), ReleaseGil());
  module.def(
      "wait_owner_gone",
      [](pid_t pid, int64_t timeout_ms) {
        return wait_in_slices(timeout_ms, [&](int64_t ms) { return monitor::wait_owner_gone(pid, ms); });
      },
      py::arg("pid"), py::arg("timeout_ms"));
  module.def("process_state", &monitor::process_state, py::arg("pid"));
  module.def(
      "process_activity",
      [](pid_t pid) -> std::optional<std::pair<int64_t, int64_t>> {
        const auto activity = monitor::process_activity(pid);
        if (!activity.has_value()) return std::nullopt;
        return std::make_pair(activity->ran_ns, activity->starved_ns);
      },
      py::arg("pid"));
  module.def("connected_sockets", [] {
    std::vector<std::pair<int, uint64_t>> result;
    for (const monitor::SocketIdentity& socket : monitor::connected_sockets()) {
      result.emplace_back(socket.fd, static_cast<uint64_t>(socket.inode));
    }
    return result;
  });
  module.def("monotonic_ns", [] { return monotonic_now().ns; });
}

}  // namespace

void register_monitor(py::module_& module) {
  register_pulse(module);
  module.def("announce_fatal_signals", &monitor::announce_fatal_signals);
  register_worker_monitor(module);
  register_supervisor(module);
  register_facts(module);
}

}  // namespace unicron::bindings
