// Beats on the wire, and who is heard, with time that comes in.
#include <vector>

#include "check.h"
#include "monitor/beat.h"
#include "monitor/liveness.h"

namespace unicron::monitor {
namespace {

constexpr int64_t kMs = 1'000'000;

MonotonicTime at(int64_t ms) { return MonotonicTime{(ms + 1'000'000) * kMs}; }

BeatKey key_of(uint8_t first) {
  BeatKey key{};
  for (size_t i = 0; i < key.size(); ++i) key[i] = static_cast<uint8_t>(first + i);
  return key;
}

// A table with nodes 1..num_nodes whose beats the test says.
struct Listener {
  explicit Listener(uint32_t num_nodes) {
    for (uint32_t node = 1; node <= num_nodes; ++node) table.watch(node, 7, key_of(0), 500, at(0));
    sequences.resize(num_nodes + 1);
  }

  bool say(uint32_t node, int64_t ms, std::vector<Seen> seen = {}) {
    Beat beat{BeatKind::kBeat, node, 7, ++sequences[node], std::move(seen)};
    uint8_t bytes[kBeatBytesMax];
    const size_t size = write_beat(beat, key_of(0), bytes);
    Beat read;
    return table.take(bytes, size, at(ms), &read) != nullptr;
  }

  // What changed until `ms`, looked at every 50.
  std::vector<HearingChange> until(int64_t ms) {
    std::vector<HearingChange> changes;
    for (; looked_ms <= ms; looked_ms += 50) {
      for (const HearingChange& change : table.look(at(looked_ms))) changes.push_back(change);
    }
    return changes;
  }

