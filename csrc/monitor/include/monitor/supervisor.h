// In the agent: reports the deaths of all its workers within a fraction of a millisecond.
//
// DeathWatcher threads do the waiting; this class spreads the slots over as many of them as it takes and collects what
// they report behind one eventfd. A clean exit is a death too: the kernel cannot tell why a thread ended.
#pragma once

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "base/ids.h"
#include "base/time.h"
#include "monitor/death_watcher.h"
#include "monitor/pulse.h"

namespace unicron::monitor {

struct Death {
  SlotId slot;
  MonotonicTime seen;
};

class Supervisor {
 public:
  Supervisor();
  ~Supervisor();

  // In a forked child, where the watchers' threads do not exist: then it must not even be destroyed.
  bool is_foreign() const;
  int fileno() const { return event_.get(); }
  // Throws when the slot is watched already or the supervisor is closed.
  void watch(PulsePagePtr page);
  // Also drops a death that is not taken yet. A slot that is not watched is no error: it may just have died.
  void unwatch(SlotId slot);
  std::vector<Death> take_deaths();
  void close();

 private:
  void on_death(SlotId slot, MonotonicTime seen);

  const pid_t pid_;
  const bool use_waitv_;
  Descriptor event_;
  std::mutex deaths_mutex_;
  std::vector<Death> deaths_;  // at most one per watched slot
  std::mutex watchers_mutex_;
  bool is_closed_ = false;
  std::vector<std::unique_ptr<DeathWatcher>> watchers_;
};

}  // namespace unicron::monitor
