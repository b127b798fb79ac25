#include "state/checksum.h"

#include <cstring>

namespace unicron::state {

namespace {

// Names as in the specification.
constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4F;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5;
constexpr size_t kStripeBytes = 32;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "lanes are read as the machine stores them");

template <class Word>
uint64_t read(const unsigned char* from) {
  Word word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

constexpr uint64_t rotate_left(uint64_t value, int bits) { return (value << bits) | (value >> (64 - bits)); }

constexpr uint64_t round(uint64_t accumulator, uint64_t lane) {
  return rotate_left(accumulator + lane * kPrime2, 31) * kPrime1;
}

constexpr uint64_t merge(uint64_t accumulator, uint64_t lane) {
  return (accumulator ^ round(0, lane)) * kPrime1 + kPrime4;
}

// Consumes whole stripes; `*from` ends at the rest.
uint64_t consume_stripes(const unsigned char** from, size_t num_bytes) {
  uint64_t a = kPrime1 + kPrime2;
  uint64_t b = kPrime2;
  uint64_t c = 0;
  uint64_t d = uint64_t{0} - kPrime1;
  const unsigned char* at = *from;
  for (size_t stripe = 0; stripe < num_bytes / kStripeBytes; ++stripe, at += kStripeBytes) {
    a = round(a, read<uint64_t>(at));
    b = round(b, read<uint64_t>(at + 8));
    c = round(c, read<uint64_t>(at + 16));
    d = round(d, read<uint64_t>(at + 24));
  }
  *from = at;
  const uint64_t sum = rotate_left(a, 1) + rotate_left(b, 7) + rotate_left(c, 12) + rotate_left(d, 18);
  return merge(merge(merge(merge(sum, a), b), c), d);
}

uint64_t consume_rest(uint64_t hash, const unsigned char* at, size_t num_bytes) {
  for (; num_bytes >= 8; at += 8, num_bytes -= 8) {
    hash = rotate_left(hash ^ round(0, read<uint64_t>(at)), 27) * kPrime1 + kPrime4;
  }
  if (num_bytes >= 4) {
    hash = rotate_left(hash ^ (read<uint32_t>(at) * kPrime1), 23) * kPrime2 + kPrime3;
    at += 4;
    num_bytes -= 4;
  }
  for (; num_bytes > 0; ++at, --num_bytes) hash = rotate_left(hash ^ (*at * kPrime5), 11) * kPrime1;
  return hash;
}

constexpr uint64_t avalanche(uint64_t hash) {
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace

uint64_t checksum(const void* data, size_t num_bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  uint64_t hash = num_bytes >= kStripeBytes ? consume_stripes(&at, num_bytes) : kPrime5;
  hash += num_bytes;
  return avalanche(consume_rest(hash, at, num_bytes % kStripeBytes));
}

}  // namespace unicron::state
