#include "gpu/driver.h"

#include <algorithm>
#include <array>
#include <mutex>

#include "base/error.h"
#include "base/shared_library.h"

namespace unicron::gpu {

namespace {

constexpr int64_t kPollStepNsMin = 5'000;
constexpr int64_t kPollStepNsMax = 200'000;

struct Found {
  DriverApi api;
  int version = 0;
  int num_devices = 0;
  std::string why_not;  // empty: usable
};

std::string describe(const DriverApi& api, Result result) {
  const char* name = nullptr;
  const char* meaning = nullptr;
  if (api.error_name != nullptr) api.error_name(result, &name);
  if (api.error_string != nullptr) api.error_string(result, &meaning);
  return std::string(name != nullptr ? name : "CUDA error") + " " + std::to_string(result) +
         (meaning != nullptr ? std::string(" (") + meaning + ")" : std::string());
}

// The first missing function's name, or nothing.
std::string resolve(void* library, DriverApi* api) {
#define UNICRON_RESOLVE(member, name, arguments)                                                 \
  api->member = reinterpret_cast<Result(*) arguments>(find_symbol(library, #name)); /* NOLINT */ \
  if (api->member == nullptr) return #name;
  UNICRON_DRIVER_FUNCTIONS(UNICRON_RESOLVE)
#undef UNICRON_RESOLVE
  return "";
}

Found load() {
  Found found;
  std::string why;
  void* library = open_library({"libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1"}, &why);
  if (library == nullptr) {
    found.why_not = "no CUDA driver: " + why;
    return found;
  }
  const std::string missing = resolve(library, &found.api);
  if (!missing.empty()) {
    found.why_not = "the CUDA driver lacks " + missing + "; CUDA 11.7 or later is needed";
    return found;
  }
  if (const Result result = found.api.init(0); result != kSuccess) {
    found.why_not = "the CUDA driver cannot be used: " + describe(found.api, result);
    return found;
  }
  found.api.driver_version(&found.version);
  found.api.device_count(&found.num_devices);
  found.num_devices = std::min(found.num_devices, kDevicesMax);
  return found;
}

const Found& found() {
  static const Found result = load();
  return result;
}

// Retained for the process's life: they are torch's own, and end with it.
Context primary_context(int device) {
  static std::mutex mutex;
  static std::array<Context, kDevicesMax> contexts{};
  const DriverApi& api = driver();
  if (device < 0 || device >= found().num_devices) {
    throw Error(ErrorCode::kInvalidArgument, "there is no GPU " + std::to_string(device) + "; this process sees " +
                                                 std::to_string(found().num_devices));
  }
  const std::lock_guard lock(mutex);
  Context& context = contexts[static_cast<size_t>(device)];
  if (context == nullptr) {
    check(api.retain_context(&context, device), "taking the context of GPU " + std::to_string(device));
  }
  return context;
}

}  // namespace

const DriverApi* find_driver() { return found().why_not.empty() ? &found().api : nullptr; }

std::string why_no_driver() { return found().why_not; }

const DriverApi& driver() {
  if (!found().why_not.empty()) throw Error(ErrorCode::kNoDevice, found().why_not);
  return found().api;
}

int num_devices() { return find_driver() != nullptr ? found().num_devices : 0; }

int driver_version() { return find_driver() != nullptr ? found().version : 0; }

std::string device_name(int device) {
  char name[256] = {};
  check(driver().device_name(name, sizeof(name) - 1, device), "asking for the name of GPU " + std::to_string(device));
  return name;
}

int device_attribute(int device, int attribute) {
  int value = 0;
  check(driver().device_attribute(&value, attribute, device),
        "asking GPU " + std::to_string(device) + " for attribute " + std::to_string(attribute));
  return value;
}

uint64_t device_memory_bytes(int device) {
  size_t nbytes = 0;
  check(driver().device_memory(&nbytes, device), "asking for the memory of GPU " + std::to_string(device));
  return nbytes;
}

size_t set_stack_bytes(int device, size_t nbytes) {
  const ScopedDevice current(device);
  size_t before = 0;
  check(driver().get_limit(&before, kLimitStackSize), "asking GPU " + std::to_string(device) + " for its stack limit");
  check(driver().set_limit(kLimitStackSize, nbytes), "setting the stack limit of GPU " + std::to_string(device));
  return before;
}

void check(Result result, const std::string& what) {
  if (result == kSuccess) return;
  throw Error(ErrorCode::kDevice, what + ": " + describe(found().api, result));
}

ScopedDevice::ScopedDevice(int device) {
  check(driver().push_context(primary_context(device)), "entering the context of GPU " + std::to_string(device));
}

ScopedDevice::~ScopedDevice() {
  Context popped = nullptr;
  driver().pop_context(&popped);
}

OwnedStream::OwnedStream() { check(driver().create_stream(&stream_, kStreamNonBlocking), "making a stream"); }

OwnedStream::~OwnedStream() { driver().destroy_stream(stream_); }

OwnedEvent::OwnedEvent() { check(driver().create_event(&event_, kEventDefault), "making an event"); }

OwnedEvent::~OwnedEvent() { driver().destroy_event(event_); }

void OwnedEvent::wait(Deadline deadline, const std::string& what) const {
  // Asked in steps: the driver's own wait has no bound, and a stuck device must not hold its caller.
  int64_t step_ns = kPollStepNsMin;
  while (true) {
    const Result result = driver().query_event(event_);
    if (result != kNotReady) return check(result, what);
    const MonotonicTime now = monotonic_now();
    if (deadline.is_past(now)) throw Error(ErrorCode::kTimeout, what + ": the device did not finish in time");
    const timespec step = to_timespec(MonotonicTime{std::min(step_ns, deadline.at().ns - now.ns)});
    ::nanosleep(&step, nullptr);
    step_ns = std::min(step_ns * 2, kPollStepNsMax);
  }
}

DeviceWords::DeviceWords(size_t num_words, Stream stream) {
  const size_t nbytes = num_words * sizeof(uint64_t);
  check(driver().allocate(&address_, nbytes), "allocating " + std::to_string(nbytes) + " bytes");
  check(driver().set_bytes(address_, 0, nbytes, stream), "zeroing " + std::to_string(nbytes) + " bytes");
}

uint64_t DeviceWords::read(Stream stream) const {
  uint64_t word = 0;
  // From pageable memory, so the driver has copied when it returns (as its synchronisation rules say).
  check(driver().copy_to_host(&word, address_, sizeof(word), stream), "reading a word of GPU memory");
  return word;
}

DeviceWords::~DeviceWords() { driver().free(address_); }

}  // namespace unicron::gpu
