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
#include "monitor/liveness.h"
#include "read_array.h"
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

// A listener's table in simulated time: beats as Heart would read them, looks as Heart would take them.
class BeatReplay {
 public:
  using Change = std::tuple<double, uint32_t, std::string, int64_t>;

  explicit BeatReplay(int64_t look_ms) : look_ns_(look_ms * kNsPerMs), table_(look_ms) {}

  // Nodes 0 to num_nodes - 1, from the beginning on.
  void watch(uint32_t num_nodes, int64_t period_ms) {
    num_nodes_ = num_nodes;
    for (uint32_t node = 0; node < num_nodes; ++node) table_.watch(node, kIncarnation, kKey, period_ms, at(0.0));
  }

  // nodes, sequences, at_ms: of each beat, in the order in which they are read; seen: pairs (node, ms since the sender
  // heard it; negative: never) of each beat, equally many. pauses: (begin, end) of times without a look. Looks until
  // until_ms; what changed: (at, node, hearing, ms since it was heard).
  std::vector<Change> replay(const py::object& nodes, const py::object& sequences, const py::object& at_ms,
                             const py::object& seen, const py::object& pauses, double until_ms) {
    const std::vector<int32_t> node = read_array<int32_t>(nodes, "nodes");
    const std::vector<int32_t> sequence = read_array<int32_t>(sequences, "sequences");
    const std::vector<double> read_ms = read_array<double>(at_ms, "at_ms");
    const std::vector<int32_t> others = read_array<int32_t>(seen, "seen");
    const std::vector<double> pause = read_array<double>(pauses, "pauses");
    const size_t width = node.empty() ? 0 : others.size() / node.size();
    if (sequence.size() != node.size() || read_ms.size() != node.size() || width * node.size() != others.size() ||
        width % 2 != 0 || width / 2 > monitor::kBeatSeenMax || pause.size() % 2 != 0) {
      throw Error(ErrorCode::kInvalidArgument, "nodes, sequences, at_ms and pairs of seen differ in length");
    }
    const py::gil_scoped_release release;
    std::vector<Change> changes;
    size_t next_pause = 0;
    for (size_t index = 0; index < node.size(); ++index) {
      look_until(read_ms[index], pause, &next_pause, &changes);
      say(node[index], sequence[index], read_ms[index], others.data() + width * index, width / 2);
    }
    look_until(until_ms, pause, &next_pause, &changes);
    return changes;
  }

 private:
  static constexpr int64_t kNsPerMs = 1'000'000;
  static constexpr double kBeganMs = 1'000.0;  // the table takes 0 for never
  static constexpr uint64_t kIncarnation = 1;
  static constexpr BeatKey kKey{};

  static MonotonicTime at(double ms) { return {static_cast<int64_t>((ms + kBeganMs) * kNsPerMs)}; }

  void say(int32_t node, int32_t sequence, double now_ms, const int32_t* seen, size_t count) {
    if (node < 0 || static_cast<uint32_t>(node) >= num_nodes_) return;
    said_.sender = static_cast<uint32_t>(node);
    said_.incarnation = kIncarnation;
    said_.sequence = static_cast<uint64_t>(sequence);
    said_.seen.clear();
    for (size_t i = 0; i < count; ++i) {
      if (seen[2 * i + 1] < 0) continue;
      said_.seen.push_back({static_cast<uint32_t>(seen[2 * i]), static_cast<uint32_t>(seen[2 * i + 1])});
    }
    uint8_t bytes[monitor::kBeatBytesMax];
    const size_t size = monitor::write_beat(said_, kKey, bytes);
    table_.take(bytes, size, at(now_ms), &heard_);
  }

  void look_until(double end_ms, const std::vector<double>& pauses, size_t* next_pause, std::vector<Change>* changes) {
    const int64_t end_ns = at(end_ms).ns;
    while (next_look_ns_ < end_ns) {
      while (*next_pause + 1 < pauses.size() && at(pauses[*next_pause + 1]).ns <= next_look_ns_) *next_pause += 2;
      if (*next_pause + 1 < pauses.size() && at(pauses[*next_pause]).ns <= next_look_ns_) {
        next_look_ns_ = at(pauses[*next_pause + 1]).ns;
        continue;
      }
      for (const monitor::HearingChange& change : table_.look({next_look_ns_})) {
        const double now_ms = static_cast<double>(next_look_ns_) / kNsPerMs - kBeganMs;
        changes->emplace_back(now_ms, change.node, name_of(change.hearing), change.silent_ms);
      }
      next_look_ns_ += look_ns_;
    }
  }

  uint32_t num_nodes_ = 0;
  const int64_t look_ns_;
  int64_t next_look_ns_ = at(0.0).ns;
  monitor::LivenessTable table_;
  monitor::Beat said_;
  monitor::Beat heard_;
};

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
  py::class_<BeatReplay>(module, "BeatReplay", py::is_final())
      .def(py::init([](uint32_t num_nodes, int64_t period_ms, int64_t look_ms) {
             if (period_ms < 1 || look_ms < 1) throw Error(ErrorCode::kInvalidArgument, "give 1 ms or more");
             auto replay = std::make_unique<BeatReplay>(look_ms);
             replay->watch(num_nodes, period_ms);
             return replay;
           }),
           py::arg("num_nodes"), py::arg("period_ms"), py::arg("look_ms"))
      .def("replay", &BeatReplay::replay, py::arg("nodes"), py::arg("sequences"), py::arg("at_ms"), py::arg("seen"),
           py::arg("pauses"), py::arg("until_ms"));
}

}  // namespace unicron::bindings
