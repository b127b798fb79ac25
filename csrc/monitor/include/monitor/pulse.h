// The pulse page: facts that a worker states in nanoseconds and its agent reads without asking.
//
// One 4096-byte page of a memfd per slot. It starts with a robust, process-shared mutex that a native thread of the
// worker holds for life: the kernel marks its word when that thread dies, before it tears the address space down, so
// the word is the first sign of death whatever the size of the process. The other fields are atomics on
// cache lines of their own, by writer. Rejected: heartbeats over a socket, which cost a system call each and are late
// exactly when the machine is loaded.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "base/ids.h"
#include "base/mapping.h"
#include "base/time.h"

namespace unicron::monitor {

constexpr size_t kPulsePageBytes = 4096;
constexpr int64_t kSlotsMax = 4096;
constexpr int kWaitKinds = 4;       // groups of tp, pp, dp, and all of the task (unicron.types.WaitKind)
constexpr int kIntervalsKept = 64;  // a reader that comes later than these loses some, never gets wrong ones
constexpr int kIterationsKept = 16;
constexpr size_t kLastWordsBytes = 512;  // with the zero at their end
constexpr int64_t kStageCompute = 2;     // unicron.types.Stage.COMPUTE

// How long the loop was at one place: from one advance to the next.
struct IntervalField {
  std::atomic<int64_t> stage;
  std::atomic<int64_t> iteration;
  std::atomic<int64_t> ns;
};

// The loop's sums at a commit, from the worker's first on: the difference of two entries is exact, whatever lies
// between them.
struct IterationField {
  std::atomic<int64_t> iteration;
  std::atomic<int64_t> committed_ns;
  std::atomic<int64_t> compute_ns;  // in COMPUTE, without waiting in collectives
  std::atomic<int64_t> micro_batches;
  std::atomic<int64_t> waits_ns[kWaitKinds];
};

// What is in the page. Times are CLOCK_MONOTONIC in ns; 0 means never.
struct PulseFields {
  pthread_mutex_t mutex;  // first, because its first word is the futex word that the supervisor waits on
  uint64_t magic;

  // Written by the native holder thread.
  alignas(64) std::atomic<int32_t> owner_pid;  // 0 until that thread has the mutex; written after owner_tid
  std::atomic<int32_t> owner_tid;
  std::atomic<int64_t> beat_ns;

  // Written by the training loop.
  alignas(64) std::atomic<int64_t> progress;  // advances counted; written last
  std::atomic<int64_t> stage;
  std::atomic<int64_t> iteration;
  std::atomic<int64_t> micro_batch;
  std::atomic<int64_t> since_ns;
  std::atomic<uint32_t> waiting;
  std::atomic<int64_t> declared_ms;  // the script's own bound for what it does now; 0: none
  std::atomic<int64_t> waited_ns;    // in collectives, since the last advance

  alignas(64) std::atomic<int64_t> committed_iteration;  // -1 before the first; written last
  std::atomic<int64_t> committed_ns;
  std::atomic<double> loss;

  // Written by the agent, disarmed by the worker.
  alignas(64) std::atomic<uint32_t> fault_kind;  // 0: nothing armed; written last
  std::atomic<int64_t> fault_point;
  std::atomic<int64_t> fault_iteration;
  std::atomic<int64_t> fault_micro_batch;
  std::atomic<int64_t> fault_ns;

  // Written by the training loop: what statistics are made of. `num_*` are written last.
  alignas(64) IterationField sums;
  std::atomic<int64_t> num_intervals;
  std::atomic<int64_t> num_iterations;
  IntervalField intervals[kIntervalsKept];
  IterationField iterations[kIterationsKept];

  // Written once, by the thread in which std::terminate was called.
  alignas(64) std::atomic<uint32_t> has_last_words;  // written last
  char last_words[kLastWordsBytes];
};

static_assert(sizeof(PulseFields) <= kPulsePageBytes);
static_assert(std::atomic<double>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free);

struct Interval {
  int64_t stage;
  int64_t iteration;
  int64_t ns;
};

struct IterationSums {
  int64_t iteration;
  int64_t committed_ns;
  int64_t compute_ns;
  int64_t micro_batches;
  int64_t waits_ns[kWaitKinds];
};

Descriptor create_pulse_pages(int64_t num_slots);

// One process's view of one slot's page. Copies of the shared_ptr keep the mapping alive for native threads.
class PulsePage {
 public:
  PulsePage(int fd, SlotId slot);

  PulseFields& fields() const { return *static_cast<PulseFields*>(mapping_.data()); }
  // The word that the kernel marks: owner's thread id, FUTEX_WAITERS, FUTEX_OWNER_DIED.
  uint32_t* mutex_word() const { return reinterpret_cast<uint32_t*>(&fields().mutex); }
  SlotId slot() const { return slot_; }

  // Agent: prepares the page for a new worker. Throws kSlotHeld while a living thread holds the mutex.
  void reset();

  void advance(int64_t stage, int64_t iteration, int64_t micro_batch, int64_t declared_ms = 0);
  // A wait in a collective of this kind, that began at `begin_ns` and is over.
  void waited(int64_t kind, int64_t begin_ns);
  void committed(int64_t iteration, double loss);
  uint32_t take_fault(int64_t point, int64_t iteration, int64_t micro_batch);
  void arm_fault(uint32_t kind, int64_t point, int64_t iteration, int64_t micro_batch);
  void mark_fault();

  // The owner is about to end, and says so before the kernel does. Not of a child that it forked. For signal handlers.
  void announce_death() const;

  // What a process says before std::terminate ends it; cut, and only the first time.
  void say_last_words(const char* text);
  std::string last_words() const;

  // Agent: what came after the first `after` ones and is still there; `after` becomes the number written so far.
  std::vector<Interval> intervals(int64_t* after) const;
  std::vector<IterationSums> iterations(int64_t* after) const;

 private:
  void keep_interval(PulseFields& page, int64_t now_ns);

  SharedMapping mapping_;
  SlotId slot_;
};

using PulsePagePtr = std::shared_ptr<PulsePage>;

}  // namespace unicron::monitor
