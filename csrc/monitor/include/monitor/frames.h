// Frames from the agent to a worker, cut out of a byte stream.
//
//   u32 length | u8 kind | u64 epoch | u16 num_touched | u32 touched[num_touched] | message
//
// All little-endian; `length` counts everything after itself. Pure: bytes in, frames out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"

namespace unicron::monitor {

constexpr size_t kMessageBytesMax = 4 << 20;   // MESSAGE_BYTES_MAX of python/unicron/messages.py
constexpr size_t kFramePrefixBytes = 4;        // the length itself
constexpr size_t kFrameHeadBytes = 1 + 8 + 2;  // kind, epoch, num_touched
constexpr size_t kTouchedMax = 65'535;
constexpr size_t kFrameBytesMax = kFrameHeadBytes + 4 * kTouchedMax + kMessageBytesMax;

constexpr uint8_t kFrameKindPlan = 1;  // an epoch plan: groups are to be shut; every other kind is only passed on

struct Frame {
  uint8_t kind = 0;
  Epoch epoch;
  std::vector<Rank> touched;
  std::string message;
};

class FrameParser {
 public:
  void push(const char* bytes, size_t num_bytes) { buffer_.append(bytes, num_bytes); }
  // The next complete frame. Throws Error when the stream cannot be one of frames; it is useless from then on.
  std::optional<Frame> pop();

 private:
  std::string buffer_;
  size_t begin_ = 0;  // consumed bytes at the front of the buffer
};

// A frame from a worker to its agent: u32 length | message.
std::string encode_message(std::string_view message);

}  // namespace unicron::monitor
