#include "monitor/death_watcher.h"

#include <linux/futex.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <utility>

#include "base/error.h"
#include "monitor/futex.h"

namespace unicron::monitor {

namespace {

constexpr int64_t kBackstopMs = 250;      // longest wait before owners are checked by /proc
constexpr int64_t kRemoveMsMax = 10'000;  // a round takes microseconds; more is a broken thread
constexpr auto kRewakeInterval = std::chrono::milliseconds(1);

bool is_dead(uint32_t word) { return (word & FUTEX_OWNER_DIED) != 0; }

// Prepares the word for a wait and returns the value to wait on.
uint32_t prepare(uint32_t* word) {
  uint32_t value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
  while (!is_dead(value) && (value & FUTEX_TID_MASK) != 0 && (value & FUTEX_WAITERS) == 0) {
    const uint32_t wanted = value | FUTEX_WAITERS;
    if (__atomic_compare_exchange_n(word, &value, wanted, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return wanted;
  }
  return value;
}

// The owner's thread no longer exists although its word does not say so.
bool has_vanished(const PulsePage& page) {
  const int32_t pid = page.fields().owner_pid.load(std::memory_order_acquire);
  const int32_t tid = page.fields().owner_tid.load(std::memory_order_relaxed);
  if (pid == 0) return false;
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/task/%d", pid, tid);
  return ::access(path, F_OK) != 0 && ::access("/proc/self", F_OK) == 0;
}

}  // namespace

// One look at every watched word.
struct DeathWatcher::Round {
  std::vector<PulsePagePtr> pages;
  std::vector<FutexWord> words;  // those of `pages`, in order, then the wake word
  std::vector<PulsePagePtr> dead;
};

DeathWatcher::DeathWatcher(bool use_waitv, OnDeath on_death)
    : use_waitv_(use_waitv), on_death_(std::move(on_death)), thread_("unicron-death", [this] { run(); }) {}

DeathWatcher::~DeathWatcher() {
  {
    std::unique_lock lock(mutex_);
    is_stopping_ = true;
    const uint64_t round = num_rounds_;
    while (num_rounds_ == round) {
      wake_locked();
      round_begun_.wait_for(lock, kRewakeInterval);
    }
  }
  thread_.join();
}

bool DeathWatcher::has(SlotId slot) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(watched_.begin(), watched_.end(), [&](const auto& page) { return page->slot() == slot; });
}

bool DeathWatcher::is_full() const {
  const std::lock_guard lock(mutex_);
  return watched_.size() >= (use_waitv_ ? kFutexWordsMax - 1 : 1);
}

void DeathWatcher::add(PulsePagePtr page) {
  const std::lock_guard lock(mutex_);
  watched_.push_back(std::move(page));
  wake_locked();
}

bool DeathWatcher::remove(SlotId slot) {
  std::unique_lock lock(mutex_);
  const auto found =
      std::find_if(watched_.begin(), watched_.end(), [&](const auto& page) { return page->slot() == slot; });
  if (found == watched_.end()) return false;
  const PulsePagePtr page = *found;
  watched_.erase(found);
  // The kernel wakes one waiter at a death, so the old wait on this word must be over before anybody waits on it anew.
  const uint64_t round = num_rounds_;
  const Deadline deadline = Deadline::after_ms(monotonic_now(), kRemoveMsMax);
  while (num_rounds_ == round) {
    wake_locked();
    if (!use_waitv_) futex_wake_all(page->mutex_word());
    round_begun_.wait_for(lock, kRewakeInterval);
    if (deadline.is_past(monotonic_now())) {
      throw Error(ErrorCode::kTimeout, "the thread that watches slot " + std::to_string(slot.value()) +
                                           " did not let go of it in 10 s; this process starves, restart it");
    }
  }
  return true;
}

// Without futex_waitv the thread waits on a mutex's word alone, so that word is woken too. A wake between the thread's
// look and its wait is lost; whoever must know calls again.
void DeathWatcher::wake_locked() {
  __atomic_add_fetch(&wake_word_, 1, __ATOMIC_ACQ_REL);
  futex_wake_all(&wake_word_);
  if (use_waitv_) return;
  for (const PulsePagePtr& page : watched_) futex_wake_all(page->mutex_word());
}

bool DeathWatcher::begin_round(Round* round) {
  const std::lock_guard lock(mutex_);
  ++num_rounds_;
  round_begun_.notify_all();
  if (is_stopping_) return false;
  round->pages = watched_;
  round->words.clear();
  round->dead.clear();
  for (const PulsePagePtr& page : round->pages) {
    const FutexWord word{page->mutex_word(), prepare(page->mutex_word())};
    if (is_dead(word.expected)) round->dead.push_back(page);
    round->words.push_back(word);
  }
  round->words.push_back(FutexWord{&wake_word_, wake_word_});
  return true;
}

void DeathWatcher::report_dead(const Round& round, MonotonicTime seen) {
  // Reported under the lock, so that remove() either comes before it or finds the death reported.
  const std::lock_guard lock(mutex_);
  for (const PulsePagePtr& page : round.dead) {
    const auto found = std::find(watched_.begin(), watched_.end(), page);
    if (found == watched_.end()) continue;  // no longer wanted
    watched_.erase(found);
    on_death_(page->slot(), seen);
  }
}

void DeathWatcher::run() {
  Round round;
  while (begin_round(&round)) {
    if (!round.dead.empty()) {
      report_dead(round, monotonic_now());
      continue;
    }
    const Deadline deadline = Deadline::after_ms(monotonic_now(), kBackstopMs);
    const size_t num_words = use_waitv_ ? round.words.size() : 1;
    if (futex_wait(round.words.data(), num_words, deadline, use_waitv_) == FutexWake::kChanged) continue;
    for (const PulsePagePtr& page : round.pages) {
      if (has_vanished(*page)) round.dead.push_back(page);
    }
    report_dead(round, monotonic_now());
  }
}

}  // namespace unicron::monitor
