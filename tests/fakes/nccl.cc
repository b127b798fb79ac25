// A libnccl.so.2 without GPUs: an injector of faults for bookkeeping and error paths, nothing more.
//
// A communicator is a record; endings take FAKE_NCCL_ENDING_MS (default 0) each, whoever calls, so that a test sees
// whether they run at once, and longer while the file FAKE_NCCL_HELD_BY is there. FAKE_NCCL_ERROR=n makes every
// communicator report NCCL error n. FAKE_NCCL_OLD leaves out what older versions lack: built as a second library with
// -DFAKE_NCCL_OLD.
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "gpu/nccl_api.h"

using namespace unicron::gpu;

struct unicron::gpu::ncclComm {
  int num_ranks;
  int rank;
  std::atomic<int> state{kNcclSuccess};
};

namespace {

int milliseconds() {
  const char* text = std::getenv("FAKE_NCCL_ENDING_MS");
  return text != nullptr ? std::atoi(text) : 0;
}

void take_time() {
  ::usleep(static_cast<useconds_t>(milliseconds()) * 1000);
  const char* held_by = std::getenv("FAKE_NCCL_HELD_BY");
  while (held_by != nullptr && ::access(held_by, F_OK) == 0) ::usleep(1000);
}

// As NCCL does it: the handle comes later, from another thread, while the old communicator is in progress.
NcclResult make_later(NcclComm parent, NcclComm* made, int num_ranks, int rank) {
  parent->state = kNcclInProgress;
  std::thread([=] {
    ::usleep(20'000);
    __atomic_store_n(made, new unicron::gpu::ncclComm{num_ranks, rank, {}}, __ATOMIC_RELEASE);
    parent->state = kNcclSuccess;
  }).detach();
  return kNcclInProgress;
}

}  // namespace

#define FAKE(name) extern "C" __attribute__((visibility("default"))) NcclResult name

FAKE(ncclGetVersion)(int* version) {
#ifdef FAKE_NCCL_OLD
  return *version = 22703, kNcclSuccess;
#else
  return *version = 22907, kNcclSuccess;
#endif
}
FAKE(ncclGetUniqueId)(NcclUniqueId* id) { return std::memset(id, 7, sizeof(*id)), kNcclSuccess; }
FAKE(ncclCommInitRankConfig)(NcclComm* made, int num_ranks, NcclUniqueId, int rank, NcclConfig* config) {
  if (config->magic != 0xcafebeef || config->blocking != 0) return 4;
  *made = new unicron::gpu::ncclComm{num_ranks, rank, {}};
  return kNcclInProgress;
}
FAKE(ncclCommAbort)(NcclComm communicator) {
  take_time();
  delete communicator;
  return kNcclSuccess;
}
FAKE(ncclCommGetAsyncError)(NcclComm communicator, NcclResult* state) {
  const char* error = std::getenv("FAKE_NCCL_ERROR");
  *state = error != nullptr ? std::atoi(error) : communicator->state.load();
  return kNcclSuccess;
}
FAKE(ncclCommCount)(NcclComm communicator, int* count) { return *count = communicator->num_ranks, kNcclSuccess; }
FAKE(ncclCommUserRank)(NcclComm communicator, int* rank) { return *rank = communicator->rank, kNcclSuccess; }
FAKE(ncclCommCuDevice)(NcclComm, int* device) { return *device = 0, kNcclSuccess; }
FAKE(ncclCommSplit)(NcclComm communicator, int, int, NcclComm* made, NcclConfig*) {
  return make_later(communicator, made, communicator->num_ranks, communicator->rank);
}
thread_local int depth = 0;
FAKE(ncclGroupStart)() { return ++depth, kNcclSuccess; }
FAKE(ncclGroupEnd)() { return depth > 0 ? (--depth, kNcclSuccess) : 5; }
FAKE(ncclAllReduce)(const void*, void*, size_t, int, int, NcclComm, Stream) { return kNcclSuccess; }
FAKE(ncclCommShrink)(NcclComm communicator, int*, int excluded, NcclComm* made, NcclConfig*, int) {
  return make_later(communicator, made, communicator->num_ranks - excluded, communicator->rank);
}
#ifndef FAKE_NCCL_OLD
FAKE(ncclCommRevoke)(NcclComm communicator, int) {
  communicator->state = kNcclInProgress;
  std::thread([communicator] {
    take_time();
    communicator->state = kNcclSuccess;
  }).detach();
  return kNcclInProgress;
}
FAKE(ncclCommGrow)(NcclComm communicator, int num_ranks, const NcclUniqueId*, int rank, NcclComm* made, NcclConfig*) {
  if (communicator != nullptr) return make_later(communicator, made, num_ranks, communicator->rank);
  *made = new unicron::gpu::ncclComm{num_ranks, rank, {}};
  return kNcclInProgress;
}
FAKE(ncclCommGetUniqueId)(NcclComm, NcclUniqueId* id) { return std::memset(id, 8, sizeof(*id)), kNcclSuccess; }
#endif

extern "C" __attribute__((visibility("default"))) const char* ncclGetErrorString(NcclResult result) {
  return result == 6 ? "remote process exited or there was a network error" : "an error of the injector";
}
