#include "monitor/collective_counters.h"

#include <string>

#include "base/error.h"

namespace unicron::monitor {

CollectiveCounters::CollectiveCounters(int fd) : mapping_(fd, 0, kPageBytes), page_(mapping_.data(), kPageBytes) {}

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
  page_.write_on_stream(&count(slot).ended, number, device, stream);
}

void CollectiveCounters::reset(int64_t slot) {
  count(slot).begun.store(0, std::memory_order_release);
  count(slot).ended.store(0, std::memory_order_release);
}

Descriptor create_counter_page() { return create_memory_file("unicron-counters", kPageBytes); }

}  // namespace unicron::monitor
