// The part of the CUDA driver's binary interface that unicron uses, declared here.
//
// So every build, also one on a machine without CUDA's headers, can use a driver that it finds at run time; only the
// kernels need nvcc. csrc/gpu/abi_check.cc compares every line with cuda.h wherever that is there. Rejected: linking
// libcuda (then the module does not import where there is no driver) and the static runtime (it brings its own idea of
// contexts and needs nvcc's headers).
#pragma once

#include <cstddef>
#include <cstdint>

namespace unicron::gpu {

using Result = int;  // CUresult
using DeviceIndex = int;
using Context = struct CUctx_st*;
using Stream = struct CUstream_st*;
using Event = struct CUevent_st*;
using Module = struct CUmod_st*;
using Function = struct CUfunc_st*;
using DevicePointer = unsigned long long;
using MemoryHandle = unsigned long long;

constexpr Result kSuccess = 0;
constexpr Result kOutOfMemory = 2;
constexpr Result kNotReady = 600;

constexpr int kAttributeMultiprocessors = 16;
constexpr int kAttributeMajor = 75;
constexpr int kAttributeMinor = 76;
constexpr int kAttributeVirtualMemory = 102;
constexpr int kAttributeFileDescriptors = 103;
constexpr int kAttributeRdmaCapable = 110;

constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDefault = 0;
constexpr unsigned kHostRegisterPortable = 1;
constexpr unsigned kHostRegisterDeviceMap = 2;
constexpr int kHandleFileDescriptor = 1;
constexpr int kLimitStackSize = 0;

struct MemoryLocation {
  int type = 1;  // a device
  int id = 0;
};

struct MemoryProperties {  // CUmemAllocationProp
  int type = 1;            // pinned
  int handle_types = kHandleFileDescriptor;
  MemoryLocation location;
  void* windows_only = nullptr;
  unsigned char compression = 0;
  unsigned char is_rdma_capable = 0;
  unsigned short usage = 0;
  unsigned char reserved[4] = {};
};

struct MemoryAccess {  // CUmemAccessDesc
  MemoryLocation location;
  int flags = 3;  // read and write
};

// X(member, exported name, arguments)
#define UNICRON_DRIVER_FUNCTIONS(X)                                                                            \
  X(init, cuInit, (unsigned))                                                                                  \
  X(driver_version, cuDriverGetVersion, (int*))                                                                \
  X(error_name, cuGetErrorName, (Result, const char**))                                                        \
  X(error_string, cuGetErrorString, (Result, const char**))                                                    \
  X(device_count, cuDeviceGetCount, (int*))                                                                    \
  X(device_name, cuDeviceGetName, (char*, int, DeviceIndex))                                                   \
  X(device_memory, cuDeviceTotalMem_v2, (size_t*, DeviceIndex))                                                \
  X(device_attribute, cuDeviceGetAttribute, (int*, int, DeviceIndex))                                          \
  X(can_access_peer, cuDeviceCanAccessPeer, (int*, DeviceIndex, DeviceIndex))                                  \
  X(retain_context, cuDevicePrimaryCtxRetain, (Context*, DeviceIndex))                                         \
  X(push_context, cuCtxPushCurrent_v2, (Context))                                                              \
  X(pop_context, cuCtxPopCurrent_v2, (Context*))                                                               \
  X(synchronize, cuCtxSynchronize, ())                                                                         \
  X(enable_peer, cuCtxEnablePeerAccess, (Context, unsigned))                                                   \
  X(get_limit, cuCtxGetLimit, (size_t*, int))                                                                  \
  X(set_limit, cuCtxSetLimit, (int, size_t))                                                                   \
  X(memory_info, cuMemGetInfo_v2, (size_t*, size_t*))                                                          \
  X(granularity, cuMemGetAllocationGranularity, (size_t*, const MemoryProperties*, int))                       \
  X(create_memory, cuMemCreate, (MemoryHandle*, size_t, const MemoryProperties*, unsigned long long))          \
  X(release_memory, cuMemRelease, (MemoryHandle))                                                              \
  X(reserve_address, cuMemAddressReserve, (DevicePointer*, size_t, size_t, DevicePointer, unsigned long long)) \
  X(free_address, cuMemAddressFree, (DevicePointer, size_t))                                                   \
  X(map_memory, cuMemMap, (DevicePointer, size_t, size_t, MemoryHandle, unsigned long long))                   \
  X(unmap_memory, cuMemUnmap, (DevicePointer, size_t))                                                         \
  X(set_access, cuMemSetAccess, (DevicePointer, size_t, const MemoryAccess*, size_t))                          \
  X(export_memory, cuMemExportToShareableHandle, (void*, MemoryHandle, int, unsigned long long))               \
  X(import_memory, cuMemImportFromShareableHandle, (MemoryHandle*, void*, int))                                \
  X(allocate, cuMemAlloc_v2, (DevicePointer*, size_t))                                                         \
  X(free, cuMemFree_v2, (DevicePointer))                                                                       \
  X(copy_to_device, cuMemcpyHtoDAsync_v2, (DevicePointer, const void*, size_t, Stream))                        \
  X(copy_to_host, cuMemcpyDtoHAsync_v2, (void*, DevicePointer, size_t, Stream))                                \
  X(copy, cuMemcpyDtoDAsync_v2, (DevicePointer, DevicePointer, size_t, Stream))                                \
  X(set_bytes, cuMemsetD8Async, (DevicePointer, unsigned char, size_t, Stream))                                \
  X(register_host, cuMemHostRegister_v2, (void*, size_t, unsigned))                                            \
  X(unregister_host, cuMemHostUnregister, (void*))                                                             \
  X(host_address, cuMemHostGetDevicePointer_v2, (DevicePointer*, void*, unsigned))                             \
  X(create_stream, cuStreamCreate, (Stream*, unsigned))                                                        \
  X(destroy_stream, cuStreamDestroy_v2, (Stream))                                                              \
  X(wait_event, cuStreamWaitEvent, (Stream, Event, unsigned))                                                  \
  X(write_value, cuStreamWriteValue64_v2, (Stream, DevicePointer, uint64_t, unsigned))                         \
  X(create_event, cuEventCreate, (Event*, unsigned))                                                           \
  X(destroy_event, cuEventDestroy_v2, (Event))                                                                 \
  X(record_event, cuEventRecord, (Event, Stream))                                                              \
  X(query_event, cuEventQuery, (Event))                                                                        \
  X(elapsed_ms, cuEventElapsedTime, (float*, Event, Event))                                                    \
  X(load_module, cuModuleLoadData, (Module*, const void*))                                                     \
  X(find_function, cuModuleGetFunction, (Function*, Module, const char*))                                      \
  X(launch, cuLaunchKernel,                                                                                    \
    (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, void**))

struct DriverApi {
#define UNICRON_MEMBER(member, name, arguments) Result(*member) arguments = nullptr;
  UNICRON_DRIVER_FUNCTIONS(UNICRON_MEMBER)
#undef UNICRON_MEMBER
};

}  // namespace unicron::gpu
