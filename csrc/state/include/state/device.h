// Which accelerators this process can use.
#pragma once

#include <cstdint>

namespace unicron::state {

// CUDA devices; 0 in a build without the CUDA sources, without a driver and without a device. Loads the driver: do not
// call it in a process that is to be forked.
int64_t num_cuda_devices();

}  // namespace unicron::state
