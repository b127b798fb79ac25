// The header page of an arena: may the content be used, and how far is it?
//
// Worker and agent map the same page. The worker may be killed between any two stores, so every field is one aligned
// word, and what depends on other fields is written after them (`stage` last when going forward). The two byte strings
// cannot be one word: the bitmap is stored word by word, of which adding one micro-batch changes one; the extra bytes
// carry a checksum, and a torn string is refused.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/mapping.h"
#include "gpu/driver_api.h"
#include "gpu/host_page.h"
#include "state/arena.h"

namespace unicron::state {

constexpr uint64_t kArenaVersion = 2;
constexpr size_t kLayoutDigestBytesMax = 64;
constexpr size_t kDoneBytesMax = 2048;
constexpr size_t kExtraBytesMax = 1024;

// What is in the page. 64-bit words only, so that the agent's and the worker's builds agree on it.
struct ArenaFields {
  std::atomic<uint64_t> magic;
  std::atomic<uint64_t> version;
  std::atomic<uint64_t> nbytes;  // of the content
  std::atomic<uint64_t> layout_digest_bytes;
  char layout_digest[kLayoutDigestBytesMax];

  std::atomic<int64_t> epoch;      // in which the state here last went back, to a checkpoint or a copy
  std::atomic<int64_t> iteration;  // committed steps that are in the parameters; the iteration being worked on
  std::atomic<int64_t> stage;
  std::atomic<uint64_t> dealt_replicas;  // bit i: replica i was live when this iteration began
  std::atomic<int64_t> reduction;  // 2 x segments reduced; + 1 while a complete result is copied from the staging area
  std::atomic<uint64_t> torn;      // parameters are being written
  std::atomic<uint64_t> summed;    // the local sums are complete and tied
  // Of an undoable step: 0 none is open; 2 + 2 x chunks written, + 1 while the next one is (its old values lie in the
  // undo area). A GPU writes it in the order of its stream.
  std::atomic<int64_t> open_step;
  std::atomic<uint64_t> ungathered;  // other replicas' shards of the newest step are not in the parameters yet

  std::atomic<uint64_t> has_commit;  // written last of the commit's result
  std::atomic<int64_t> commit_iteration;
  std::atomic<double> commit_tokens;
  std::atomic<double> commit_sumsq;
  std::atomic<double> commit_found_inf;
  std::atomic<double> commit_loss_sum;

  std::atomic<uint64_t> done_bytes;
  std::atomic<uint64_t> extra_bytes;
  std::atomic<uint64_t> extra_checksum;
  std::atomic<uint64_t> done[kDoneBytesMax / sizeof(uint64_t)];
  char extra[kExtraBytesMax];
  // Exact mode: how often this iteration was computed before, at scales that were too large; and of the commit's.
  std::atomic<int64_t> repeat;
  std::atomic<int64_t> commit_repeat;
};

static_assert(sizeof(ArenaFields) <= kArenaHeaderBytes);
static_assert(std::atomic<double>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

class ArenaHeader {
 public:
  explicit ArenaHeader(int fd);

  ArenaFields& fields() const { return *static_cast<ArenaFields*>(mapping_.data()); }

  // open_step becomes `value` when the stream gets here. Throws Error where the GPU cannot write to it.
  void open_step_on_stream(int64_t value, int device, gpu::Stream stream);

  void format(std::string_view layout_digest, uint64_t nbytes);
  // "" when this arena can be adopted, else why not.
  std::string check(std::string_view layout_digest, uint64_t nbytes) const;
  std::string layout_digest() const;

  void set_done(std::string_view bitmap);
  std::string done() const;
  void set_extra(std::string_view data);
  std::string extra() const;

 private:
  size_t file_bytes_;
  SharedMapping mapping_;
  gpu::HostPage page_;
};

}  // namespace unicron::state
