// The part of NCCL's binary interface that unicron uses, declared here for the same reason as driver_api.h.
//
// Functions of the first table must be there (NCCL 2.27); those of the second may be missing, and doctor says so.
#pragma once

#include <climits>
#include <cstddef>

#include "gpu/driver_api.h"

namespace unicron::gpu {

using NcclResult = int;
using NcclComm = struct ncclComm*;

constexpr NcclResult kNcclSuccess = 0;
constexpr NcclResult kNcclInProgress = 7;
constexpr int kNcclShrinkAbort = 1;
constexpr int kNcclInt64 = 4;
constexpr int kNcclFloat32 = 7;
constexpr int kNcclSum = 0;

struct NcclUniqueId {
  char internal[128];
};

// ncclConfig_t as of 2.18: NCCL takes older and shorter ones, and fills in the rest.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = 0;
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

// X(member, exported name, arguments)
#define UNICRON_NCCL_NEEDED(X)                                                      \
  X(version, ncclGetVersion, (int*))                                                \
  X(unique_id, ncclGetUniqueId, (NcclUniqueId*))                                    \
  X(init, ncclCommInitRankConfig, (NcclComm*, int, NcclUniqueId, int, NcclConfig*)) \
  X(abort, ncclCommAbort, (NcclComm))                                               \
  X(async_error, ncclCommGetAsyncError, (NcclComm, NcclResult*))                    \
  X(count, ncclCommCount, (NcclComm, int*))                                         \
  X(rank, ncclCommUserRank, (NcclComm, int*))                                       \
  X(device, ncclCommCuDevice, (NcclComm, int*))                                     \
  X(group_end, ncclGroupEnd, ())                                                    \
  X(split, ncclCommSplit, (NcclComm, int, int, NcclComm*, NcclConfig*))             \
  X(all_reduce, ncclAllReduce, (const void*, void*, size_t, int, int, NcclComm, Stream))

#define UNICRON_NCCL_OPTIONAL(X)                                                           \
  X(shrink, ncclCommShrink, (NcclComm, int*, int, NcclComm*, NcclConfig*, int))            \
  X(revoke, ncclCommRevoke, (NcclComm, int))                                               \
  X(grow, ncclCommGrow, (NcclComm, int, const NcclUniqueId*, int, NcclComm*, NcclConfig*)) \
  X(grow_id, ncclCommGetUniqueId, (NcclComm, NcclUniqueId*))                               \
  X(suspend, ncclCommSuspend, (NcclComm, int))                                             \
  X(init_scalable, ncclCommInitRankScalable, (NcclComm*, int, int, int, NcclUniqueId*, NcclConfig*))

struct NcclApi {
#define UNICRON_MEMBER(member, name, arguments) NcclResult(*member) arguments = nullptr;
  UNICRON_NCCL_NEEDED(UNICRON_MEMBER)
  UNICRON_NCCL_OPTIONAL(UNICRON_MEMBER)
#undef UNICRON_MEMBER
  const char* (*error_string)(NcclResult) = nullptr;
};

}  // namespace unicron::gpu
