#include "monitor/nccl_table.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/error.h"
#include "gpu/driver.h"
#include "gpu/nccl.h"

namespace unicron::monitor {

namespace {

constexpr int64_t kPollNs = 50'000'000;  // an asynchronous error is a confirmation, not the first word of a failure

using Clock = std::chrono::steady_clock;

Clock::time_point at(Deadline deadline) { return Clock::time_point(std::chrono::nanoseconds(deadline.at().ns)); }

bool is_over_bound(MonotonicTime begun) { return monotonic_now().ns - begun.ns > kEndingMsMax * 1'000'000; }

}  // namespace

NcclTable::NcclTable() : shared_(std::make_shared<Shared>()) {
  gpu::nccl();  // throws where there is none, here and not in a thread
  poller_ = Thread("unicron-nccl", [shared = shared_] { poll_for_ever(shared); });
}

NcclTable::~NcclTable() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->is_stopping = true;
  }
  shared_->changed.notify_all();
  // Not joined: it may be inside NCCL, and holds what it uses.
  poller_.detach();
}

void NcclTable::add(GroupId group, Communicator communicator) {
  if (communicator.handle == nullptr) {
    throw Error(ErrorCode::kInvalidArgument, "group " + std::to_string(group.value()) +
                                                 " has no communicator yet; connect it first (a first collective)");
  }
  std::sort(communicator.ranks.begin(), communicator.ranks.end());
  const std::lock_guard lock(shared_->mutex);
  if (shared_->entries.size() >= kCommunicatorsMax) {
    throw Error(ErrorCode::kLimitExceeded, std::to_string(kCommunicatorsMax) + " communicators are registered");
  }
  const auto entry = std::make_shared<Entry>();
  entry->communicator = std::move(communicator);
  if (!shared_->entries.emplace(group, entry).second) {
    throw Error(ErrorCode::kInvalidArgument,
                "group " + std::to_string(group.value()) + " is registered already; forget it first");
  }
}

bool NcclTable::forget(GroupId group, Deadline deadline) {
  std::unique_lock lock(shared_->mutex);
  const auto found = shared_->entries.find(group);
  if (found == shared_->entries.end()) return true;
  const std::shared_ptr<Entry> entry = found->second;
  // Nor while its ending is ordered and the thread for it has not begun: it would use what the caller frees.
  const auto is_free = [&] { return !entry->is_in_use && entry->state != NcclState::kEnding; };
  if (!shared_->changed.wait_until(lock, at(deadline), is_free)) return false;
  shared_->entries.erase(group);
  return true;
}

NcclState NcclTable::state(GroupId group) const {
  const std::lock_guard lock(shared_->mutex);
  const auto found = shared_->entries.find(group);
  if (found == shared_->entries.end()) return NcclState::kForgotten;
  const Entry& entry = *found->second;
  if (entry.state == NcclState::kEnding && is_over_bound(entry.end_begun)) return NcclState::kStuck;
  return entry.state;
}

std::string NcclTable::error(GroupId group) const {
  const std::lock_guard lock(shared_->mutex);
  const auto found = shared_->entries.find(group);
  return found == shared_->entries.end() ? std::string() : found->second->error;
}

int64_t NcclTable::end(const std::vector<Rank>& touched) {
  return end_selected([&touched](const Communicator& communicator) {
    const auto& ranks = communicator.ranks;
    return communicator.is_cross || std::any_of(touched.begin(), touched.end(), [&ranks](Rank rank) {
             return std::binary_search(ranks.begin(), ranks.end(), rank);
           });
  });
}

int64_t NcclTable::end_all() {
  return end_selected([](const Communicator&) { return true; });
}

template <class Selects>
int64_t NcclTable::end_selected(const Selects& selects) {
  const MonotonicTime now = monotonic_now();
  const bool can_revoke = gpu::nccl().revoke != nullptr;
  const std::lock_guard lock(shared_->mutex);
  int64_t num_begun = 0;
  for (auto& [group, entry] : shared_->entries) {
    if (entry->state >= NcclState::kEnding || !selects(entry->communicator)) continue;
    if (!can_revoke && !entry->communicator.is_owned) {
      entry->state = NcclState::kError;
      entry->error = "this NCCL has no ncclCommRevoke; torch itself must abort the group";
      continue;
    }
    entry->state = NcclState::kEnding;
    entry->end_begun = now;
    Thread ender("unicron-end", [shared = shared_, entry = entry] { end_one(*shared, *entry); });
    ender.detach();
    ++num_begun;
  }
  return num_begun;
}

