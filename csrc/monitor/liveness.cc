#include "monitor/liveness.h"

#include <algorithm>
#include <cmath>

namespace unicron::monitor {

namespace {

constexpr int64_t kNsPerMs = 1'000'000;
constexpr double kGain = 1.0 / 16;       // of a new gap
constexpr double kDeviations = 6;        // beyond the usual gap
constexpr double kPeriodsMin = 1.9;      // one lost datagram, and the next beat is there in time
constexpr double kPeriodsMax = 10;       // whatever was seen
constexpr double kVouchedPeriods = 0.2;  // on top, for the word of a witness
constexpr double kUnwatchedLooks = 2.5;  // between two looks

}  // namespace

LivenessTable::LivenessTable(int64_t look_ms) : look_ns_(look_ms * kNsPerMs) {}

void LivenessTable::watch(uint32_t node, uint64_t incarnation, const BeatKey& key, int64_t period_ms,
                          MonotonicTime now) {
  Peer peer;
  peer.incarnation = incarnation;
  peer.key = key;
  peer.period_ns = period_ms * kNsPerMs;
  peer.heard_ns = peer.vouched_ns = now.ns;
  peer.gap_ns = static_cast<double>(peer.period_ns);
  peers_[node] = peer;
}

void LivenessTable::forget(uint32_t node) { peers_.erase(node); }

const BeatKey* LivenessTable::take(const uint8_t* bytes, size_t num_bytes, MonotonicTime now, Beat* beat) {
  if (!read_beat(bytes, num_bytes, beat)) {
    ++refusals_.shape;
    return nullptr;
  }
  const auto found = peers_.find(beat->sender);
  if (found == peers_.end()) {
    ++refusals_.stranger;
    return nullptr;
  }
  Peer& peer = found->second;
  if (!has_tag(bytes, num_bytes, peer.key)) {
    ++refusals_.tag;
    return nullptr;
  }
  if (beat->incarnation != peer.incarnation || beat->sequence <= peer.sequence) {
    ++refusals_.stale;
    return nullptr;
  }
  peer.sequence = beat->sequence;
  note(peer, now);
  for (const Seen& seen : beat->seen) {
    const auto other = peers_.find(seen.node);
    if (other == peers_.end()) continue;
    other->second.vouched_ns = std::max(other->second.vouched_ns, now.ns - int64_t{seen.age_ms} * kNsPerMs);
  }
  return &peer.key;
}

void LivenessTable::note(Peer& peer, MonotonicTime now) {
  if (peer.hearing != Hearing::kUnheard) {
    // No gap counts for more than what was silence already: one long outage must not make the next one be told later,
    // and gaps that are always long still widen it.
    const double gap = static_cast<double>(std::min(now.ns - peer.heard_ns, threshold_ns(peer)));
    peer.deviation_ns += kGain * (std::abs(gap - peer.gap_ns) - peer.deviation_ns);
    peer.gap_ns += kGain * (gap - peer.gap_ns);
  }
  peer.heard_ns = std::max(peer.heard_ns, now.ns);
  peer.vouched_ns = std::max(peer.vouched_ns, now.ns);
  // Not yet a change of what was told: look() compares.
  if (peer.hearing == Hearing::kUnheard) peer.hearing = Hearing::kSilent;
}

int64_t LivenessTable::threshold_ns(const Peer& peer) {
  const auto period = static_cast<double>(peer.period_ns);
  const double usual = peer.gap_ns + kDeviations * peer.deviation_ns;
  return static_cast<int64_t>(std::clamp(usual, kPeriodsMin * period, kPeriodsMax * period));
}

int64_t LivenessTable::threshold_ms(uint32_t node) const {
  const auto found = peers_.find(node);
  return found == peers_.end() ? -1 : threshold_ns(found->second) / kNsPerMs;
}

void LivenessTable::forgive(int64_t unwatched_ns) {
  for (auto& [_, peer] : peers_) {
    peer.heard_ns = std::min(peer.heard_ns + unwatched_ns, looked_ns_);
    peer.vouched_ns = std::min(peer.vouched_ns + unwatched_ns, looked_ns_);
  }
}

std::vector<HearingChange> LivenessTable::look(MonotonicTime now) {
  const int64_t gap = now.ns - looked_ns_;
  const bool has_slept = looked_ns_ != 0 && static_cast<double>(gap) > kUnwatchedLooks * static_cast<double>(look_ns_);
  looked_ns_ = now.ns;
  if (has_slept) forgive(gap - look_ns_);
  std::vector<HearingChange> changes;
  for (auto& [node, peer] : peers_) {
    if (peer.hearing == Hearing::kUnheard) continue;
    const int64_t threshold = threshold_ns(peer);
    const auto later = static_cast<int64_t>(kVouchedPeriods * static_cast<double>(peer.period_ns));
    Hearing hearing = Hearing::kHeard;
    if (now.ns - peer.heard_ns > threshold) {
      hearing = now.ns - peer.vouched_ns > threshold + later ? Hearing::kSilent : Hearing::kVouched;
      // Nobody heard a later beat than we did: that is no word of a witness, only the wait for one.
      if (hearing == Hearing::kVouched && peer.vouched_ns <= peer.heard_ns + later) hearing = Hearing::kHeard;
    }
    if (hearing == peer.hearing) continue;
    peer.hearing = hearing;
    changes.push_back({node, hearing, (now.ns - peer.heard_ns) / kNsPerMs});
  }
  return changes;
}

std::vector<Seen> LivenessTable::seen(MonotonicTime now) const {
  std::vector<Seen> result;
  for (const auto& [node, peer] : peers_) {
    if (node == kCoordinatorIndex || peer.hearing == Hearing::kUnheard || result.size() >= kBeatSeenMax) continue;
    const int64_t age = std::max<int64_t>(0, (now.ns - peer.heard_ns) / kNsPerMs);
    result.push_back({node, static_cast<uint32_t>(std::min<int64_t>(age, UINT32_MAX))});
  }
  return result;
}

}  // namespace unicron::monitor
