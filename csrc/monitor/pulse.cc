#include "monitor/pulse.h"

#include <linux/futex.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "monitor/futex.h"
#include "monitor/process.h"

namespace unicron::monitor {

namespace {

constexpr uint64_t kMagic = 0x32656c756e6f7275;  // "uronule2": a page of another version is not one of ours
constexpr auto kRelaxed = std::memory_order_relaxed;

// glibc keeps the futex word of a mutex in its first int; the supervisor relies on it.
static_assert(offsetof(pthread_mutex_t, __data.__lock) == 0);

void initialize_mutex(pthread_mutex_t* mutex) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int result = pthread_mutex_init(mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  if (result != 0) throw system_error("cannot initialise the robust mutex of a pulse page", result);
}

void initialize(void* page) {
  std::memset(page, 0, kPulsePageBytes);
  auto* fields = static_cast<PulseFields*>(page);
  fields->committed_iteration.store(-1, kRelaxed);
  initialize_mutex(&fields->mutex);
  fields->magic = kMagic;
  std::atomic_thread_fence(std::memory_order_release);
}

// One writer, so a plain addition does.
void add(std::atomic<int64_t>& sum, int64_t value) { sum.store(sum.load(kRelaxed) + value, kRelaxed); }

// Entries `*after` .. `number` of a ring, oldest first; what was written over while it was read is left out.
template <class Entry, class Read>
std::vector<Entry> read_ring(const std::atomic<int64_t>& number, int64_t num_kept, int64_t* after, Read read) {
  const int64_t end = number.load(std::memory_order_acquire);
  const int64_t first = std::max(std::min(*after, end), end - num_kept);  // `after` of a former owner of the page
  std::vector<Entry> entries;
  for (int64_t index = first; index < end; ++index) entries.push_back(read(index % num_kept));
  std::atomic_thread_fence(std::memory_order_acquire);
  // What is written now lies beyond those that are counted: one entry, two where stores are reordered.
  const int64_t torn = number.load(kRelaxed) + 2 - num_kept - first;
  if (torn > 0) {
    entries.erase(entries.begin(), entries.begin() + std::min<int64_t>(torn, static_cast<int64_t>(entries.size())));
  }
  *after = end;
  return entries;
}

size_t offset_of(int fd, SlotId slot) {
  const size_t nbytes = file_bytes(fd);
  if (slot.value() < 0 || slot.value() >= kSlotsMax ||
      (static_cast<size_t>(slot.value()) + 1) * kPulsePageBytes > nbytes) {
    throw Error(ErrorCode::kInvalidArgument, "slot " + std::to_string(slot.value()) + " is outside this file of " +
                                                 std::to_string(nbytes / kPulsePageBytes) +
                                                 " pulse pages; use a descriptor of create_pulse_pages()");
  }
  return static_cast<size_t>(slot.value()) * kPulsePageBytes;
}

}  // namespace

Descriptor create_pulse_pages(int64_t num_slots) {
  if (num_slots < 1 || num_slots > kSlotsMax) {
    throw Error(ErrorCode::kInvalidArgument,
                "num_slots is " + std::to_string(num_slots) + "; give 1 to " + std::to_string(kSlotsMax));
  }
  const size_t nbytes = static_cast<size_t>(num_slots) * kPulsePageBytes;
  Descriptor file = create_memory_file("unicron-pulse", nbytes);
  SharedMapping mapping(file.get(), 0, nbytes);
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    initialize(static_cast<char*>(mapping.data()) + static_cast<size_t>(slot) * kPulsePageBytes);
  }
  return file;
}

PulsePage::PulsePage(int fd, SlotId slot) : mapping_(fd, offset_of(fd, slot), kPulsePageBytes), slot_(slot) {
  if (fields().magic != kMagic) {
    throw Error(ErrorCode::kInvalidArgument, "slot " + std::to_string(slot.value()) + " of descriptor " +
                                                 std::to_string(fd) +
                                                 " is no pulse page of this version; was it made by another unicron?");
  }
}

void PulsePage::reset() {
  // Re-initialising a held mutex would make its owner's death invisible: the kernel finds a foreign word and does
  // nothing.
  const uint32_t word = __atomic_load_n(mutex_word(), __ATOMIC_ACQUIRE);
  const int32_t pid = fields().owner_pid.load(kRelaxed);
  const bool is_held = (word & FUTEX_TID_MASK) != 0 && (word & FUTEX_OWNER_DIED) == 0;
  if (is_held && pid != 0 && !owner_gone(pid)) {
    throw Error(ErrorCode::kSlotHeld, "slot " + std::to_string(slot_.value()) + " is held by living process " +
                                          std::to_string(pid) + "; end it and wait for its death first");
  }
  initialize(mapping_.data());
}

void PulsePage::keep_interval(PulseFields& page, int64_t now_ns) {
  const int64_t since_ns = page.since_ns.load(kRelaxed);
  if (since_ns == 0) return;  // the first advance of this worker
  const int64_t stage = page.stage.load(kRelaxed);
  const int64_t ns = now_ns - since_ns;
  if (stage == kStageCompute) {
    add(page.sums.compute_ns, std::max<int64_t>(ns - page.waited_ns.load(kRelaxed), 0));
    if (page.micro_batch.load(kRelaxed) >= 0) add(page.sums.micro_batches, 1);
  }
  page.waited_ns.store(0, kRelaxed);
  const int64_t number = page.num_intervals.load(kRelaxed);
  IntervalField& kept = page.intervals[number % kIntervalsKept];
  kept.stage.store(stage, kRelaxed);
  kept.iteration.store(page.iteration.load(kRelaxed), kRelaxed);
  kept.ns.store(ns, kRelaxed);
  page.num_intervals.store(number + 1, std::memory_order_release);
}

