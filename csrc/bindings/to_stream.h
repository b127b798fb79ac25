// A CUDA stream as Python has it (torch's `cuda_stream`): an integer.
#pragma once

#include <cstdint>

#include "gpu/driver_api.h"

namespace unicron::bindings {

inline gpu::Stream to_stream(uintptr_t stream) { return reinterpret_cast<gpu::Stream>(stream); }

}  // namespace unicron::bindings