// On a thread of its own. NCCL itself raises the flag that stops the kernels first, then waits for the rest.
void NcclTable::end_one(Shared& shared, Entry& entry) {
  {
    std::unique_lock lock(shared.mutex);
    // The poller's call returns at once; while it does, the communicator is not pulled away under it.
    shared.changed.wait(lock, [&] { return !entry.is_in_use; });
    entry.is_in_use = true;
  }
  std::string error;
  try {
    const gpu::ScopedDevice current(entry.communicator.device);  // else NCCL makes a context on GPU 0
    const gpu::NcclApi& api = gpu::nccl();
    const gpu::NcclComm handle = entry.communicator.handle;
    gpu::check_nccl(entry.communicator.is_owned ? api.abort(handle) : api.revoke(handle, 0), "ending a communicator");
    // A non-blocking one is revoked when its state says so; an aborted one does not exist any more.
    gpu::NcclResult state = gpu::kNcclInProgress;
    while (!entry.communicator.is_owned && state == gpu::kNcclInProgress && !is_over_bound(entry.end_begun)) {
      gpu::check_nccl(api.async_error(handle, &state), "asking for a communicator's state");
      const timespec step = to_timespec(MonotonicTime{200'000});
      if (state == gpu::kNcclInProgress) ::nanosleep(&step, nullptr);
    }
  } catch (const std::exception& failure) {
    error = failure.what();
  }
  {
    const std::lock_guard lock(shared.mutex);
    entry.is_in_use = false;
    entry.error = error;
    entry.end_done = monotonic_now();
    entry.state = error.empty() ? NcclState::kEnded : NcclState::kError;
  }
  shared.changed.notify_all();
}

bool NcclTable::wait_ended(Deadline deadline) {
  std::unique_lock lock(shared_->mutex);
  return shared_->changed.wait_until(lock, at(deadline), [this] {
    return std::none_of(shared_->entries.begin(), shared_->entries.end(),
                        [](const auto& item) { return item.second->state == NcclState::kEnding; });
  });
}

std::vector<std::pair<GroupId, double>> NcclTable::ending_ms() const {
  const std::lock_guard lock(shared_->mutex);
  std::vector<std::pair<GroupId, double>> result;
  for (const auto& [group, entry] : shared_->entries) {
    if (entry->end_done.ns == 0) continue;
    result.emplace_back(group, static_cast<double>(entry->end_done.ns - entry->end_begun.ns) / 1e6);
  }
  return result;
}

void NcclTable::poll_for_ever(const std::shared_ptr<Shared>& shared) {
  std::unique_lock lock(shared->mutex);
  while (!shared->is_stopping) {
    std::vector<std::shared_ptr<Entry>> whole;
    for (const auto& [group, entry] : shared->entries) {
      if (entry->state == NcclState::kWhole && !entry->is_in_use) whole.push_back(entry);
    }
    lock.unlock();
    for (const auto& entry : whole) poll_one(*shared, entry);
    lock.lock();
    shared->changed.wait_for(lock, std::chrono::nanoseconds(kPollNs), [&] { return shared->is_stopping; });
  }
}

void NcclTable::poll_one(Shared& shared, const std::shared_ptr<Entry>& entry) {
  {
    const std::lock_guard lock(shared.mutex);
    // Forgotten or being ended since the list was made: the handle may be gone.
    const auto is_it = [&](const auto& item) { return item.second == entry; };
    if (entry->state != NcclState::kWhole || entry->is_in_use ||
        std::none_of(shared.entries.begin(), shared.entries.end(), is_it)) {
      return;
    }
    entry->is_in_use = true;
  }
  gpu::NcclResult state = gpu::kNcclSuccess;
  const gpu::NcclResult asked = gpu::nccl().async_error(entry->communicator.handle, &state);
  if (asked != gpu::kNcclSuccess) state = asked;
  {
    const std::lock_guard lock(shared.mutex);
    entry->is_in_use = false;
    if (state != gpu::kNcclSuccess && state != gpu::kNcclInProgress && entry->state == NcclState::kWhole) {
      entry->state = NcclState::kError;
      entry->error = gpu::nccl_error_text(state);
    }
  }
  shared.changed.notify_all();
}

}  // namespace unicron::monitor
