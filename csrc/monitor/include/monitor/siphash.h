// SipHash-2-4 (Aumasson and Bernstein, 2012): a keyed 64-bit tag of a short message.
//
// Written here because it is forty lines that a published vector checks, and no crypto library can be asked for on
// every machine that compiles this; only beats are tagged with it, everything else goes by CURVE.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace unicron::monitor {

using BeatKey = std::array<uint8_t, 16>;

uint64_t siphash(const BeatKey& key, const uint8_t* data, size_t num_bytes);

}  // namespace unicron::monitor
