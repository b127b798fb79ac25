#include "monitor/frames.h"

#include "base/error.h"

namespace unicron::monitor {

namespace {

// Byte by byte, so that it does not depend on the machine's order or alignment.
uint64_t read_little_endian(const char* bytes, size_t num_bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < num_bytes; ++i) value |= uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  return value;
}

Frame decode(const char* body, size_t length) {
  Frame frame;
  frame.kind = static_cast<uint8_t>(read_little_endian(body, 1));
  frame.epoch = Epoch(static_cast<int64_t>(read_little_endian(body + 1, 8)));
  const size_t num_touched = read_little_endian(body + 9, 2);
  const size_t message_at = kFrameHeadBytes + 4 * num_touched;
  if (message_at > length) {
    throw Error(ErrorCode::kInvalidArgument, "frame of " + std::to_string(length) + " bytes claims " +
                                                 std::to_string(num_touched) + " touched ranks");
  }
  if (length - message_at > kMessageBytesMax) {
    throw Error(ErrorCode::kLimitExceeded, "message of " + std::to_string(length - message_at) + " bytes, limit " +
                                               std::to_string(kMessageBytesMax));
  }
  if (frame.epoch.value() < 0) throw Error(ErrorCode::kInvalidArgument, "frame's epoch is above 2^63");
  frame.touched.reserve(num_touched);
  for (size_t i = 0; i < num_touched; ++i) {
    frame.touched.emplace_back(static_cast<int64_t>(read_little_endian(body + kFrameHeadBytes + 4 * i, 4)));
  }
  frame.message.assign(body + message_at, length - message_at);
  return frame;
}

}  // namespace

std::optional<Frame> FrameParser::pop() {
  const size_t available = buffer_.size() - begin_;
  if (available < kFramePrefixBytes) return std::nullopt;
  const size_t length = read_little_endian(buffer_.data() + begin_, kFramePrefixBytes);
  if (length < kFrameHeadBytes || length > kFrameBytesMax) {
    throw Error(ErrorCode::kLimitExceeded, "frame length " + std::to_string(length) + " is outside " +
                                               std::to_string(kFrameHeadBytes) + ".." + std::to_string(kFrameBytesMax));
  }
  if (available - kFramePrefixBytes < length) return std::nullopt;
  Frame frame = decode(buffer_.data() + begin_ + kFramePrefixBytes, length);
  begin_ += kFramePrefixBytes + length;
  if (begin_ == buffer_.size()) {
    buffer_.clear();
    begin_ = 0;
  }
  return frame;
}

std::string encode_message(std::string_view message) {
  if (message.size() > kMessageBytesMax) {
    throw Error(ErrorCode::kLimitExceeded, "message of " + std::to_string(message.size()) + " bytes, limit " +
                                               std::to_string(kMessageBytesMax) + "; shorten its texts");
  }
  std::string frame;
  frame.reserve(kFramePrefixBytes + message.size());
  for (size_t i = 0; i < kFramePrefixBytes; ++i) frame.push_back(static_cast<char>((message.size() >> (8 * i)) & 0xff));
  frame.append(message);
  return frame;
}

}  // namespace unicron::monitor
