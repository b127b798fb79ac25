// One thread that waits for the death of up to 127 workers (one, where the kernel lacks futex_waitv).
//
// It waits on the first word of each worker's robust mutex. Three states of a word matter:
//   no owner      the worker has not taken the mutex yet: wait for a change (its holder thread wakes the word)
//   owner         set FUTEX_WAITERS, else the kernel does not wake anybody at the owner's death (MECHANICS 1.3); wait
//   OWNER_DIED    the kernel marked it: report the death once and stop watching
// Nobody ever unlocks these mutexes, so there is no fourth. Every wait ends after a short bound, when the thread checks
// by /proc that each owner still exists: a word that was overwritten must not hide a death for ever.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "base/ids.h"
#include "base/thread.h"
#include "base/time.h"
#include "monitor/pulse.h"

namespace unicron::monitor {

class DeathWatcher {
 public:
  // `on_death` runs on the watcher's thread and must not call back into the watcher.
  using OnDeath = std::function<void(SlotId, MonotonicTime)>;

  DeathWatcher(bool use_waitv, OnDeath on_death);
  DeathWatcher(const DeathWatcher&) = delete;
  DeathWatcher& operator=(const DeathWatcher&) = delete;
  ~DeathWatcher();

  bool has(SlotId slot) const;
  bool is_full() const;
  void add(PulsePagePtr page);
  // After it returns, no thread waits on the slot's word and its death will not be reported. False: not watched here.
  bool remove(SlotId slot);

 private:
  struct Round;

  void run();
  bool begin_round(Round* round);
  void report_dead(const Round& round, MonotonicTime seen);
  void wake_locked();

  const bool use_waitv_;
  const OnDeath on_death_;
  mutable std::mutex mutex_;
  std::condition_variable round_begun_;
  std::vector<PulsePagePtr> watched_;
  uint64_t num_rounds_ = 0;
  bool is_stopping_ = false;
  uint32_t wake_word_ = 0;  // futex word: changed to make the thread look again
  Thread thread_;           // last: it uses all of the above
};

}  // namespace unicron::monitor
