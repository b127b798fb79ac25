// Beats, and the thread that sends and hears them.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "monitor/beat.h"
#include "monitor/heart.h"
#include "register.h"
#include "waiting.h"

namespace py = pybind11;

namespace unicron::bindings {

namespace {

using monitor::BeatKey;
using monitor::Heart;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

BeatKey to_key(const py::bytes& bytes) {
  const std::string_view view = bytes;
  BeatKey key{};
  if (view.size() != key.size()) throw Error(ErrorCode::kInvalidArgument, "a beat's key has 16 bytes");
  std::copy(view.begin(), view.end(), key.begin());
  return key;
}

const char* name_of(monitor::Hearing hearing) {
  switch (hearing) {
    case monitor::Hearing::kHeard:
      return "heard";
    case monitor::Hearing::kVouched:
      return "vouched";
    case monitor::Hearing::kSilent:
      return "silent";
    case monitor::Hearing::kUnheard:
      break;
  }
  return "unheard";
}

std::map<std::string, int64_t> facts_of(const Heart& heart) {
  const monitor::HeartFacts facts = heart.facts();
  const auto count = [](uint64_t value) { return static_cast<int64_t>(value); };
  return {{"taken", count(facts.num_taken)},
          {"sent", count(facts.num_sent)},
          {"unsent", count(facts.num_unsent)},
          {"refused_shape", count(facts.refusals.shape)},
          {"refused_stranger", count(facts.refusals.stranger)},
          {"refused_tag", count(facts.refusals.tag)},
          {"refused_stale", count(facts.refusals.stale)},
          {"cpu_ns", facts.cpu_ns}};
}

py::bytes write_beat(uint32_t node, uint64_t incarnation, uint64_t sequence, const py::bytes& key,
                     const std::vector<std::pair<uint32_t, uint32_t>>& seen) {
  if (seen.size() > monitor::kBeatSeenMax) throw Error(ErrorCode::kInvalidArgument, "a beat names at most 16 nodes");
  monitor::Beat beat{monitor::BeatKind::kBeat, node, incarnation, sequence, {}};
  for (const auto& [other, age_ms] : seen) beat.seen.push_back({other, age_ms});
  uint8_t bytes[monitor::kBeatBytesMax];
  const size_t size = monitor::write_beat(beat, to_key(key), bytes);
  return {reinterpret_cast<const char*>(bytes), size};
}

}  // namespace

void register_liveness(py::module_& module) {
  module.attr("BEAT_COORDINATOR") = monitor::kCoordinatorIndex;
  module.def("write_beat", &write_beat, py::arg("node"), py::arg("incarnation"), py::arg("sequence"), py::arg("key"),
             py::arg("seen"));
  py::class_<Heart, std::unique_ptr<Heart, DeleteUnlessForked<Heart>>>(module, "Heart", py::is_final())
      .def(py::init<const std::string&, int, int64_t>(), py::arg("host"), py::arg("port"), py::arg("look_ms"))
      .def_property_readonly("port", &Heart::port)
      .def("fileno", &Heart::fileno)
      .def(
          "watch",
          [](Heart& self, uint32_t node, uint64_t incarnation, const py::bytes& key, int64_t period_ms) {
            self.watch(node, incarnation, to_key(key), period_ms);
          },
          py::arg("node"), py::arg("incarnation"), py::arg("key"), py::arg("period_ms"))
      .def("forget", &Heart::forget, py::arg("node"))
      .def("take_changes",
           [](Heart& self) {
             std::vector<std::tuple<uint32_t, std::string, int64_t>> result;
             for (const monitor::HearingChange& change : self.take_changes()) {
               result.emplace_back(change.node, name_of(change.hearing), change.silent_ms);
             }
             return result;
           })
      .def(
          "beat_as",
          [](Heart& self, uint32_t node, uint64_t incarnation, const py::bytes& key, int64_t period_ms,
             int64_t loop_ms_max, const std::vector<std::pair<std::string, int>>& targets) {
            self.beat_as(node, incarnation, to_key(key), period_ms, loop_ms_max, targets);
          },
          py::arg("node"), py::arg("incarnation"), py::arg("key"), py::arg("period_ms"), py::arg("loop_ms_max"),
          py::arg("targets"))
      .def("turned", &Heart::turned)
      .def("facts", &facts_of)
      .def("close", &Heart::close, ReleaseGil());
}

}  // namespace unicron::bindings
