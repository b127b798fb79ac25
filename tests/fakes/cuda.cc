// A libcuda.so.1 without a GPU: an injector of faults for bookkeeping and error paths, nothing more.
//
// Memory handles are memfds, addresses are mmap; copies happen at once; kernels cannot be launched. It says nothing
// about what a GPU does or how fast: that is what tests/gpu is for. The environment decides what goes wrong:
//   FAKE_CUDA_DEVICES=n          devices (default 2)
//   FAKE_CUDA_MEMORY=bytes       memory of each (default 1 GiB)
//   FAKE_CUDA_FAIL=name:k        the k-th call of that function fails, and all later ones (out of memory)
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "gpu/driver_api.h"

using namespace unicron::gpu;

namespace {

constexpr size_t kGranularity = 2 << 20;
constexpr Result kInvalidValue = 1;
constexpr Result kInvalidDevice = 101;
constexpr Result kNotSupported = 801;

struct Fake {
  std::mutex mutex;
  std::map<std::string, int> calls;
  std::map<MemoryHandle, int> handles;  // descriptor
  std::map<MemoryHandle, size_t> sizes;
  std::map<DevicePointer, size_t> reservations;
  std::map<DevicePointer, std::pair<size_t, MemoryHandle>> mappings;
  size_t used_bytes = 0;
  MemoryHandle next_handle = 1;
} fake;

size_t number(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

bool fails(const char* name) {
  const char* plan = std::getenv("FAKE_CUDA_FAIL");
  if (plan == nullptr) return false;
  const std::string text = plan;
  const size_t colon = text.find(':');
  const int call = ++fake.calls[name];
  return text.substr(0, colon) == name && call >= std::atoi(text.c_str() + colon + 1);
}

#define FAKE(name) extern "C" __attribute__((visibility("default"))) Result name
#define LOCKED_OR_FAIL(name)                          \
  const std::lock_guard<std::mutex> lock(fake.mutex); \
  if (fails(name)) return kOutOfMemory

MemoryHandle add(int fd) {
  struct stat status{};
  ::fstat(fd, &status);
  const MemoryHandle handle = fake.next_handle++;
  fake.handles[handle] = fd;
  fake.sizes[handle] = static_cast<size_t>(status.st_size);
  return handle;
}

void* pointer(DevicePointer address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }

}  // namespace

FAKE(cuInit)(unsigned) { return fails("cuInit") ? 999 : kSuccess; }
FAKE(cuDriverGetVersion)(int* version) { return *version = 13000, kSuccess; }
FAKE(cuGetErrorName)(Result result, const char** name) {
  return *name = result == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE", kSuccess;
}
FAKE(cuGetErrorString)(Result, const char** text) { return *text = "of the injector", kSuccess; }
FAKE(cuDeviceGetCount)(int* count) { return *count = static_cast<int>(number("FAKE_CUDA_DEVICES", 2)), kSuccess; }
FAKE(cuDeviceGetName)(char* name, int, DeviceIndex) { return std::strcpy(name, "no GPU"), kSuccess; }
FAKE(cuDeviceTotalMem_v2)(size_t* nbytes, DeviceIndex) {
  return *nbytes = number("FAKE_CUDA_MEMORY", 1 << 30), kSuccess;
}
FAKE(cuDeviceGetAttribute)(int* value, int attribute, DeviceIndex) {
  return *value = attribute == kAttributeRdmaCapable ? 0 : 1, kSuccess;
}
FAKE(cuDeviceCanAccessPeer)(int* can, DeviceIndex, DeviceIndex) { return *can = 0, kSuccess; }
FAKE(cuDevicePrimaryCtxRetain)(Context* context, DeviceIndex device) {
  if (device >= static_cast<int>(number("FAKE_CUDA_DEVICES", 2))) return kInvalidDevice;
  return *context = reinterpret_cast<Context>(static_cast<uintptr_t>(device) + 1), kSuccess;
}
FAKE(cuCtxPushCurrent_v2)(Context) { return kSuccess; }
FAKE(cuCtxPopCurrent_v2)(Context* context) { return *context = nullptr, kSuccess; }
FAKE(cuCtxSynchronize)() { return kSuccess; }
FAKE(cuCtxEnablePeerAccess)(Context, unsigned) { return kNotSupported; }

static size_t stack_bytes = 1024;
FAKE(cuCtxGetLimit)(size_t* value, int limit) {
  if (limit != kLimitStackSize) return kNotSupported;
  *value = stack_bytes;
  return kSuccess;
}
FAKE(cuCtxSetLimit)(int limit, size_t value) {
  if (limit != kLimitStackSize || value > 64 * 1024) return kNotSupported;
  stack_bytes = value;
  return kSuccess;
}
FAKE(cuMemGetInfo_v2)(size_t* free, size_t* total) {
  *total = number("FAKE_CUDA_MEMORY", 1 << 30);
  return *free = *total - fake.used_bytes, kSuccess;
}
FAKE(cuMemGetAllocationGranularity)(size_t* granularity, const MemoryProperties*, int) {
  return *granularity = kGranularity, kSuccess;
}
FAKE(cuMemCreate)(MemoryHandle* handle, size_t nbytes, const MemoryProperties* wanted, unsigned long long) {
  LOCKED_OR_FAIL("cuMemCreate");
  if (nbytes == 0 || nbytes % kGranularity != 0 || wanted->handle_types != kHandleFileDescriptor) return kInvalidValue;
  if (fake.used_bytes + nbytes > number("FAKE_CUDA_MEMORY", 1 << 30)) return kOutOfMemory;
  const int fd = ::memfd_create("fake-gpu", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(nbytes)) != 0) return kOutOfMemory;
  fake.used_bytes += nbytes;
  return *handle = add(fd), kSuccess;
}
FAKE(cuMemRelease)(MemoryHandle handle) {
  LOCKED_OR_FAIL("cuMemRelease");
  const auto found = fake.handles.find(handle);
  if (found == fake.handles.end()) return kInvalidValue;
  ::close(found->second);
  fake.used_bytes -= fake.sizes[handle];
  fake.sizes.erase(handle);
  fake.handles.erase(found);
  return kSuccess;
}
FAKE(cuMemAddressReserve)(DevicePointer* address, size_t nbytes, size_t, DevicePointer, unsigned long long) {
  LOCKED_OR_FAIL("cuMemAddressReserve");
  if (nbytes % kGranularity != 0) return kInvalidValue;
  void* range = ::mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return kOutOfMemory;
  *address = reinterpret_cast<uintptr_t>(range);
  fake.reservations[*address] = nbytes;
  return kSuccess;
}
FAKE(cuMemAddressFree)(DevicePointer address, size_t nbytes) {
  LOCKED_OR_FAIL("cuMemAddressFree");
  const auto found = fake.reservations.find(address);
  if (found == fake.reservations.end() || found->second != nbytes) return kInvalidValue;
  ::munmap(pointer(address), nbytes);
  fake.reservations.erase(found);
  return kSuccess;
}
FAKE(cuMemMap)(DevicePointer address, size_t nbytes, size_t offset, MemoryHandle handle, unsigned long long) {
  LOCKED_OR_FAIL("cuMemMap");
  const auto found = fake.handles.find(handle);
  if (found == fake.handles.end() || offset != 0 || nbytes != fake.sizes[handle]) return kInvalidValue;
  const auto next = fake.mappings.lower_bound(address);
  if (next != fake.mappings.end() && next->first < address + nbytes) return kInvalidValue;
  if (next != fake.mappings.begin()) {
    const auto& [before, mapping] = *std::prev(next);
    if (before + mapping.first > address) return kInvalidValue;
  }
  // Reachable only after cuMemSetAccess, as on a GPU.
  ::mmap(pointer(address), nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second, 0);
  fake.mappings[address] = {nbytes, handle};
  return kSuccess;
}
FAKE(cuMemUnmap)(DevicePointer address, size_t nbytes) {
  LOCKED_OR_FAIL("cuMemUnmap");
  const auto found = fake.mappings.find(address);
  if (found == fake.mappings.end() || found->second.first != nbytes) return kInvalidValue;
  ::mmap(pointer(address), nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  fake.mappings.erase(found);
  return kSuccess;
}
FAKE(cuMemSetAccess)(DevicePointer address, size_t nbytes, const MemoryAccess* access, size_t) {
  LOCKED_OR_FAIL("cuMemSetAccess");
  if (access->flags != 3) return kInvalidValue;
  return ::mprotect(pointer(address), nbytes, PROT_READ | PROT_WRITE) == 0 ? kSuccess : kInvalidValue;
}
FAKE(cuMemExportToShareableHandle)(void* fd, MemoryHandle handle, int, unsigned long long) {
  LOCKED_OR_FAIL("cuMemExportToShareableHandle");
  const auto found = fake.handles.find(handle);
  if (found == fake.handles.end()) return kInvalidValue;
  *static_cast<int*>(fd) = ::dup(found->second);
  return kSuccess;
}
FAKE(cuMemImportFromShareableHandle)(MemoryHandle* handle, void* fd, int) {
  LOCKED_OR_FAIL("cuMemImportFromShareableHandle");
  const int copied = ::dup(static_cast<int>(reinterpret_cast<intptr_t>(fd)));
  if (copied < 0) return kInvalidValue;
  *handle = add(copied);
  fake.used_bytes += fake.sizes[*handle];
  return kSuccess;
}
FAKE(cuMemAlloc_v2)(DevicePointer* address, size_t nbytes) {
  return *address = reinterpret_cast<uintptr_t>(std::calloc(1, nbytes)), kSuccess;
}
FAKE(cuMemFree_v2)(DevicePointer address) { return std::free(pointer(address)), kSuccess; }
FAKE(cuMemcpyHtoDAsync_v2)(DevicePointer to, const void* from, size_t nbytes, Stream) {
  return std::memcpy(pointer(to), from, nbytes), kSuccess;
}
FAKE(cuMemcpyDtoHAsync_v2)(void* to, DevicePointer from, size_t nbytes, Stream) {
  return std::memcpy(to, pointer(from), nbytes), kSuccess;
}
FAKE(cuMemcpyDtoDAsync_v2)(DevicePointer to, DevicePointer from, size_t nbytes, Stream) {
  return std::memcpy(pointer(to), pointer(from), nbytes), kSuccess;
}
FAKE(cuMemsetD8Async)(DevicePointer to, unsigned char byte, size_t nbytes, Stream) {
  return std::memset(pointer(to), byte, nbytes), kSuccess;
}
FAKE(cuMemHostRegister_v2)(void*, size_t, unsigned) { return kSuccess; }
FAKE(cuMemHostUnregister)(void*) { return kSuccess; }
FAKE(cuMemHostGetDevicePointer_v2)(DevicePointer* address, void* host, unsigned) {
  return *address = reinterpret_cast<uintptr_t>(host), kSuccess;
}
FAKE(cuStreamCreate)(Stream* stream, unsigned) { return *stream = nullptr, kSuccess; }
FAKE(cuStreamDestroy_v2)(Stream) { return kSuccess; }
FAKE(cuStreamWaitEvent)(Stream, Event, unsigned) { return kSuccess; }
FAKE(cuStreamWriteValue64_v2)(Stream, DevicePointer address, uint64_t value, unsigned) {
  return *static_cast<uint64_t*>(pointer(address)) = value, kSuccess;
}
FAKE(cuEventCreate)(Event* event, unsigned) { return *event = nullptr, kSuccess; }
FAKE(cuEventDestroy_v2)(Event) { return kSuccess; }
FAKE(cuEventRecord)(Event, Stream) { return kSuccess; }
FAKE(cuEventQuery)(Event) { return std::getenv("FAKE_CUDA_STUCK") != nullptr ? kNotReady : kSuccess; }
FAKE(cuEventElapsedTime_v2)(float* ms, Event, Event) { return *ms = 1, kSuccess; }
FAKE(cuEventElapsedTime)(float* ms, Event, Event) { return *ms = 1, kSuccess; }
FAKE(cuModuleLoadData)(Module* module, const void*) { return *module = reinterpret_cast<Module>(1), kSuccess; }
FAKE(cuModuleGetFunction)(Function* function, Module, const char*) {
  return *function = reinterpret_cast<Function>(1), kSuccess;
}
FAKE(cuLaunchKernel)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**,
                     void**) {
  return kNotSupported;
}
