#include "gpu/kernels.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include "base/error.h"
#include "gpu/driver.h"

namespace unicron::gpu {

namespace {

constexpr unsigned kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 8;
constexpr size_t kElementsPerThreadMin = 4;

const char* const kKernels[] = {"unicron_digest",          "unicron_copy_digest", "unicron_accumulate_f32",
                                "unicron_accumulate_bf16", "unicron_to_float",    "unicron_sum_squares"};

struct Loaded {
  Module module = nullptr;
  int num_multiprocessors = 0;
  std::map<std::string, Function> functions;
};

// Per device, for the process's life. The device is current.
const Loaded& loaded(int device) {
  static std::mutex mutex;
  static std::array<Loaded, kDevicesMax> all;
  if (!has_kernels()) {
    throw Error(ErrorCode::kNoDevice,
                "this unicron was built without nvcc and has no kernels; build it with UNICRON_CUDA=ON");
  }
  const std::lock_guard lock(mutex);
  Loaded& entry = all.at(static_cast<size_t>(device));
  if (entry.module != nullptr) return entry;
  Module module = nullptr;
  check(driver().load_module(&module, kKernelImage), "loading unicron's kernels on GPU " + std::to_string(device));
  for (const char* name : kKernels) {
    check(driver().find_function(&entry.functions[name], module, name), std::string("finding kernel ") + name);
  }
  entry.num_multiprocessors = device_attribute(device, kAttributeMultiprocessors);
  entry.module = module;
  return entry;
}

}  // namespace

bool has_kernels() { return kKernelImageBytes > 0; }

void load_kernels(int device) {
  if (has_kernels()) loaded(device);
}

void launch(int device, const char* kernel, size_t count, Stream stream, void** arguments) {
  const Loaded& entry = loaded(device);
  const auto most = static_cast<size_t>(entry.num_multiprocessors) * kBlocksPerMultiprocessor;
  const size_t wanted = count / (kThreads * kElementsPerThreadMin) + 1;
  const auto blocks = static_cast<unsigned>(std::min(most, wanted));
  check(driver().launch(entry.functions.at(kernel), blocks, 1, 1, kThreads, 1, 1, 0, stream, arguments, nullptr),
        std::string("launching ") + kernel);
}

}  // namespace unicron::gpu
