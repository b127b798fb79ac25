// The CUDA sources' answer to state/device.h. The runtime is linked statically and loads the driver itself.
#include <cuda_runtime_api.h>

#include "state/device.h"

namespace unicron::state {

int64_t num_cuda_devices() {
  int count = 0;
  // No driver and no device are answers here, not errors.
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace unicron::state
