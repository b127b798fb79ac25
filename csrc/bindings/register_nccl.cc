// NCCL: what this process's library can do, communicators, the table that ends them, counters of collectives.
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "gpu/nccl.h"
#include "monitor/collective_counters.h"
#include "monitor/nccl_communicator.h"
#include "monitor/nccl_table.h"
#include "register.h"
#include "to_stream.h"
#include "waiting.h"

namespace py = pybind11;

namespace unicron::bindings {

namespace {

using monitor::CollectiveCounters;
using monitor::NcclCommunicator;
using monitor::NcclState;
using monitor::NcclTable;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

Deadline after_ms(int64_t timeout_ms) { return Deadline::after_ms(monotonic_now(), timeout_ms); }

void register_library(py::module_& module) {
  module.def("add_nccl_path", &gpu::add_nccl_path, py::arg("path"), ReleaseGil());
  module.def("nccl_version", &gpu::nccl_version, ReleaseGil());
  module.def("why_no_nccl", &gpu::why_no_nccl, ReleaseGil());
  module.def("nccl_missing", &gpu::nccl_missing, ReleaseGil());
}

const char* name_of(NcclState state) {
  switch (state) {
    case NcclState::kWhole:
      return "whole";
    case NcclState::kError:
      return "error";
    case NcclState::kEnding:
      return "ending";
    case NcclState::kEnded:
      return "ended";
    case NcclState::kStuck:
      return "stuck";
    case NcclState::kForgotten:
      break;
  }
  return "forgotten";
}

monitor::Communicator described(uintptr_t handle, int device, const std::vector<int64_t>& ranks, bool cross) {
  monitor::Communicator result;
  result.handle = reinterpret_cast<gpu::NcclComm>(handle);
  result.device = device;
  for (const int64_t rank : ranks) result.ranks.emplace_back(rank);
  result.is_cross = cross;
  return result;
}

void register_table(py::module_& module) {
  py::class_<NcclTable, std::shared_ptr<NcclTable>>(module, "NcclTable", py::is_final())
      .def(py::init([] { return std::shared_ptr<NcclTable>(new NcclTable, DeleteUnlessForked<NcclTable>()); }))
      .def(
          "register_torch",
          [](NcclTable& self, int64_t group, uintptr_t handle, int device, const std::vector<int64_t>& ranks,
             bool cross) { self.add(GroupId(group), described(handle, device, ranks, cross)); },
          py::arg("group"), py::arg("handle"), py::arg("device"), py::arg("ranks"), py::arg("cross"), ReleaseGil())
      .def(
          "register_own",
          [](NcclTable& self, int64_t group, NcclCommunicator& communicator, const std::vector<int64_t>& ranks,
             bool cross) {
            const auto handle = reinterpret_cast<uintptr_t>(communicator.handle());
            monitor::Communicator entry = described(handle, communicator.device(), ranks, cross);
            entry.is_owned = true;
            self.add(GroupId(group), std::move(entry));
            static_cast<void>(communicator.release());
          },
          py::arg("group"), py::arg("communicator"), py::arg("ranks"), py::arg("cross"), ReleaseGil())
      .def(
          "forget",
          [](NcclTable& self, int64_t group, int64_t timeout_ms) {
            return self.forget(GroupId(group), after_ms(timeout_ms));
          },
          py::arg("group"), py::arg("timeout_ms"), ReleaseGil())
      .def(
          "state", [](const NcclTable& self, int64_t group) { return name_of(self.state(GroupId(group))); },
          py::arg("group"), ReleaseGil())
      .def(
          "error", [](const NcclTable& self, int64_t group) { return self.error(GroupId(group)); }, py::arg("group"),
          ReleaseGil())
      .def(
          "end",
          [](NcclTable& self, const std::vector<int64_t>& touched) {
            std::vector<Rank> ranks;
            for (const int64_t rank : touched) ranks.emplace_back(rank);
            return self.end(ranks);
          },
          py::arg("touched"), ReleaseGil())
      .def("end_all", &NcclTable::end_all, ReleaseGil())
      .def(
          "wait_ended",
          [](NcclTable& self, int64_t timeout_ms) {
            return wait_in_slices(timeout_ms, [&](int64_t ms) { return self.wait_ended(after_ms(ms)); });
          },
          py::arg("timeout_ms"))
      .def("ending_ms", [](const NcclTable& self) {
        std::vector<std::pair<int64_t, double>> result;
        for (const auto& [group, ms] : self.ending_ms()) result.emplace_back(group.value(), ms);
        return result;
      });
}

void register_communicator(py::module_& module) {
  module.def("close_nccl_group_calls", &monitor::close_group_calls, ReleaseGil());
  module.def("make_nccl_id", [] { return py::bytes(monitor::make_nccl_id()); });
  py::class_<NcclCommunicator> communicator(module, "NcclCommunicator", py::is_final());
  communicator
      .def(py::init([](int device, int num_ranks, int rank, const py::bytes& unique_id) {
             const std::string_view id = unique_id;
             const py::gil_scoped_release release;
             return std::make_unique<NcclCommunicator>(device, num_ranks, rank, id);
           }),
           py::arg("device"), py::arg("num_ranks"), py::arg("rank"), py::arg("unique_id"))
      .def_property_readonly("handle",
                             [](const NcclCommunicator& self) { return reinterpret_cast<uintptr_t>(self.handle()); })
      .def_property_readonly("num_ranks", &NcclCommunicator::num_ranks)
      .def_property_readonly("rank", &NcclCommunicator::rank)
      .def(
          "wait_ready", [](const NcclCommunicator& self, int64_t timeout_ms) { self.wait_ready(after_ms(timeout_ms)); },
          py::arg("timeout_ms"), ReleaseGil())
      .def(
          "all_reduce_f32",
          [](const NcclCommunicator& self, uint64_t address, uint64_t count, uintptr_t stream) {
            self.all_reduce(address, count, gpu::kNcclFloat32, to_stream(stream));
          },
          py::arg("address"), py::arg("count"), py::arg("stream"), ReleaseGil())
      .def(
          "all_reduce_i64",
          [](const NcclCommunicator& self, uint64_t address, uint64_t count, uintptr_t stream) {
            self.all_reduce(address, count, gpu::kNcclInt64, to_stream(stream));
          },
          py::arg("address"), py::arg("count"), py::arg("stream"), ReleaseGil())
      .def("abort", &NcclCommunicator::abort, ReleaseGil());
  communicator
      .def("split", &NcclCommunicator::split, py::arg("color"), py::arg("key"), ReleaseGil(), py::keep_alive<0, 1>())
      .def("shrink", &NcclCommunicator::shrink, py::arg("excluded"), py::arg("abort"), ReleaseGil(),
           py::keep_alive<0, 1>())
      .def("make_grow_id", [](const NcclCommunicator& self) { return py::bytes(self.make_grow_id()); })
      .def(
          "grow",
          [](const NcclCommunicator& self, int num_ranks, const py::bytes& grow_id) {
            const std::string_view id = grow_id;
            const py::gil_scoped_release release;
            return self.grow(num_ranks, id);
          },
          py::arg("num_ranks"), py::arg("grow_id"), py::keep_alive<0, 1>());
  module.def(
      "join_grown",
      [](int device, int num_ranks, int rank, const py::bytes& grow_id) {
        const std::string_view id = grow_id;
        const py::gil_scoped_release release;
        return NcclCommunicator::join(device, num_ranks, rank, id);
      },
      py::arg("device"), py::arg("num_ranks"), py::arg("rank"), py::arg("grow_id"));
}

void register_counters(py::module_& module) {
  module.def("create_counter_page", [] { return monitor::create_counter_page().release(); });
  py::class_<CollectiveCounters>(module, "CollectiveCounters", py::is_final())
      .def(py::init<int>(), py::arg("fd"))
      .def("begin", &CollectiveCounters::begin, py::arg("slot"))
      .def(
          "end_on_stream",
          [](CollectiveCounters& self, int64_t slot, uint64_t number, int device, uintptr_t stream) {
            self.end_on_stream(slot, number, device, to_stream(stream));
          },
          py::arg("slot"), py::arg("number"), py::arg("device"), py::arg("stream"), ReleaseGil())
      .def("begun", &CollectiveCounters::begun, py::arg("slot"))
      .def("ended", &CollectiveCounters::ended, py::arg("slot"))
      .def("reset", &CollectiveCounters::reset, py::arg("slot"));
}

}  // namespace

void register_nccl(py::module_& module) {
  register_library(module);
  register_communicator(module);
  register_table(module);
  register_counters(module);
}

}  // namespace unicron::bindings
