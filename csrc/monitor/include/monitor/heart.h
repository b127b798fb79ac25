// One thread that beats for this process and listens to thousands of others: sockets and time around LivenessTable.
//
// The coordinator has one that listens and answers (every fourth beat, so that a node knows it is heard); an agent has
// one that beats twice a second, to the coordinator and to its witnesses, and listens to those it is a witness of. Its
// beats say whom it hears. An agent's heart stops when its loop does: the loop says at every turn that it lives
// (turned()), because a process whose loop hangs must not look alive. Changes wait behind an eventfd.
//
// UDP: no connection to hold per node, a beat that is late is of no use, and thousands are read in some system calls.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "base/thread.h"
#include "base/time.h"
#include "monitor/liveness.h"

namespace unicron::monitor {

struct HeartFacts {
  uint64_t num_taken = 0;
  BeatRefusals refusals;
  uint64_t num_sent = 0;
  uint64_t num_unsent = 0;
  int64_t cpu_ns = 0;  // of its thread
};

class Heart {
 public:
  // host: a numeric address. port 0: any. Throws Error when it cannot be bound.
  Heart(const std::string& host, int port, int64_t look_ms);
  Heart(const Heart&) = delete;
  Heart& operator=(const Heart&) = delete;
  ~Heart();

  bool is_foreign() const { return thread_.is_foreign(); }
  int port() const { return port_; }
  int fileno() const { return event_.get(); }

  void watch(uint32_t node, uint64_t incarnation, const BeatKey& key, int64_t period_ms);
  void forget(uint32_t node);
  std::vector<HearingChange> take_changes();

  // Beats from now on, under this name, to these (numeric host, port); an empty list ends it. Without a turned() in
  // the last loop_ms_max it is silent.
  void beat_as(uint32_t node, uint64_t incarnation, const BeatKey& key, int64_t period_ms, int64_t loop_ms_max,
               const std::vector<std::pair<std::string, int>>& targets);
  void turned() { turned_ns_.store(monotonic_now().ns, std::memory_order_relaxed); }

  HeartFacts facts() const;
  void close();

 private:
  struct Address {
    sockaddr_storage storage{};
    socklen_t bytes = 0;
  };
  struct Inbox;

  static Address resolve(const std::string& host, int port);
  void run();
  int wait_ms(MonotonicTime now);
  void listen(Inbox& inbox);
  void take(Inbox& inbox, int count);
  void maybe_beat(MonotonicTime now);
  void maybe_look(MonotonicTime now);

  const int64_t look_ms_;
  int port_ = 0;
  Descriptor socket_;
  Descriptor event_;
  Descriptor stop_;
  mutable std::mutex mutex_;  // of what follows
  LivenessTable table_;
  std::unordered_map<uint32_t, HearingChange> changes_;  // the newest of each node
  Beat beat_;
  BeatKey key_{};
  std::vector<Address> targets_;
  int64_t period_ns_ = 0;
  int64_t loop_ns_max_ = 0;
  int64_t next_beat_ns_ = 0;
  int64_t next_look_ns_ = 0;
  HeartFacts facts_;
  std::atomic<int64_t> turned_ns_{0};
  Thread thread_;  // last: it uses all of the above
};

}  // namespace unicron::monitor