void PulsePage::advance(int64_t stage, int64_t iteration, int64_t micro_batch, int64_t declared_ms) {
  PulseFields& page = fields();
  const int64_t now_ns = monotonic_now().ns;
  keep_interval(page, now_ns);
  page.stage.store(stage, kRelaxed);
  page.iteration.store(iteration, kRelaxed);
  page.micro_batch.store(micro_batch, kRelaxed);
  page.declared_ms.store(declared_ms, kRelaxed);
  page.since_ns.store(now_ns, kRelaxed);
  // One writer, so a plain increment does; release, so that who sees the new count sees the numbers.
  page.progress.store(page.progress.load(kRelaxed) + 1, std::memory_order_release);
}

void PulsePage::waited(int64_t kind, int64_t begin_ns) {
  if (kind < 0 || kind >= kWaitKinds) {
    throw Error(ErrorCode::kInvalidArgument, "wait kind " + std::to_string(kind) + " is outside 0 to " +
                                                 std::to_string(kWaitKinds - 1) + "; see unicron.types.WaitKind");
  }
  PulseFields& page = fields();
  const int64_t ns = std::max<int64_t>(monotonic_now().ns - begin_ns, 0);
  add(page.sums.waits_ns[kind], ns);
  add(page.waited_ns, ns);
}

void PulsePage::committed(int64_t iteration, double loss) {
  PulseFields& page = fields();
  const int64_t now_ns = monotonic_now().ns;
  const int64_t number = page.num_iterations.load(kRelaxed);
  IterationField& kept = page.iterations[number % kIterationsKept];
  kept.iteration.store(iteration, kRelaxed);
  kept.committed_ns.store(now_ns, kRelaxed);
  kept.compute_ns.store(page.sums.compute_ns.load(kRelaxed), kRelaxed);
  kept.micro_batches.store(page.sums.micro_batches.load(kRelaxed), kRelaxed);
  for (int kind = 0; kind < kWaitKinds; ++kind) {
    kept.waits_ns[kind].store(page.sums.waits_ns[kind].load(kRelaxed), kRelaxed);
  }
  page.num_iterations.store(number + 1, std::memory_order_release);
  page.loss.store(loss, kRelaxed);
  page.committed_ns.store(now_ns, kRelaxed);
  page.committed_iteration.store(iteration, std::memory_order_release);
}

uint32_t PulsePage::take_fault(int64_t point, int64_t iteration, int64_t micro_batch) {
  PulseFields& page = fields();
  uint32_t kind = page.fault_kind.load(std::memory_order_acquire);
  if (kind == 0) return 0;  // the usual case: one load
  const auto is_here = [](int64_t armed, int64_t any, int64_t here) { return armed == any || armed == here; };
  if (!is_here(page.fault_point.load(kRelaxed), 0, point)) return 0;
  if (!is_here(page.fault_iteration.load(kRelaxed), -1, iteration)) return 0;
  if (!is_here(page.fault_micro_batch.load(kRelaxed), -1, micro_batch)) return 0;
  if (!page.fault_kind.compare_exchange_strong(kind, 0)) return 0;  // re-armed or taken meanwhile
  mark_fault();
  return kind;
}

void PulsePage::arm_fault(uint32_t kind, int64_t point, int64_t iteration, int64_t micro_batch) {
  PulseFields& page = fields();
  page.fault_kind.store(0);  // disarmed while the place changes
  page.fault_point.store(point, kRelaxed);
  page.fault_iteration.store(iteration, kRelaxed);
  page.fault_micro_batch.store(micro_batch, kRelaxed);
  page.fault_kind.store(kind, std::memory_order_release);
}

void PulsePage::announce_death() const {
  if (fields().owner_pid.load(std::memory_order_acquire) != ::getpid()) return;
  __atomic_or_fetch(mutex_word(), FUTEX_OWNER_DIED, __ATOMIC_ACQ_REL);
  futex_wake_all(mutex_word());
}

void PulsePage::say_last_words(const char* text) {
  PulseFields& page = fields();
  if (page.has_last_words.load(kRelaxed) != 0) return;
  std::strncpy(page.last_words, text, kLastWordsBytes - 1);  // the page was zeroed
  page.has_last_words.store(1, std::memory_order_release);
}

std::string PulsePage::last_words() const {
  const PulseFields& page = fields();
  if (page.has_last_words.load(std::memory_order_acquire) == 0) return "";
  return std::string(page.last_words, ::strnlen(page.last_words, kLastWordsBytes));
}

std::vector<Interval> PulsePage::intervals(int64_t* after) const {
  const PulseFields& page = fields();
  return read_ring<Interval>(page.num_intervals, kIntervalsKept, after, [&](int64_t index) {
    const IntervalField& kept = page.intervals[index];
    return Interval{kept.stage.load(kRelaxed), kept.iteration.load(kRelaxed), kept.ns.load(kRelaxed)};
  });
}

std::vector<IterationSums> PulsePage::iterations(int64_t* after) const {
  const PulseFields& page = fields();
  return read_ring<IterationSums>(page.num_iterations, kIterationsKept, after, [&](int64_t index) {
    const IterationField& kept = page.iterations[index];
    IterationSums sums{kept.iteration.load(kRelaxed),
                       kept.committed_ns.load(kRelaxed),
                       kept.compute_ns.load(kRelaxed),
                       kept.micro_batches.load(kRelaxed),
                       {}};
    for (int kind = 0; kind < kWaitKinds; ++kind) sums.waits_ns[kind] = kept.waits_ns[kind].load(kRelaxed);
    return sums;
  });
}

void PulsePage::mark_fault() { fields().fault_ns.store(monotonic_now().ns, kRelaxed); }

}  // namespace unicron::monitor
