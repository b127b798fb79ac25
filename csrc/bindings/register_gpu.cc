// GPUs: what there is, arenas, digests, exact sums, copies; addresses and streams cross as integers.
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "buffer_view.h"
#include "gpu/driver.h"
#include "gpu/kernels.h"
#include "register.h"
#include "state/digest.h"
#include "state/exact_sum.h"
#include "state/gpu_arena.h"
#include "state/gpu_copy.h"
#include "state/torch_allocator.h"
#include "to_stream.h"

namespace py = pybind11;

namespace unicron::bindings {

namespace {

using state::GpuArena;
using state::GpuCopier;
using state::GpuMapping;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

Deadline after_ms(int64_t timeout_ms) { return Deadline::after_ms(monotonic_now(), timeout_ms); }

void register_facts(py::module_& module) {
  module.attr("cuda") = gpu::has_kernels();
  module.def("num_cuda_devices", &gpu::num_devices, ReleaseGil());
  module.def("cuda_driver_version", &gpu::driver_version, ReleaseGil());
  module.def("why_no_cuda", &gpu::why_no_driver, ReleaseGil());
  module.def("cuda_device_name", &gpu::device_name, py::arg("device"), ReleaseGil());
  module.def(
      "cuda_device_facts",
      [](int device) {
        return std::make_tuple(
            gpu::device_attribute(device, gpu::kAttributeMajor), gpu::device_attribute(device, gpu::kAttributeMinor),
            gpu::device_attribute(device, gpu::kAttributeFileDescriptors) != 0, gpu::device_memory_bytes(device));
      },
      py::arg("device"), ReleaseGil());
  module.def(
      "load_kernels",
      [](int device) {
        const gpu::ScopedDevice current(device);
        gpu::load_kernels(device);
      },
      py::arg("device"), ReleaseGil());
  module.def("set_stack_bytes", &gpu::set_stack_bytes, py::arg("device"), py::arg("nbytes"), ReleaseGil());
}

std::vector<int> export_all(const GpuArena& arena) {
  std::vector<int> fds;
  for (Descriptor& descriptor : arena.export_all()) fds.push_back(descriptor.release());
  return fds;
}

std::vector<std::tuple<int64_t, uint64_t, uint64_t>> as_tuples(const std::vector<state::Piece>& pieces) {
  std::vector<std::tuple<int64_t, uint64_t, uint64_t>> result;
  for (const state::Piece& piece : pieces) result.emplace_back(piece.number, piece.offset, piece.nbytes);
  return result;
}

void register_arena(py::module_& module) {
  py::class_<GpuArena, std::shared_ptr<GpuArena>>(module, "GpuArena", py::is_final())
      .def(py::init([](int device, uint64_t capacity_bytes, bool own_memory) {
             const auto backing = own_memory ? state::Backing::kOwn : state::Backing::kShared;
             return std::make_shared<GpuArena>(device, capacity_bytes, backing);
           }),
           py::arg("device"), py::arg("capacity_bytes"), py::arg("own_memory"), ReleaseGil())
      .def_property_readonly("device", &GpuArena::device)
      .def_property_readonly("address", &GpuArena::begin)
      .def_property_readonly("memory_bytes", &GpuArena::memory_bytes)
      .def("allocate", &GpuArena::allocate, py::arg("nbytes"), ReleaseGil())
      .def("free", &GpuArena::free, py::arg("address"), ReleaseGil())
      .def(
          "pieces", [](const GpuArena& self) { return as_tuples(self.pieces()); }, ReleaseGil())
      .def(
          "slabs", [](const GpuArena& self) { return as_tuples(self.slabs()); }, ReleaseGil())
      .def("export_all", &export_all, ReleaseGil())
      .def("adopt", &GpuArena::adopt, py::arg("fds"), py::arg("sizes"), ReleaseGil())
      .def("let_go", &GpuArena::let_go, ReleaseGil())
      .def("take_own_memory", &GpuArena::take_own_memory, ReleaseGil())
      .def("open", [](const std::shared_ptr<GpuArena>& self) { state::open_arena(self); })
      .def("close", [](const GpuArena& self) { state::close_arena(self.device()); });
  module.def("arena_allocator_error", &state::last_allocator_error);
  py::class_<GpuMapping>(module, "GpuMapping", py::is_final())
      .def(py::init<int, uint64_t, int>(), py::arg("fd"), py::arg("nbytes"), py::arg("device"), ReleaseGil())
      .def_property_readonly("address", &GpuMapping::address)
      .def_property_readonly("nbytes", &GpuMapping::nbytes);
}

void register_digests(py::module_& module) {
  module.def(
      "digest",
      [](const py::object& data, uint64_t offset) {
        const BufferView view(data);
        const py::gil_scoped_release release;
        return state::digest(view.data(), view.size(), offset);
      },
      py::arg("data"), py::arg("offset"));
  module.def(
      "gpu_digest",
      [](int device, const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>& pieces, int64_t timeout_ms) {
        std::vector<state::GpuPiece> found;
        found.reserve(pieces.size());
        for (const auto& [address, nbytes, offset] : pieces) found.push_back({address, nbytes, offset});
        return state::gpu_digest(device, found, after_ms(timeout_ms));
      },
      py::arg("device"), py::arg("pieces"), py::arg("timeout_ms"), ReleaseGil());
}

state::CopyMode to_mode(const std::string& name) {
  if (name == "plain") return state::CopyMode::kPlain;
  if (name == "overlapped") return state::CopyMode::kOverlapped;
  if (name == "fused") return state::CopyMode::kFused;
  throw Error(ErrorCode::kInvalidArgument, "no way of copying is called '" + name + "'; plain, overlapped or fused");
}

void register_copier(py::module_& module) {
  py::class_<GpuCopier>(module, "GpuCopier", py::is_final())
      .def(py::init<int>(), py::arg("device"), ReleaseGil())
      .def("enable_peer", &GpuCopier::enable_peer, py::arg("peer"), ReleaseGil())
      .def(
          "copy",
          [](GpuCopier& self, uint64_t to, uint64_t from, uint64_t nbytes, const std::string& mode,
             int64_t timeout_ms) {
            const state::CopyResult result = self.copy(to, from, nbytes, to_mode(mode), after_ms(timeout_ms));
            return std::make_pair(result.digest, result.gpu_ms);
          },
          py::arg("to"), py::arg("source"), py::arg("nbytes"), py::arg("mode"), py::arg("timeout_ms"), ReleaseGil());
}

// A writable view of a buffer's elements of one type.
template <class T>
class Elements {
 public:
  Elements(const py::object& data, bool is_written) : view_(data, is_written) {
    if (view_.size() % sizeof(T) != 0 || reinterpret_cast<uintptr_t>(view_.data()) % alignof(T) != 0) {
      throw Error(ErrorCode::kInvalidArgument,
                  "a buffer of whole, aligned elements of " + std::to_string(sizeof(T)) + " bytes is needed");
    }
  }
  T* data() const { return static_cast<T*>(const_cast<void*>(view_.data())); }
  size_t count() const { return view_.size() / sizeof(T); }

