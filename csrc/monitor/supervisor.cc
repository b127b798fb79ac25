#include "monitor/supervisor.h"

#include <unistd.h>

#include <algorithm>
#include <string>

#include "base/error.h"
#include "monitor/futex.h"

namespace unicron::monitor {

Supervisor::Supervisor() : pid_(::getpid()), use_waitv_(has_futex_waitv()), event_(create_event()) {}

Supervisor::~Supervisor() { close(); }

bool Supervisor::is_foreign() const { return pid_ != ::getpid(); }

void Supervisor::watch(PulsePagePtr page) {
  const std::lock_guard lock(watchers_mutex_);
  if (is_closed_) throw Error(ErrorCode::kInvalidArgument, "this supervisor is closed; make a new one");
  const SlotId slot = page->slot();
  if (std::any_of(watchers_.begin(), watchers_.end(), [&](const auto& watcher) { return watcher->has(slot); })) {
    throw Error(ErrorCode::kInvalidArgument,
                "slot " + std::to_string(slot.value()) + " is watched already; unwatch() it first");
  }
  auto chosen =
      std::find_if(watchers_.begin(), watchers_.end(), [](const auto& watcher) { return !watcher->is_full(); });
  if (chosen == watchers_.end()) {
    auto watcher =
        std::make_unique<DeathWatcher>(use_waitv_, [this](SlotId dead, MonotonicTime seen) { on_death(dead, seen); });
    chosen = watchers_.insert(watchers_.end(), std::move(watcher));
  }
  (*chosen)->add(std::move(page));
}

void Supervisor::unwatch(SlotId slot) {
  const std::lock_guard lock(watchers_mutex_);
  for (const auto& watcher : watchers_) {
    if (watcher->remove(slot)) break;
  }
  const std::lock_guard deaths_lock(deaths_mutex_);
  deaths_.erase(std::remove_if(deaths_.begin(), deaths_.end(), [&](const Death& death) { return death.slot == slot; }),
                deaths_.end());
}

std::vector<Death> Supervisor::take_deaths() {
  const std::lock_guard lock(deaths_mutex_);
  if (event_.is_open()) clear_event(event_.get());
  return std::exchange(deaths_, {});
}

void Supervisor::close() {
  const std::lock_guard lock(watchers_mutex_);
  is_closed_ = true;
  watchers_.clear();
  const std::lock_guard deaths_lock(deaths_mutex_);
  event_.reset();
}

void Supervisor::on_death(SlotId slot, MonotonicTime seen) {
  const std::lock_guard lock(deaths_mutex_);
  deaths_.push_back(Death{slot, seen});
  signal_event(event_.get());
}

}  // namespace unicron::monitor
