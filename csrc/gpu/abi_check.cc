// Compares what unicron declares of CUDA's and NCCL's binary interfaces with their own headers, where those are there.
#include <cuda.h>

#include <type_traits>

#include "gpu/driver_api.h"

#if __has_include(<nccl.h>)
#include <nccl.h>

#include "gpu/nccl_api.h"
#endif

namespace unicron::gpu {
namespace {

// Same number and sizes of arguments: pointers to their types are pointers to ours, enumerations are integers.
template <class A, class B>
constexpr bool kSameSize = sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>;

template <class Ours, class Theirs>
struct SameCall : std::false_type {};
template <class R, class... A, class S, class... B>
struct SameCall<R (*)(A...), S (*)(B...)> {
  static constexpr bool compare() {
    if constexpr (sizeof...(A) == sizeof...(B)) return (kSameSize<R, S> && ... && kSameSize<A, B>);
    return false;
  }
  static constexpr bool value = compare();
};

#define UNICRON_SAME(member, name, arguments) \
  static_assert(SameCall<decltype(DriverApi::member), decltype(&::name)>::value, #name);
UNICRON_DRIVER_FUNCTIONS(UNICRON_SAME)
#undef UNICRON_SAME

static_assert(sizeof(MemoryProperties) == sizeof(CUmemAllocationProp));
static_assert(offsetof(MemoryProperties, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(MemoryProperties, is_rdma_capable) ==
              offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable));
static_assert(sizeof(MemoryAccess) == sizeof(CUmemAccessDesc));
static_assert(offsetof(MemoryAccess, flags) == offsetof(CUmemAccessDesc, flags));
static_assert(MemoryAccess{}.flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(MemoryLocation{}.type == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(MemoryProperties{}.type == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(kHandleFileDescriptor == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY && kNotReady == CUDA_ERROR_NOT_READY);
static_assert(kAttributeMultiprocessors == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(kAttributeMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(kAttributeMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(kAttributeVirtualMemory == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
static_assert(kAttributeFileDescriptors == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
static_assert(kAttributeRdmaCapable == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
static_assert(kLimitStackSize == CU_LIMIT_STACK_SIZE);
static_assert(kStreamNonBlocking == CU_STREAM_NON_BLOCKING && kEventDefault == CU_EVENT_DEFAULT);
static_assert(kHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(kHostRegisterDeviceMap == CU_MEMHOSTREGISTER_DEVICEMAP);

#if __has_include(<nccl.h>)
static_assert(sizeof(NcclUniqueId) == sizeof(::ncclUniqueId));
static_assert(kNcclInProgress == ::ncclInProgress);
static_assert(offsetof(NcclConfig, blocking) == offsetof(::ncclConfig_t, blocking));
static_assert(offsetof(NcclConfig, split_share) == offsetof(::ncclConfig_t, splitShare));
#ifdef NCCL_API_MAGIC  // headers before 2.29 have the number in an initializer only
static_assert(NcclConfig{}.magic == NCCL_API_MAGIC);
#endif
static_assert(kNcclShrinkAbort == NCCL_SHRINK_ABORT);
static_assert(kNcclInt64 == ::ncclInt64 && kNcclFloat32 == ::ncclFloat32);
#endif

}  // namespace
}  // namespace unicron::gpu
