// Which sockets belong to which process group, so that a plan's arrival can end the collectives that would hang.
//
// The table is filled while groups are built. Asking torch at the time of a failure instead races with the training
// thread that is rebuilding them (MECHANICS 3.2).
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "base/ids.h"
#include "monitor/sockets.h"

namespace unicron::monitor {

constexpr size_t kGroupsMax = 4096;
constexpr size_t kSocketsPerGroupMax = 65'536;

enum class GroupState : int {
  kWhole = 0,
  kShut = 1,    // by shut()
  kBroken = 2,  // a socket ended by itself: its peer is gone, or the connection was reset
  kForgotten = 3,
};

class GroupTable {
 public:
  // `sockets`: as connected_sockets() listed them when the group was connected; one that ended since then makes the
  // group broken. `is_cross`: the group spans replicas. Throws on a number in use, and above the limits.
  void add(GroupId group, const std::vector<SocketIdentity>& sockets, const std::vector<Rank>& ranks, bool is_cross);
  void forget(GroupId group);  // an unknown number is no error
  // An unknown number is kForgotten.
  GroupState state(GroupId group);
  // Shuts the groups that span replicas and those that hold a touched rank; number of sockets shut.
  int64_t shut(const std::vector<Rank>& touched);

 private:
  struct Group {
    std::vector<SocketIdentity> sockets;
    std::vector<Rank> ranks;  // sorted
    bool is_cross = false;
    bool is_shut = false;
  };

  std::mutex mutex_;
  std::map<GroupId, Group> groups_;
};

}  // namespace unicron::monitor
