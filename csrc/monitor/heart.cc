#include "monitor/heart.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <time.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace unicron::monitor {

namespace {

constexpr int kBatch = 256;      // datagrams a system call
constexpr int kBatchesMax = 64;  // before time is looked at again
constexpr int kReceiveBytes = 8 << 20;
constexpr uint64_t kAnswerEvery = 4;
constexpr int64_t kNsPerMs = 1'000'000;

int64_t thread_cpu_ns() {
  timespec used{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return int64_t{used.tv_sec} * 1'000'000'000 + used.tv_nsec;
}

}  // namespace

struct Heart::Inbox {
  Inbox() : buffers(kBatch), names(kBatch), vectors(kBatch), messages(kBatch) {
    for (int i = 0; i < kBatch; ++i) {
      vectors[i] = {buffers[i].data(), buffers[i].size()};
      messages[i].msg_hdr.msg_iov = &vectors[i];
      messages[i].msg_hdr.msg_iovlen = 1;
      messages[i].msg_hdr.msg_name = &names[i];
    }
  }

  int receive(int fd) {
    for (mmsghdr& message : messages) message.msg_hdr.msg_namelen = sizeof(sockaddr_storage);
    return ::recvmmsg(fd, messages.data(), kBatch, MSG_DONTWAIT, nullptr);
  }

  // One byte more than the longest beat, so that a longer datagram is seen to be one.
  std::vector<std::array<uint8_t, kBeatBytesMax + 1>> buffers;
  std::vector<sockaddr_storage> names;
  std::vector<iovec> vectors;
  std::vector<mmsghdr> messages;
};

Heart::Address Heart::resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0 || found == nullptr) {
    throw Error(ErrorCode::kInvalidArgument, "'" + host + "' is no numeric address");
  }
  Address address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.bytes = found->ai_addrlen;
  ::freeaddrinfo(found);
  return address;
}

Heart::Heart(const std::string& host, int port, int64_t look_ms)
    : look_ms_(std::max<int64_t>(look_ms, 1)), event_(create_event()), stop_(create_event()), table_(look_ms_) {
  Address address = resolve(host, port);
  socket_.reset(::socket(address.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_.is_open()) throw system_error("cannot create a datagram socket", errno);
  // A frozen process finds what was said meanwhile, as far as it fits; refused sizes leave the default.
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVBUFFORCE, &kReceiveBytes, sizeof(kReceiveBytes));
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVBUF, &kReceiveBytes, sizeof(kReceiveBytes));
  if (::bind(socket_.get(), reinterpret_cast<sockaddr*>(&address.storage), address.bytes) != 0) {
    throw system_error("cannot listen for beats on " + host + ":" + std::to_string(port) + " (UDP)", errno);
  }
  if (::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&address.storage), &address.bytes) != 0) {
    throw system_error("cannot read the port of a datagram socket", errno);
  }
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address.storage);
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address.storage);
  port_ = ntohs(address.storage.ss_family == AF_INET6 ? v6->sin6_port : v4->sin_port);
  thread_ = Thread("unicron-heart", [this] { run(); });
}

Heart::~Heart() { close(); }

void Heart::close() {
  if (!thread_.is_running()) return;
  signal_event(stop_.get());
  thread_.join();
}

void Heart::watch(uint32_t node, uint64_t incarnation, const BeatKey& key, int64_t period_ms) {
  const std::lock_guard lock(mutex_);
  table_.watch(node, incarnation, key, std::max<int64_t>(period_ms, 1), monotonic_now());
}

void Heart::forget(uint32_t node) {
  const std::lock_guard lock(mutex_);
  table_.forget(node);
  changes_.erase(node);
}

std::vector<HearingChange> Heart::take_changes() {
  const std::lock_guard lock(mutex_);
  clear_event(event_.get());
  std::vector<HearingChange> result;
  result.reserve(changes_.size());
  for (const auto& [_, change] : changes_) result.push_back(change);
  changes_.clear();
  return result;
}

void Heart::beat_as(uint32_t node, uint64_t incarnation, const BeatKey& key, int64_t period_ms, int64_t loop_ms_max,
                    const std::vector<std::pair<std::string, int>>& targets) {
  std::vector<Address> addresses;
  for (const auto& [host, port] : targets) addresses.push_back(resolve(host, port));
  turned();
  const std::lock_guard lock(mutex_);
  beat_.sender = node;
  beat_.incarnation = incarnation;
  key_ = key;
  targets_ = std::move(addresses);
  period_ns_ = std::max<int64_t>(period_ms, 1) * kNsPerMs;
  loop_ns_max_ = loop_ms_max * kNsPerMs;
  if (next_beat_ns_ == 0) next_beat_ns_ = monotonic_now().ns;
}

