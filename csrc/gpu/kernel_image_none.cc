// A build without nvcc has no kernels.
#include "gpu/kernels.h"

namespace unicron::gpu {

extern const unsigned char kKernelImage[1] = {0};
extern const size_t kKernelImageBytes = 0;

}  // namespace unicron::gpu
