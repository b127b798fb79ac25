// A beat: one datagram in which a node says that it lives, and whom else it hears.
//
// Little endian: magic u32, kind u8, number of entries u8, zero u16, sender u32, zero u32, incarnation u64, sequence
// u64, then (node u32, age_ms u32) an entry, then the tag u64 over all before it, under the sender's key. The sender's
// key is its own, and known to the coordinator and to its witnesses: they got it over CURVE. An answer (kAnswer) is the
// coordinator's to one node, under that node's key. Whoever reads the line learns which nodes live; nobody without a
// key can say that one does, and what was said once counts once (the sequence grows).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "monitor/siphash.h"

namespace unicron::monitor {

constexpr uint32_t kCoordinatorIndex = 0xffffffff;
constexpr size_t kBeatHeadBytes = 32;
constexpr size_t kBeatSeenMax = 16;
constexpr size_t kBeatBytesMax = kBeatHeadBytes + 8 * kBeatSeenMax + 8;

enum class BeatKind : uint8_t { kBeat = 1, kAnswer = 2 };

struct Seen {
  uint32_t node = 0;
  uint32_t age_ms = 0;  // since the sender heard it
};

struct Beat {
  BeatKind kind = BeatKind::kBeat;
  uint32_t sender = 0;
  uint64_t incarnation = 0;
  uint64_t sequence = 0;
  std::vector<Seen> seen;  // at most kBeatSeenMax
};

// Writes at most kBeatBytesMax bytes; how many.
size_t write_beat(const Beat& beat, const BeatKey& key, uint8_t* bytes);

// Reads shape and sender, not the tag. False: no beat.
bool read_beat(const uint8_t* bytes, size_t num_bytes, Beat* beat);
bool has_tag(const uint8_t* bytes, size_t num_bytes, const BeatKey& key);

}  // namespace unicron::monitor
