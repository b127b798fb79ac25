// How many collectives of each group were begun and how many ended, in a page that the agent reads too.
//
// "Begun" is counted by the host when it enqueues one, "ended" is written by the GPU itself in the order of its stream:
// no thread waits, and the numbers are right while the host is stuck. Compared across ranks they name who did not come:
// the rank whose "begun" is behind the others' (NCCL itself does not report a dead peer).
#pragma once

#include <atomic>
#include <cstdint>

#include "base/descriptor.h"
#include "base/mapping.h"
#include "gpu/driver_api.h"
#include "gpu/host_page.h"

namespace unicron::monitor {

constexpr int64_t kCountedGroupsMax = kPageBytes / 16;

struct CollectiveCount {
  std::atomic<uint64_t> begun;
  std::atomic<uint64_t> ended;  // written by the GPU
};

static_assert(sizeof(CollectiveCount) == 16);

class CollectiveCounters {
 public:
  explicit CollectiveCounters(int fd);  // a page of create_counter_page()
  CollectiveCounters(const CollectiveCounters&) = delete;
  CollectiveCounters& operator=(const CollectiveCounters&) = delete;

  // Worker: one more is being enqueued; its number, from 1 on.
  uint64_t begin(int64_t slot);
  // Worker: when the stream gets here, all up to `number` have ended.
  void end_on_stream(int64_t slot, uint64_t number, int device, gpu::Stream stream);
  uint64_t begun(int64_t slot) const { return count(slot).begun.load(std::memory_order_acquire); }
  uint64_t ended(int64_t slot) const { return count(slot).ended.load(std::memory_order_acquire); }
  void reset(int64_t slot);

 private:
  CollectiveCount& count(int64_t slot) const;

  SharedMapping mapping_;
  gpu::HostPage page_;
};

Descriptor create_counter_page();

}  // namespace unicron::monitor
