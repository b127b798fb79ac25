// The kernels, embedded in this library as one image for all supported GPUs and loaded by the driver.
//
// Rejected: compiling at run time with NVRTC. It would have to be there, of the right version, and costs an heir a
// second of its first iteration; nvcc is needed once, where the wheel is built.
#pragma once

#include <cstddef>
#include <string>

#include "gpu/driver_api.h"

namespace unicron::gpu {

// False in a build without nvcc: arenas, probing and plain copies work, digests and exact sums on the GPU do not.
bool has_kernels();

// Runs one kernel over `count` elements on the current device. `arguments` as of cuLaunchKernel. Throws Error.
void launch(int device, const char* kernel, size_t count, Stream stream, void** arguments);

// Loads all of them now, so that the first use costs nothing. No error where there are none.
void load_kernels(int device);

// Of the build: csrc/gpu/kernel_image_none.cc, or a file made by cmake/UnicronCuda.cmake.
extern const unsigned char kKernelImage[];
extern const size_t kKernelImageBytes;

}  // namespace unicron::gpu
