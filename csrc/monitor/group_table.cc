#include "monitor/group_table.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"

namespace unicron::monitor {

void GroupTable::add(GroupId group, const std::vector<SocketIdentity>& sockets, const std::vector<Rank>& ranks,
                     bool is_cross) {
  if (sockets.size() > kSocketsPerGroupMax) {
    throw Error(ErrorCode::kLimitExceeded, "group " + std::to_string(group.value()) + " has " +
                                               std::to_string(sockets.size()) + " sockets, limit " +
                                               std::to_string(kSocketsPerGroupMax));
  }
  Group entry;
  entry.is_cross = is_cross;
  entry.sockets = sockets;
  entry.ranks = ranks;
  std::sort(entry.ranks.begin(), entry.ranks.end());
  const std::lock_guard lock(mutex_);
  if (groups_.size() >= kGroupsMax) {
    throw Error(ErrorCode::kLimitExceeded,
                std::to_string(kGroupsMax) + " groups are registered; forget_group() those of past epochs");
  }
  if (!groups_.emplace(group, std::move(entry)).second) {
    throw Error(ErrorCode::kInvalidArgument,
                "group " + std::to_string(group.value()) + " is registered already; forget_group() it first");
  }
}

void GroupTable::forget(GroupId group) {
  const std::lock_guard lock(mutex_);
  groups_.erase(group);
}

GroupState GroupTable::state(GroupId group) {
  const std::lock_guard lock(mutex_);
  const auto found = groups_.find(group);
  if (found == groups_.end()) return GroupState::kForgotten;
  const Group& entry = found->second;
  if (entry.is_shut) return GroupState::kShut;
  const bool is_whole = std::all_of(entry.sockets.begin(), entry.sockets.end(), is_still_connected);
  return is_whole ? GroupState::kWhole : GroupState::kBroken;
}

int64_t GroupTable::shut(const std::vector<Rank>& touched) {
  const std::lock_guard lock(mutex_);
  int64_t num_shut = 0;
  for (auto& [id, group] : groups_) {
    const auto is_member = [&ranks = group.ranks](Rank rank) {
      return std::binary_search(ranks.begin(), ranks.end(), rank);
    };
    if (!group.is_cross && std::none_of(touched.begin(), touched.end(), is_member)) continue;
    group.is_shut = true;
    num_shut += std::count_if(group.sockets.begin(), group.sockets.end(), shut_socket);
  }
  return num_shut;
}

}  // namespace unicron::monitor
