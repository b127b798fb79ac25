// Who is heard, out of thousands: only changes leave this table. Pure: time comes in.
//
// Of every watched node it keeps when it was heard here, when anybody said to have heard it, and how regular its beats
// are. A node is
//   heard     its beat came within its threshold: the usual gap and six deviations, never below 1.9 periods
//   vouched   it did not, but a witness heard it meanwhile: the way between here and there is at fault, not the node
//   silent    nobody heard it. That is suspicion: what it means is decided elsewhere, by other evidence
// Only watched time counts: when the reader itself stood still (a frozen or starved process), nobody grew older by it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "base/time.h"
#include "monitor/beat.h"

namespace unicron::monitor {

enum class Hearing : uint8_t { kUnheard, kHeard, kVouched, kSilent };

struct HearingChange {
  uint32_t node = 0;
  Hearing hearing = Hearing::kUnheard;
  int64_t silent_ms = 0;  // since it was heard here
};

struct BeatRefusals {
  uint64_t shape = 0;     // no beat
  uint64_t stranger = 0;  // of nobody watched here
  uint64_t tag = 0;
  uint64_t stale = 0;  // another incarnation, or said before
};

class LivenessTable {
 public:
  // Looked at every `look_ms`; a gap of more than 2.5 of them is time that nobody watched.
  explicit LivenessTable(int64_t look_ms);

  // Watched from now on, as unheard; again: with a new incarnation and key.
  void watch(uint32_t node, uint64_t incarnation, const BeatKey& key, int64_t period_ms, MonotonicTime now);
  void forget(uint32_t node);
  size_t num_watched() const { return peers_.size(); }

  // The key to answer with, and in *beat what was said; null: refused.
  const BeatKey* take(const uint8_t* bytes, size_t num_bytes, MonotonicTime now, Beat* beat);
  std::vector<HearingChange> look(MonotonicTime now);
  // Whom we hear ourselves, for our own beats: at most kBeatSeenMax.
  std::vector<Seen> seen(MonotonicTime now) const;
  const BeatRefusals& refusals() const { return refusals_; }
  int64_t threshold_ms(uint32_t node) const;  // -1: not watched

 private:
  struct Peer {
    uint64_t incarnation = 0;
    uint64_t sequence = 0;
    BeatKey key{};
    int64_t period_ns = 0;
    int64_t heard_ns = 0;
    int64_t vouched_ns = 0;
    double gap_ns = 0;
    double deviation_ns = 0;
    Hearing hearing = Hearing::kUnheard;
  };

  static int64_t threshold_ns(const Peer& peer);
  void note(Peer& peer, MonotonicTime now);
  void forgive(int64_t unwatched_ns);

  const int64_t look_ns_;
  int64_t looked_ns_ = 0;
  std::unordered_map<uint32_t, Peer> peers_;
  BeatRefusals refusals_;
};

}  // namespace unicron::monitor
