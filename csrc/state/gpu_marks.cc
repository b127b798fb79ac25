#include "state/gpu_marks.h"

#include <cstddef>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace unicron::state {

namespace {

// Never given back: who waited for the marks of a stream that hangs would hang with it.
void keep(std::shared_ptr<ArenaHeader> header) {
  static std::mutex mutex;
  static auto& kept = *new std::vector<std::shared_ptr<ArenaHeader>>();
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(header));
}

}  // namespace

GpuMarks::GpuMarks(int device, std::shared_ptr<ArenaHeader> header) : device_(device) {
  const gpu::ScopedDevice current(device_);
  ArenaFields& fields = header->fields();
  gpu::check(
      gpu::driver().register_host(&fields, kArenaHeaderBytes, gpu::kHostRegisterPortable | gpu::kHostRegisterDeviceMap),
      "mapping an arena's header for GPU " + std::to_string(device_));
  try {
    gpu::check(gpu::driver().host_address(&open_step_, &fields, 0), "finding an arena's header on the GPU");
  } catch (...) {
    gpu::driver().unregister_host(&fields);
    throw;
  }
  open_step_ += offsetof(ArenaFields, open_step);
  keep(std::move(header));
}

void GpuMarks::set_open_step(gpu::Stream stream, int64_t value) {
  const gpu::ScopedDevice current(device_);
  gpu::check(gpu::driver().write_value(stream, open_step_, static_cast<uint64_t>(value), 0),
             "marking a chunk of the step");
}

}  // namespace unicron::state
