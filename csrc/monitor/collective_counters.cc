#include "monitor/collective_counters.h"

#include <string>

#include "base/error.h"
#include "gpu/driver.h"

namespace unicron::monitor {

CollectiveCounters::CollectiveCounters(int fd) : mapping_(fd, 0, kPageBytes) {}

CollectiveCounters::~CollectiveCounters() {
  if (on_device_ == 0) return;
  try {
    const gpu::ScopedDevice current(device_);
    gpu::driver().unregister_host(mapping_.data());
  } catch (const Error&) {
    // The device failed: the registration goes with the process.
  }
}

CollectiveCount& CollectiveCounters::count(int64_t slot) const {
  if (slot < 0 || slot >= kCountedGroupsMax) {
    throw Error(ErrorCode::kInvalidArgument,
                "counter " + std::to_string(slot) + " is outside 0 to " + std::to_string(kCountedGroupsMax - 1));
  }
  return static_cast<CollectiveCount*>(mapping_.data())[slot];
}

uint64_t CollectiveCounters::begin(int64_t slot) {
  return count(slot).begun.fetch_add(1, std::memory_order_acq_rel) + 1;
}

void CollectiveCounters::end_on_stream(int64_t slot, uint64_t number, int device, gpu::Stream stream) {
  CollectiveCount& counted = count(slot);
  const gpu::ScopedDevice current(device);
  if (on_device_ == 0) {
    gpu::check(gpu::driver().register_host(mapping_.data(), kPageBytes,
                                           gpu::kHostRegisterPortable | gpu::kHostRegisterDeviceMap),
               "registering the page of counters");
    gpu::check(gpu::driver().host_address(&on_device_, mapping_.data(), 0), "addressing the page of counters");
    device_ = device;
  }
  const auto offset = static_cast<uint64_t>(reinterpret_cast<char*>(&counted.ended) -  //
                                            static_cast<char*>(mapping_.data()));
  gpu::check(gpu::driver().write_value(stream, on_device_ + offset, number, 0), "counting a collective");
}

void CollectiveCounters::reset(int64_t slot) {
  count(slot).begun.store(0, std::memory_order_release);
  count(slot).ended.store(0, std::memory_order_release);
}

Descriptor create_counter_page() { return create_memory_file("unicron-counters", kPageBytes); }

}  // namespace unicron::monitor
