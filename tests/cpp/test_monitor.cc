// Frames, futexes, groups and the death of a holder, without Python.
#include <linux/futex.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "monitor/frames.h"
#include "monitor/futex.h"
#include "monitor/group_table.h"
#include "monitor/holder.h"
#include "monitor/process.h"
#include "monitor/pulse.h"
#include "monitor/sockets.h"
#include "monitor/supervisor.h"

namespace unicron::monitor {
namespace {

std::string little_endian(uint64_t value, size_t num_bytes) {
  std::string bytes;
  for (size_t i = 0; i < num_bytes; ++i) bytes.push_back(static_cast<char>(value >> (8 * i)));
  return bytes;
}

std::string frame_of(uint8_t kind, uint64_t epoch, const std::vector<uint32_t>& touched, const std::string& message) {
  std::string body = little_endian(kind, 1) + little_endian(epoch, 8) + little_endian(touched.size(), 2);
  for (const uint32_t rank : touched) body += little_endian(rank, 4);
  body += message;
  return little_endian(body.size(), 4) + body;
}

void test_frames_split_anywhere() {
  const std::string stream = frame_of(1, 7, {3, 70'000}, "plan") + frame_of(2, 0, {}, "");
  for (size_t cut = 0; cut <= stream.size(); ++cut) {
    FrameParser parser;
    std::vector<Frame> frames;
    const auto drain = [&] {
      while (auto frame = parser.pop()) frames.push_back(*frame);
    };
    parser.push(stream.data(), cut);
    drain();
    parser.push(stream.data() + cut, stream.size() - cut);
    drain();
    CHECK(frames.size() == 2);
    CHECK(frames[0].kind == kFrameKindPlan && frames[0].epoch == Epoch(7) && frames[0].message == "plan");
    CHECK((frames[0].touched == std::vector<Rank>{Rank(3), Rank(70'000)}));
    CHECK(frames[1].kind == 2 && frames[1].touched.empty() && frames[1].message.empty());
  }
}

void test_frames_out_of_bounds() {
  for (const std::string& stream :
       {little_endian(kFrameHeadBytes - 1, 4), little_endian(kFrameBytesMax + 1, 4), std::string(4, '\xff'),
        little_endian(11, 4) + std::string(9, '\0') + little_endian(1, 2)}) {
    FrameParser parser;
    parser.push(stream.data(), stream.size());
    CHECK(testing::throws<Error>([&] { parser.pop(); }));
  }
  CHECK(testing::throws<Error>([] { encode_message(std::string(kMessageBytesMax + 1, 'x')); }));
  CHECK(encode_message("ab") == little_endian(2, 4) + "ab");
}

void test_futex_times_out_and_sees_a_change() {
  uint32_t word = 5;
  for (const bool use_waitv : {false, has_futex_waitv()}) {
    const FutexWord unchanged{&word, 5};
    const FutexWord changed{&word, 4};
    CHECK(futex_wait(&unchanged, 1, Deadline::after_ms(monotonic_now(), 1), use_waitv) == FutexWake::kTimedOut);
    CHECK(futex_wait(&changed, 1, Deadline::after_ms(monotonic_now(), 1000), use_waitv) == FutexWake::kChanged);
  }
}

// A pair of connected TCP sockets on the loopback interface.
struct TcpPair {
  TcpPair() {
    listener.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    first.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    CHECK(::bind(listener.get(), generic, length) == 0);
    CHECK(::listen(listener.get(), 1) == 0);
    CHECK(::getsockname(listener.get(), generic, &length) == 0);
    CHECK(::connect(first.get(), generic, length) == 0);
    second.reset(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  }
  Descriptor listener;
  Descriptor first;
  Descriptor second;
};

void test_groups() {
  TcpPair inside;
  TcpPair cross;
  std::vector<int> found;
  for (const SocketIdentity& socket : connected_sockets()) found.push_back(socket.fd);
  CHECK((found == std::vector<int>{inside.first.get(), inside.second.get(), cross.first.get(), cross.second.get()}));
  const std::vector<SocketIdentity> of_inside = {connected_sockets()[0]};
  const std::vector<SocketIdentity> of_cross = {connected_sockets()[2]};
  GroupTable groups;
  groups.add(GroupId(1), of_inside, {Rank(4), Rank(2)}, false);
  groups.add(GroupId(2), of_cross, {Rank(2), Rank(9)}, true);
  CHECK(testing::throws<Error>([&] { groups.add(GroupId(1), {}, {}, false); }));
  CHECK(groups.state(GroupId(1)) == GroupState::kWhole);
  CHECK(groups.state(GroupId(7)) == GroupState::kForgotten);
  CHECK(groups.shut({Rank(9)}) == 1);
  CHECK(groups.state(GroupId(1)) == GroupState::kWhole);
  CHECK(groups.state(GroupId(2)) == GroupState::kShut);
  char byte = 0;
  CHECK(::recv(cross.second.get(), &byte, 1, MSG_DONTWAIT) == 0);
  CHECK(::recv(inside.second.get(), &byte, 1, MSG_DONTWAIT) < 0);
  groups.forget(GroupId(2));
  groups.add(GroupId(3), of_inside, {}, false);
  CHECK(groups.shut({Rank(4)}) == 1);
  CHECK(::recv(inside.second.get(), &byte, 1, MSG_DONTWAIT) == 0);
  inside.first.reset();
  CHECK(groups.state(GroupId(3)) == GroupState::kBroken);
}

void test_death_of_a_holder() {
  const Descriptor pages = create_pulse_pages(1);
  const auto page = std::make_shared<PulsePage>(pages.get(), SlotId(0));
  Supervisor supervisor;
  supervisor.watch(page);
  const pid_t child = ::fork();
  if (child == 0) {
    hold_for_life(page);
    ::pause();
    ::_exit(1);
  }
  while (page->fields().owner_pid.load() != child) ::usleep(1000);
  CHECK((*page->mutex_word() & FUTEX_OWNER_DIED) == 0);
  ::kill(child, SIGKILL);
  std::vector<Death> deaths;
  for (int i = 0; i < 10'000 && deaths.empty(); ++i) {
    ::usleep(1000);
    deaths = supervisor.take_deaths();
  }
  CHECK(deaths.size() == 1 && deaths[0].slot == SlotId(0));
  CHECK(wait_owner_gone(child, 10'000));
  CHECK(::waitpid(child, nullptr, 0) == child);
  page->reset();
  CHECK(*page->mutex_word() == 0);
}

}  // namespace
}  // namespace unicron::monitor

int main() {
  unicron::monitor::test_frames_split_anywhere();
  unicron::monitor::test_frames_out_of_bounds();
  unicron::monitor::test_futex_times_out_and_sees_a_change();
  unicron::monitor::test_groups();
  unicron::monitor::test_death_of_a_holder();
  return unicron::testing::num_failures;
}