  LivenessTable table{50};
  std::vector<uint64_t> sequences;
  int64_t looked_ms = 0;
};

void test_siphash_is_the_published_one() {
  std::vector<uint8_t> data;
  for (uint8_t i = 0; i < 15; ++i) data.push_back(i);
  CHECK(siphash(key_of(0), data.data(), data.size()) == 0xa129ca6149be45e5);
  CHECK(siphash(key_of(0), data.data(), 0) == 0x726fdb47dd0e0e31);
}

void test_a_beat_comes_back_as_it_went() {
  const Beat beat{BeatKind::kBeat, 70'000, uint64_t{1} << 40, 99, {{3, 12}, {0xfffffffe, 4'000'000'000}}};
  uint8_t bytes[kBeatBytesMax];
  const size_t size = write_beat(beat, key_of(5), bytes);
  Beat read;
  CHECK(read_beat(bytes, size, &read) && has_tag(bytes, size, key_of(5)) && !has_tag(bytes, size, key_of(6)));
  CHECK(read.sender == beat.sender && read.incarnation == beat.incarnation && read.sequence == 99);
  CHECK(read.seen.size() == 2 && read.seen[1].node == 0xfffffffe && read.seen[1].age_ms == 4'000'000'000);
  for (size_t cut = 0; cut < size; ++cut) CHECK(!read_beat(bytes, cut, &read));
  for (size_t i = 0; i < size; ++i) {
    bytes[i] ^= 1;
    CHECK(!read_beat(bytes, size, &read) || !has_tag(bytes, size, key_of(5)));
    bytes[i] ^= 1;
  }
}

void test_what_does_not_count() {
  Listener listener(1);
  uint8_t bytes[kBeatBytesMax];
  Beat read;
  const auto take = [&](uint32_t node, uint64_t incarnation, uint64_t sequence, uint8_t key) {
    const size_t size = write_beat({BeatKind::kBeat, node, incarnation, sequence, {}}, key_of(key), bytes);
    return listener.table.take(bytes, size, at(0), &read) != nullptr;
  };
  CHECK(!take(2, 7, 1, 0) && !take(1, 7, 1, 9) && !take(1, 6, 1, 0));
  CHECK(take(1, 7, 5, 0) && !take(1, 7, 5, 0) && !take(1, 7, 4, 0) && take(1, 7, 6, 0));
  CHECK(listener.table.refusals().stranger == 1 && listener.table.refusals().tag == 1);
  CHECK(listener.table.refusals().stale == 3);
}

void test_silence_is_told_once_and_taken_back_once() {
  Listener listener(1);
  std::vector<HearingChange> changes;
  for (int64_t ms = 0; ms <= 5'000; ms += 500) {
    CHECK(listener.say(1, ms));
    for (const HearingChange& change : listener.until(ms)) changes.push_back(change);
  }
  CHECK(changes.size() == 1 && changes[0].hearing == Hearing::kHeard);
  changes = listener.until(20'000);
  CHECK(changes.size() == 1 && changes[0].hearing == Hearing::kSilent);
  CHECK(changes[0].silent_ms >= 950 && changes[0].silent_ms <= 1'150);
  CHECK(listener.say(1, 20'010));
  changes = listener.until(20'100);
  CHECK(changes.size() == 1 && changes[0].hearing == Hearing::kHeard);
}

void test_one_lost_beat_is_no_silence() {
  Listener listener(1);
  for (int64_t ms = 0; ms <= 20'000; ms += 500) {
    if (ms % 5'000 != 2'500) listener.say(1, ms);
    for (const HearingChange& change : listener.until(ms)) CHECK(change.hearing == Hearing::kHeard);
  }
}

void test_a_witness_vouches() {
  Listener listener(2);
  for (int64_t ms = 0; ms <= 3'000; ms += 500) {
    listener.say(1, ms);
    listener.say(2, ms + 100, {{1, 100}});
    listener.until(ms);
  }
  std::vector<HearingChange> changes;
  for (int64_t ms = 3'500; ms <= 9'000; ms += 500) {
    listener.say(2, ms + 100, {{1, 100}});  // node 1 beats on, and node 2 alone hears it
    for (const HearingChange& change : listener.until(ms + 100)) changes.push_back(change);
  }
  CHECK(changes.size() == 1 && changes[0].node == 1 && changes[0].hearing == Hearing::kVouched);
  for (int64_t ms = 9'500; ms <= 12'000; ms += 500) {
    listener.say(2, ms + 100, {{1, static_cast<uint32_t>(ms + 100 - 9'000)}});  // now nobody does
    for (const HearingChange& change : listener.until(ms + 100)) changes.push_back(change);
  }
  CHECK(changes.size() == 2 && changes[1].node == 1 && changes[1].hearing == Hearing::kSilent);
}

void test_a_listener_that_stood_still_calls_nobody_silent() {
  Listener listener(100);
  for (int64_t ms = 0; ms <= 3'000; ms += 500) {
    for (uint32_t node = 1; node <= 100; ++node) listener.say(node, ms);
    listener.until(ms);
  }
  listener.looked_ms = 33'000;  // frozen for thirty seconds, and nothing was kept for it
  CHECK(listener.until(33'400).empty());
  for (uint32_t node = 1; node <= 99; ++node) listener.say(node, 33'450);
  const std::vector<HearingChange> changes = listener.until(34'300);  // whoever is gone is found from then on
  CHECK(changes.size() == 1 && changes[0].node == 100 && changes[0].hearing == Hearing::kSilent);
}

void test_what_was_read_late_counts_from_when_it_was_read() {
  Listener listener(1);
  for (int64_t ms = 0; ms <= 3'000; ms += 500) {
    listener.say(1, ms);
    listener.until(ms);
  }
  listener.say(1, 33'000);  // waited in the socket while we stood still; it died meanwhile
  listener.looked_ms = 33'000;
  const std::vector<HearingChange> changes = listener.until(36'500);
  CHECK(changes.size() == 1 && changes[0].hearing == Hearing::kSilent);
}

void test_threshold_follows_the_jitter() {
  Listener listener(2);
  uint64_t seed = 12345;
  for (int64_t ms = 0; ms <= 60'000; ms += 500) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    listener.say(1, ms);
    listener.say(2, ms + static_cast<int64_t>(seed >> 33) % 450);
    listener.until(ms + 450);
  }
  CHECK(listener.table.threshold_ms(1) == 950);
  CHECK(listener.table.threshold_ms(2) > 1'100 && listener.table.threshold_ms(2) < 2'500);
}

void test_one_outage_does_not_delay_the_next() {
  Listener listener(1);
  int64_t ms = 0;
  for (int outage = 0; outage < 5; ++outage) {
    for (const int64_t end = ms + 5'000; ms <= end; ms += 500) {
      listener.say(1, ms);
      listener.until(ms);
    }
    ms += 3'000;
    const std::vector<HearingChange> changes = listener.until(ms);
    CHECK(changes.size() == 1 && changes[0].hearing == Hearing::kSilent && changes[0].silent_ms <= 1'150);
  }
}

void test_gaps_that_are_always_long_become_usual() {
  Listener listener(1);
  int64_t silences = 0, late_silences = 0;
  uint64_t seed = 12345;
  for (int64_t ms = 0; ms <= 240'000;) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    ms += ms < 10'000 ? 500 : 1'300 + static_cast<int64_t>(seed >> 33) % 400;
    const std::vector<HearingChange> changes = listener.until(ms - 1);
    listener.say(1, ms);
    for (const HearingChange& change : changes) {
      silences += change.hearing == Hearing::kSilent;
      late_silences += change.hearing == Hearing::kSilent && ms > 40'000;
    }
  }
  CHECK(silences > 0 && silences <= 12 && late_silences == 0);
}

}  // namespace
}  // namespace unicron::monitor

int main() {
  using namespace unicron::monitor;
  test_siphash_is_the_published_one();
  test_a_beat_comes_back_as_it_went();
  test_what_does_not_count();
  test_silence_is_told_once_and_taken_back_once();
  test_one_lost_beat_is_no_silence();
  test_a_witness_vouches();
  test_a_listener_that_stood_still_calls_nobody_silent();
  test_what_was_read_late_counts_from_when_it_was_read();
  test_threshold_follows_the_jitter();
  test_one_outage_does_not_delay_the_next();
  test_gaps_that_are_always_long_become_usual();
  return unicron::testing::num_failures;
}
