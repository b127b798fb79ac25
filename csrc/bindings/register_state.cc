// Arenas, their headers, and checksums.
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "buffer_view.h"
#include "register.h"
#include "state/arena.h"
#include "state/arena_header.h"
#include "state/box_digest.h"
#include "state/checksum.h"
#include "to_stream.h"

namespace py = pybind11;

namespace unicron::bindings {

namespace {

using state::ArenaFields;
using state::ArenaHeader;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

// A property that is one word of the header page. `Value` is what Python sees (bool for a word that is 0 or 1).
template <class Value, class Word>
void def_field(py::class_<ArenaHeader>& header, const char* name, std::atomic<Word> ArenaFields::* field) {
  header.def_property(
      name,
      [field](const ArenaHeader& self) -> Value {
        const Word word = (self.fields().*field).load(std::memory_order_acquire);
        if constexpr (std::is_same_v<Value, bool>) {
          return word != 0;
        } else {
          return word;
        }
      },
      [field](const ArenaHeader& self, Value value) {
        (self.fields().*field).store(static_cast<Word>(value), std::memory_order_release);
      });
}

void def_fields(py::class_<ArenaHeader>& header) {
  header.def_property_readonly("version", [](const ArenaHeader& self) { return self.fields().version.load(); });
  header.def_property_readonly("layout_digest", &ArenaHeader::layout_digest);
  header.def_property_readonly("nbytes", [](const ArenaHeader& self) { return self.fields().nbytes.load(); });
  def_field<int64_t>(header, "epoch", &ArenaFields::epoch);
  def_field<int64_t>(header, "iteration", &ArenaFields::iteration);
  def_field<int64_t>(header, "stage", &ArenaFields::stage);
  def_field<uint64_t>(header, "dealt_replicas", &ArenaFields::dealt_replicas);
  def_field<int64_t>(header, "reduction", &ArenaFields::reduction);
  def_field<bool>(header, "torn", &ArenaFields::torn);
  def_field<bool>(header, "summed", &ArenaFields::summed);
  def_field<int64_t>(header, "open_step", &ArenaFields::open_step);
  def_field<bool>(header, "ungathered", &ArenaFields::ungathered);
  def_field<bool>(header, "has_commit", &ArenaFields::has_commit);
  def_field<int64_t>(header, "commit_iteration", &ArenaFields::commit_iteration);
  def_field<double>(header, "commit_tokens", &ArenaFields::commit_tokens);
  def_field<double>(header, "commit_sumsq", &ArenaFields::commit_sumsq);
  def_field<double>(header, "commit_found_inf", &ArenaFields::commit_found_inf);
  def_field<double>(header, "commit_loss_sum", &ArenaFields::commit_loss_sum);
  def_field<int64_t>(header, "repeat", &ArenaFields::repeat);
  def_field<int64_t>(header, "commit_repeat", &ArenaFields::commit_repeat);
}

void register_header(py::module_& module) {
  py::class_<ArenaHeader> header(module, "ArenaHeader", py::is_final());
  header.def(py::init<int>(), py::arg("fd"))
      .def("format", &ArenaHeader::format, py::arg("layout_digest"), py::arg("nbytes"))
      .def("check", &ArenaHeader::check, py::arg("layout_digest"), py::arg("nbytes"));
  def_fields(header);
  header
      .def(
          "open_step_on_stream",
          [](ArenaHeader& self, int64_t value, int device, uintptr_t stream) {
            self.open_step_on_stream(value, device, to_stream(stream));
          },
          py::arg("value"), py::arg("device"), py::arg("stream"), ReleaseGil())
      .def(
          "set_done", [](ArenaHeader& self, const py::bytes& bitmap) { self.set_done(bitmap); },
          py::arg("micro_batches"))
      .def("done", [](const ArenaHeader& self) { return py::bytes(self.done()); })
      .def(
          "set_extra", [](ArenaHeader& self, const py::bytes& data) { self.set_extra(data); }, py::arg("data"))
      .def("extra", [](const ArenaHeader& self) { return py::bytes(self.extra()); });
}

uint64_t checksum_of(const py::object& data) {
  const BufferView view(data);
  const py::gil_scoped_release release;
  return state::checksum(view.data(), view.size());
}

using Axes = std::vector<int64_t>;

uint64_t box_digest_of(const py::object& data, int64_t first_byte, int64_t item_bytes, Axes extent, Axes strides,
                       Axes offset, Axes shape) {
  const state::BoxLayout box{first_byte,         item_bytes,        std::move(extent),
                             std::move(strides), std::move(offset), std::move(shape)};
  const BufferView view(data);
  const py::gil_scoped_release release;
  return state::box_digest(view.data(), view.size(), box);
}

}  // namespace

void register_state(py::module_& module) {
  module.attr("ARENA_HEADER_BYTES") = state::kArenaHeaderBytes;
  module.def(
      "create_arena", [](uint64_t nbytes) { return state::create_arena(nbytes).release(); }, py::arg("nbytes"),
      ReleaseGil());
  module.def("map_fixed", &state::map_fixed, py::arg("address"), py::arg("fd"), py::arg("nbytes"), ReleaseGil());
  module.def("checksum", &checksum_of, py::arg("data"));
  module.def("box_digest", &box_digest_of, py::arg("data"), py::arg("first_byte"), py::arg("item_bytes"),
             py::arg("extent"), py::arg("strides"), py::arg("offset"), py::arg("shape"));
  register_header(module);
}

}  // namespace unicron::bindings
