#include "monitor/siphash.h"

namespace unicron::monitor {

namespace {

uint64_t rotate(uint64_t value, int bits) { return (value << bits) | (value >> (64 - bits)); }

uint64_t load(const uint8_t* data, size_t num_bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < num_bytes; ++i) value |= uint64_t{data[i]} << (8 * i);
  return value;
}

struct State {
  uint64_t v0, v1, v2, v3;

  void round() {
    v0 += v1;
    v1 = rotate(v1, 13) ^ v0;
    v0 = rotate(v0, 32);
    v2 += v3;
    v3 = rotate(v3, 16) ^ v2;
    v0 += v3;
    v3 = rotate(v3, 21) ^ v0;
    v2 += v1;
    v1 = rotate(v1, 17) ^ v2;
    v2 = rotate(v2, 32);
  }

  void take(uint64_t word) {
    v3 ^= word;
    round();
    round();
    v0 ^= word;
  }
};

}  // namespace

uint64_t siphash(const BeatKey& key, const uint8_t* data, size_t num_bytes) {
  const uint64_t k0 = load(key.data(), 8);
  const uint64_t k1 = load(key.data() + 8, 8);
  State state{k0 ^ 0x736f6d6570736575, k1 ^ 0x646f72616e646f6d, k0 ^ 0x6c7967656e657261, k1 ^ 0x7465646279746573};
  size_t at = 0;
  for (; at + 8 <= num_bytes; at += 8) state.take(load(data + at, 8));
  state.take(load(data + at, num_bytes - at) | (uint64_t{num_bytes} << 56));
  state.v2 ^= 0xff;
  for (int i = 0; i < 4; ++i) state.round();
  return state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
}

}  // namespace unicron::monitor
