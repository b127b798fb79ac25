// Who is slow: a rank, a stage, a link, or everybody by and by. Pure arithmetic over what all ranks of a task report.
//
// In synchronous training everybody takes as long as the slowest, so iteration times say nothing about who it is. What
// tells is the time a rank computes, without waiting for others, beside that of its peers in the same pipeline stage.
// A group's own time is that of its last arriver, who waits for nobody: the least wait of its members in an iteration.
//
//   rank    computes slow_ratio times as long as the median of its peers (a stage of one rank: as it did itself before)
//   stage   all of its ranks slower than they were, beside the other stages
//   link    a group's own time 1.5 times what it was, its sister groups' not
//   drift   the median rank 1.1 times slower than it was
//
// Each also has to lie six standard errors above what it is compared with, and to last; so noise delays a verdict and
// does not make one. Where something is compared with its own past, that includes how far it wandered before: a machine
// whose other work comes and goes is slow for minutes, and nothing has become slow. Fixed memory a rank and a link,
// whatever the number of iterations.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "monitor/pulse.h"
#include "monitor/robust_window.h"

namespace unicron::monitor {

enum class SlowKind : uint8_t { kRank = 0, kStage = 1, kLink = 2, kDrift = 3 };

struct Slow {
  SlowKind kind;
  int64_t subject;  // rank, stage, index of the link; -1 for drift
  double usual_ms;  // what it is compared with
  double now_ms;
  int64_t since;  // iteration
};

struct PaceSample {
  int64_t iteration;
  double compute_ms;                        // of one micro-batch, without waiting
  std::array<double, kWaitKinds> waits_ms;  // of the whole iteration, by kind of group
};

struct Link {
  int64_t kind;  // of the group: index into waits_ms
  std::vector<int64_t> members;
};

class PaceTable {
 public:
  // stages[rank] is the rank's pipeline stage.
  PaceTable(std::vector<int64_t> stages, const std::vector<Link>& links, double slow_ratio);

  // Samples of one rank come in the order of their iterations; those of different ranks in any.
  void add(int64_t rank, const PaceSample& sample);
  // Another process holds the role, or none: nothing of the former one counts.
  void forget(int64_t rank);
  // What is slow now. Look after every few samples: a verdict needs to hold over three samples or more, which is seen
  // of a rank at once and of all else at the next look.
  std::vector<Slow> look();

 private:
  struct Verdict {
    int64_t held_at = -1;  // samples counted when it began to hold
    int64_t fine_at = -1;  // ... when it ceased to, while it is in force
    bool is_in_force = false;
    Slow slow{};
  };
  struct Series {
    RobustWindow window;
    RobustWindow past;       // medians of every few samples
    double wander_ms = 0.0;  // how far those went up and down
    int64_t num_seen = 0;
    double baseline_ms = 0.0;  // 0: not known yet
    Verdict verdict;
  };
  struct Pending {  // one iteration of a link, until all members have reported it
    int64_t iteration = -1;
    int64_t num_reported = 0;
    double least_ms = 0.0;
  };
  static constexpr int kPendingMax = 32;
  struct LinkSeries {
    Link link;
    Series series;
    std::array<Pending, kPendingMax> pending{};
  };
  struct Compared;
  struct Facts;

  void require_rank(int64_t rank) const;
  static double wander_of(const Series& series);
  static void keep(Series* series, double ms, int64_t iteration);
  void settle(Verdict* verdict, const Compared& compared, int64_t count, SlowKind kind, int64_t subject) const;
  Facts facts(int age) const;
  std::vector<Compared> compare_ranks(const Facts& facts) const;
  std::vector<bool> were_slow() const;
  void look_at_ranks(const Facts& facts);
  void look_at_stages(const Facts& facts);
  void look_at_links();
  void look_at_drift(const Facts& facts);

  std::vector<int64_t> stages_;
  int64_t num_stages_;
  double slow_ratio_;
  std::vector<Series> ranks_;
  std::vector<LinkSeries> links_;
  std::vector<std::vector<size_t>> links_of_rank_;
  std::vector<Verdict> stage_verdicts_;
  Verdict drift_;
};

}  // namespace unicron::monitor
