// Marks in an arena's header that are set in the order of a stream: when all that was begun before one is in memory,
// the mark is, and nobody waits for it. The optimizer's step goes chunk by chunk; a CPU that waited for the GPU twice a
// chunk left it standing most of a short step.
#pragma once

#include <cstdint>
#include <memory>

#include "gpu/driver.h"
#include "state/arena_header.h"

namespace unicron::state {

class GpuMarks {
 public:
  // Maps the header's page for the device, until the process ends: a mark that is still to come must find it.
  GpuMarks(int device, std::shared_ptr<ArenaHeader> header);

  void set_open_step(gpu::Stream stream, int64_t value);

 private:
  const int device_;
  gpu::DevicePointer open_step_ = 0;
};

}  // namespace unicron::state