 private:
  BufferView view_;
};

void require_same(size_t a, size_t b) {
  if (a != b) {
    throw Error(ErrorCode::kInvalidArgument,
                "the buffers have " + std::to_string(a) + " and " + std::to_string(b) + " elements");
  }
}

uint64_t accumulate(const py::object& sums, const py::object& terms, bool bf16, int exponent, int64_t num_terms) {
  const Elements<int64_t> to(sums, true);
  const state::Scale scale = state::make_scale(exponent, num_terms);
  if (bf16) {
    const Elements<uint16_t> from(terms, false);
    require_same(to.count(), from.count());
    return state::accumulate_bf16(to.data(), from.data(), to.count(), scale);
  }
  const Elements<float> from(terms, false);
  require_same(to.count(), from.count());
  return state::accumulate_f32(to.data(), from.data(), to.count(), scale);
}

void register_exact_sums(py::module_& module) {
  module.def("exact_accumulate", &accumulate, py::arg("sums"), py::arg("terms"), py::arg("bf16"), py::arg("exponent"),
             py::arg("num_terms"));
  module.def(
      "exact_to_float",
      [](const py::object& values, const py::object& sums, int exponent) {
        const Elements<float> to(values, true);
        const Elements<int64_t> from(sums, false);
        require_same(to.count(), from.count());
        state::to_float(to.data(), from.data(), to.count(), state::make_scale(exponent, 1));
      },
      py::arg("values"), py::arg("sums"), py::arg("exponent"));
  module.def(
      "exact_sum_squares",
      [](const py::object& parts, const py::object& values, int exponent) {
        const Elements<uint64_t> sum(parts, true);
        const Elements<float> from(values, false);
        require_same(sum.count(), gpu::kWideParts);
        state::WideSum wide;
        const uint64_t flags = state::sum_squares(&wide, from.data(), from.count(), state::make_scale(exponent, 1));
        for (size_t i = 0; i < gpu::kWideParts; ++i) sum.data()[i] += wide.parts[i];
        return flags;
      },
      py::arg("parts"), py::arg("values"), py::arg("exponent"));
  module.def(
      "exact_wide_value",
      [](const py::object& parts, int exponent) {
        const Elements<uint64_t> sum(parts, false);
        require_same(sum.count(), gpu::kWideParts);
        state::WideSum wide;
        for (size_t i = 0; i < gpu::kWideParts; ++i) wide.parts[i] = sum.data()[i];
        return state::wide_value(wide, state::make_scale(exponent, 1));
      },
      py::arg("parts"), py::arg("exponent"));
}

void register_gpu_exact_sums(py::module_& module) {
  module.def(
      "gpu_exact_accumulate",
      [](int device, uint64_t sums, uint64_t terms, uint64_t count, bool bf16, int exponent, int64_t num_terms,
         uint64_t flags, uintptr_t stream) {
        const state::Scale scale = state::make_scale(exponent, num_terms);
        state::gpu_accumulate(device, sums, terms, count, bf16, scale, flags, to_stream(stream));
      },
      py::arg("device"), py::arg("sums"), py::arg("terms"), py::arg("count"), py::arg("bf16"), py::arg("exponent"),
      py::arg("num_terms"), py::arg("flags"), py::arg("stream"), ReleaseGil());
  module.def(
      "gpu_exact_to_float",
      [](int device, uint64_t values, uint64_t sums, uint64_t count, int exponent, uintptr_t stream) {
        state::gpu_to_float(device, values, sums, count, state::make_scale(exponent, 1), to_stream(stream));
      },
      py::arg("device"), py::arg("values"), py::arg("sums"), py::arg("count"), py::arg("exponent"), py::arg("stream"),
      ReleaseGil());
  module.def(
      "gpu_exact_sum_squares",
      [](int device, uint64_t parts, uint64_t values, uint64_t count, int exponent, uint64_t flags, uintptr_t stream) {
        const state::Scale scale = state::make_scale(exponent, 1);
        state::gpu_sum_squares(device, parts, values, count, scale, flags, to_stream(stream));
      },
      py::arg("device"), py::arg("parts"), py::arg("values"), py::arg("count"), py::arg("exponent"), py::arg("flags"),
      py::arg("stream"), ReleaseGil());
}

}  // namespace

void register_gpu(py::module_& module) {
  // A reference to the functions that torch looks up by name, so that the linker keeps them.
  module.attr("ARENA_MALLOC") = "unicron_arena_malloc";
  module.attr("ARENA_FREE") = "unicron_arena_free";
  static const volatile auto kept = std::make_pair(&unicron_arena_malloc, &unicron_arena_free);
  static_cast<void>(kept);
  register_facts(module);
  register_arena(module);
  register_digests(module);
  register_copier(module);
  register_exact_sums(module);
  register_gpu_exact_sums(module);
}

}  // namespace unicron::bindings
