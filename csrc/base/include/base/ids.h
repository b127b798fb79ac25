// Strong ids: a rank cannot be passed where a slot is meant.
#pragma once

#include <cstdint>

namespace unicron {

template <class Tag>
class StrongId {
 public:
  constexpr StrongId() = default;
  constexpr explicit StrongId(int64_t value) : value_(value) {}
  constexpr int64_t value() const { return value_; }
  friend constexpr bool operator==(StrongId a, StrongId b) { return a.value_ == b.value_; }
  friend constexpr bool operator!=(StrongId a, StrongId b) { return a.value_ != b.value_; }
  friend constexpr bool operator<(StrongId a, StrongId b) { return a.value_ < b.value_; }

 private:
  int64_t value_ = 0;
};

using SlotId = StrongId<struct SlotTag>;    // one worker's place on a node
using GroupId = StrongId<struct GroupTag>;  // one process group of a worker
using Rank = StrongId<struct RankTag>;      // a role's number, stable for the task's life
using Epoch = StrongId<struct EpochTag>;    // version of a task's membership

}  // namespace unicron
