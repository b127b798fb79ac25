#include "monitor/beat.h"

#include <algorithm>

namespace unicron::monitor {

namespace {

constexpr uint32_t kMagic = 0x31425455;  // "UTB1"
constexpr size_t kTagBytes = 8;

void put(uint8_t* bytes, uint64_t value, size_t num_bytes) {
  for (size_t i = 0; i < num_bytes; ++i) bytes[i] = static_cast<uint8_t>(value >> (8 * i));
}

uint64_t get(const uint8_t* bytes, size_t num_bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < num_bytes; ++i) value |= uint64_t{bytes[i]} << (8 * i);
  return value;
}

}  // namespace

size_t write_beat(const Beat& beat, const BeatKey& key, uint8_t* bytes) {
  const size_t num_seen = std::min(beat.seen.size(), kBeatSeenMax);
  put(bytes, kMagic, 4);
  put(bytes + 4, static_cast<uint8_t>(beat.kind), 1);
  put(bytes + 5, num_seen, 1);
  put(bytes + 6, 0, 2);
  put(bytes + 8, beat.sender, 4);
  put(bytes + 12, 0, 4);
  put(bytes + 16, beat.incarnation, 8);
  put(bytes + 24, beat.sequence, 8);
  for (size_t i = 0; i < num_seen; ++i) {
    put(bytes + kBeatHeadBytes + 8 * i, beat.seen[i].node, 4);
    put(bytes + kBeatHeadBytes + 8 * i + 4, beat.seen[i].age_ms, 4);
  }
  const size_t body = kBeatHeadBytes + 8 * num_seen;
  put(bytes + body, siphash(key, bytes, body), kTagBytes);
  return body + kTagBytes;
}

bool read_beat(const uint8_t* bytes, size_t num_bytes, Beat* beat) {
  if (num_bytes < kBeatHeadBytes + kTagBytes || get(bytes, 4) != kMagic) return false;
  const uint64_t kind = get(bytes + 4, 1);
  const size_t num_seen = get(bytes + 5, 1);
  if ((kind != 1 && kind != 2) || num_seen > kBeatSeenMax) return false;
  if (num_bytes != kBeatHeadBytes + 8 * num_seen + kTagBytes) return false;
  beat->kind = static_cast<BeatKind>(kind);
  beat->sender = static_cast<uint32_t>(get(bytes + 8, 4));
  beat->incarnation = get(bytes + 16, 8);
  beat->sequence = get(bytes + 24, 8);
  beat->seen.resize(num_seen);
  for (size_t i = 0; i < num_seen; ++i) {
    beat->seen[i].node = static_cast<uint32_t>(get(bytes + kBeatHeadBytes + 8 * i, 4));
    beat->seen[i].age_ms = static_cast<uint32_t>(get(bytes + kBeatHeadBytes + 8 * i + 4, 4));
  }
  return true;
}

bool has_tag(const uint8_t* bytes, size_t num_bytes, const BeatKey& key) {
  const size_t body = num_bytes - kTagBytes;
  return get(bytes + body, kTagBytes) == siphash(key, bytes, body);
}

}  // namespace unicron::monitor