HeartFacts Heart::facts() const {
  const std::lock_guard lock(mutex_);
  HeartFacts facts = facts_;
  facts.refusals = table_.refusals();
  return facts;
}

int Heart::wait_ms(MonotonicTime now) {
  const std::lock_guard lock(mutex_);
  int64_t next = table_.num_watched() > 0 ? next_look_ns_ : now.ns + 500 * kNsPerMs;
  if (!targets_.empty()) next = std::min(next, next_beat_ns_);
  return static_cast<int>(std::clamp<int64_t>((next - now.ns + kNsPerMs - 1) / kNsPerMs, 0, 500));
}

void Heart::run() {
  Inbox inbox;
  pollfd polled[2] = {{socket_.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
  while (true) {
    ::poll(polled, 2, wait_ms(monotonic_now()));
    if ((polled[1].revents & POLLIN) != 0) return;
    // What was said is read before anybody is called silent.
    listen(inbox);
    const MonotonicTime now = monotonic_now();
    maybe_beat(now);
    maybe_look(now);
  }
}

void Heart::listen(Inbox& inbox) {
  for (int batch = 0; batch < kBatchesMax; ++batch) {
    const int count = inbox.receive(socket_.get());
    if (count <= 0) return;  // nothing more, or a target's refusal of our own beat: its silence is seen apart
    take(inbox, count);
    if (count < kBatch) return;
  }
}

void Heart::take(Inbox& inbox, int count) {
  const MonotonicTime now = monotonic_now();
  const std::lock_guard lock(mutex_);
  Beat beat;
  for (int i = 0; i < count; ++i) {
    const BeatKey* key = table_.take(inbox.buffers[i].data(), inbox.messages[i].msg_len, now, &beat);
    if (key == nullptr) continue;
    ++facts_.num_taken;
    // An agent answers nobody: who beats to it is told so by the coordinator.
    if (beat.kind != BeatKind::kBeat || !targets_.empty() || beat.sequence % kAnswerEvery != 1) continue;
    uint8_t bytes[kBeatBytesMax];
    const Beat answer{BeatKind::kAnswer, kCoordinatorIndex, beat.incarnation, beat.sequence, {}};
    const size_t size = write_beat(answer, *key, bytes);
    const msghdr& head = inbox.messages[i].msg_hdr;
    const ssize_t sent =
        ::sendto(socket_.get(), bytes, size, MSG_DONTWAIT, static_cast<sockaddr*>(head.msg_name), head.msg_namelen);
    ++(sent < 0 ? facts_.num_unsent : facts_.num_sent);
  }
}

void Heart::maybe_beat(MonotonicTime now) {
  const std::lock_guard lock(mutex_);
  if (targets_.empty() || now.ns < next_beat_ns_) return;
  // Steady, but for what was missed while it stood still: two beats at once would only look like jitter.
  next_beat_ns_ += period_ns_;
  if (next_beat_ns_ <= now.ns) next_beat_ns_ = now.ns + period_ns_;
  if (now.ns - turned_ns_.load(std::memory_order_relaxed) > loop_ns_max_) return;
  ++beat_.sequence;
  beat_.seen = table_.seen(now);
  uint8_t bytes[kBeatBytesMax];
  const size_t size = write_beat(beat_, key_, bytes);
  for (const Address& target : targets_) {
    const auto* address = reinterpret_cast<const sockaddr*>(&target.storage);
    const ssize_t sent = ::sendto(socket_.get(), bytes, size, MSG_DONTWAIT, address, target.bytes);
    ++(sent < 0 ? facts_.num_unsent : facts_.num_sent);
  }
}

void Heart::maybe_look(MonotonicTime now) {
  const std::lock_guard lock(mutex_);
  facts_.cpu_ns = thread_cpu_ns();
  if (now.ns < next_look_ns_) return;
  next_look_ns_ = now.ns + look_ms_ * kNsPerMs;
  const std::vector<HearingChange> changes = table_.look(now);
  for (const HearingChange& change : changes) changes_[change.node] = change;
  if (!changes.empty()) signal_event(event_.get());
}

}  // namespace unicron::monitor
