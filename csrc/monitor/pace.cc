#include "monitor/pace.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "base/error.h"

namespace unicron::monitor {

namespace {

constexpr int kWarmUp = 4;       // samples of a rank that do not count: caches, clocks, allocators
constexpr int kRecent = 16;      // samples that say what is
constexpr int kBaseline = 32;    // samples that say what was
constexpr int64_t kConfirm = 3;  // further samples at which it must still hold
constexpr int64_t kRelease = 8;  // samples at which it must not hold any more
constexpr int64_t kDriftConfirm = 32;
constexpr double kErrors = 6.0;          // standard errors between slow and chance
constexpr double kMedianError = 1.2533;  // of a median, in standard errors of a mean
constexpr double kNoiseMin = 0.005;      // of the value: nothing is quieter
constexpr double kLinkRatio = 1.5;
constexpr double kDriftRatio = 1.1;
constexpr double kRankLeastMs = 0.1;  // differences below these are nobody's trouble
constexpr double kLinkLeastMs = 0.5;
constexpr int kPastYoungest = 12;  // of the medians of kRecent samples: what has just become slow is no past yet
constexpr int kPastMin = 32;       // ... and so many must be older
constexpr double kForgets = 0.99;  // a medley that is over: half of it after some thousand samples
constexpr double kWanders = 3.0;   // between slow and one more of those ups
constexpr int64_t kRanksMax = 1 << 20;

double lower_median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Median of sorted values without the one at `left_out`.
double median_without(const std::vector<double>& sorted, size_t left_out) {
  const size_t number = sorted.size() - 1;
  const auto at = [&](size_t index) { return sorted[index < left_out ? index : index + 1]; };
  return number % 2 == 1 ? at(number / 2) : (at(number / 2 - 1) + at(number / 2)) / 2.0;
}

// Standard error of the median of the newest samples.
double error_of(const RobustWindow& window, int newest, double level) {
  const double noise = std::max(window.noise(RobustWindow::kSize), kNoiseMin * level);
  return kMedianError * noise / std::sqrt(static_cast<double>(std::min(newest, window.size())));
}

double mean_error(double error, size_t number) { return kMedianError * error / std::sqrt(static_cast<double>(number)); }

}  // namespace

// Is `now` slow beside `usual`? `level`: where the run of slow samples is looked for in `window`.
struct PaceTable::Compared {
  double usual = 0.0;
  double now = 0.0;
  double error = 0.0;  // of the difference
  double ratio_min = 1.0;
  double least = 0.0;
  double wander = 0.0;  // more than what it went up and down before
  const RobustWindow* window = nullptr;
  int64_t confirm = kConfirm;
  bool is_known = false;     // false: too few samples for any answer
  bool held_before = false;  // so many samples ago, too

  bool is_slow() const {
    const double more = now - usual;
    return is_known && now > ratio_min * usual && more > kErrors * error && more > wander && more > least;
  }
  bool is_fine() const { return is_known && now < (1.0 + (ratio_min - 1.0) / 2.0) * usual; }
};

// Medians of the recent samples of every rank that has enough of them.
struct PaceTable::Facts {
  std::vector<int64_t> ranks;
  std::vector<double> now;                  // by place in `ranks`
  std::vector<double> error;                // of now
  std::vector<double> drift;                // now over the rank's own baseline; 0: none yet
  std::vector<std::vector<size_t>> places;  // by stage
};

PaceTable::PaceTable(std::vector<int64_t> stages, const std::vector<Link>& links, double slow_ratio)
    : stages_(std::move(stages)), num_stages_(0), slow_ratio_(slow_ratio) {
  if (stages_.empty() || static_cast<int64_t>(stages_.size()) > kRanksMax || !(slow_ratio > 1.0)) {
    throw Error(ErrorCode::kInvalidArgument, "give 1 to 1048576 ranks and a slow_ratio above 1");
  }
  for (const int64_t stage : stages_) {
    if (stage < 0 || stage >= static_cast<int64_t>(stages_.size())) {
      throw Error(ErrorCode::kInvalidArgument, "stage " + std::to_string(stage) + " is no index of a pipeline stage");
    }
    num_stages_ = std::max(num_stages_, stage + 1);
  }
  ranks_.resize(stages_.size());
  links_of_rank_.resize(stages_.size());
  stage_verdicts_.resize(static_cast<size_t>(num_stages_));
  for (const Link& link : links) {
    if (link.kind < 0 || link.kind >= kWaitKinds || link.members.size() < 2) {
      throw Error(ErrorCode::kInvalidArgument, "a link needs a kind of group and two members or more");
    }
    for (const int64_t rank : link.members) {
      require_rank(rank);
      links_of_rank_[static_cast<size_t>(rank)].push_back(links_.size());
    }
    links_.push_back(LinkSeries{link, {}, {}});
  }
}

void PaceTable::require_rank(int64_t rank) const {
  if (rank < 0 || rank >= static_cast<int64_t>(stages_.size())) {
    throw Error(ErrorCode::kInvalidArgument,
                "rank " + std::to_string(rank) + " is outside 0 to " + std::to_string(stages_.size() - 1));
  }
}

// How far the series went up and down before; infinite: that is not known yet.
double PaceTable::wander_of(const Series& series) {
  const bool is_known = series.past.size() >= kPastYoungest + kPastMin;
  return is_known ? series.wander_ms : std::numeric_limits<double>::infinity();
}

void PaceTable::keep(Series* series, double ms, int64_t iteration) {
  if (!(ms >= 0.0) || ++series->num_seen <= kWarmUp) return;
  series->window.add(ms, iteration);
  const int64_t count = series->window.count();
  if (count % kRecent == 0) {
    series->past.add(series->window.median(kRecent));
    const double range_ms = series->past.range(kPastYoungest);
    series->wander_ms = std::max(range_ms, kForgets * series->wander_ms);
  }
  if (count == kBaseline) {
    series->baseline_ms = series->window.median(kBaseline);
  } else if (count % RobustWindow::kSize == 0 && count > kBaseline) {
    // What it could do, not what it did last: a slow creep must not take its yardstick along.
    series->baseline_ms = std::min(series->baseline_ms, series->window.median(RobustWindow::kSize));
  }
}

void PaceTable::add(int64_t rank, const PaceSample& sample) {
  require_rank(rank);
  keep(&ranks_[static_cast<size_t>(rank)], sample.compute_ms, sample.iteration);
  for (const size_t index : links_of_rank_[static_cast<size_t>(rank)]) {
    LinkSeries& entry = links_[index];
    const double waited_ms = sample.waits_ms[static_cast<size_t>(entry.link.kind)];
    if (sample.iteration < 0 || !(waited_ms >= 0.0)) continue;
    Pending& pending = entry.pending[static_cast<size_t>(sample.iteration % kPendingMax)];
    if (pending.iteration != sample.iteration) pending = Pending{sample.iteration, 0, waited_ms};
    pending.least_ms = std::min(pending.least_ms, waited_ms);
    if (++pending.num_reported == static_cast<int64_t>(entry.link.members.size())) {
      keep(&entry.series, pending.least_ms, sample.iteration);
    }
  }
}

void PaceTable::forget(int64_t rank) {
  require_rank(rank);
  ranks_[static_cast<size_t>(rank)] = Series{};
  for (const size_t index : links_of_rank_[static_cast<size_t>(rank)]) {
    links_[index].series = Series{};
    links_[index].pending.fill(Pending{});
  }
}

void PaceTable::settle(Verdict* verdict, const Compared& compared, int64_t count, SlowKind kind,
                       int64_t subject) const {
  if (compared.is_slow()) {
    verdict->fine_at = -1;
    if (verdict->held_at < 0) verdict->held_at = compared.held_before ? count - compared.confirm : count;
    const bool is_new = !verdict->is_in_force;
    if (is_new && count - verdict->held_at < compared.confirm) return;
    verdict->is_in_force = true;
    const double level = (compared.usual + compared.now) / 2.0;
    const int64_t since = is_new && compared.window != nullptr ? compared.window->since(level) : verdict->slow.since;
    verdict->slow = Slow{kind, subject, compared.usual, compared.now, since};
  } else {
    verdict->held_at = -1;
    if (!verdict->is_in_force) return;
    if (!compared.is_fine()) {
      verdict->fine_at = -1;
    } else if (verdict->fine_at < 0) {
      verdict->fine_at = count;
    } else if (count - verdict->fine_at >= kRelease) {
      *verdict = Verdict{};
    }
  }
}

// As they were `age` samples ago.
PaceTable::Facts PaceTable::facts(int age) const {
  Facts facts;
  facts.places.resize(static_cast<size_t>(num_stages_));
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    const Series& series = ranks_[rank];
    if (series.window.size() < kRecent + age) continue;
    const double now = series.window.median(kRecent, age);
    facts.places[static_cast<size_t>(stages_[rank])].push_back(facts.ranks.size());
    facts.ranks.push_back(static_cast<int64_t>(rank));
    facts.now.push_back(now);
    facts.error.push_back(error_of(series.window, kRecent, now));
    facts.drift.push_back(series.baseline_ms > 0.0 ? now / series.baseline_ms : 0.0);
  }
  return facts;
}

// By place.
std::vector<PaceTable::Compared> PaceTable::compare_ranks(const Facts& facts) const {
  std::vector<Compared> found(facts.ranks.size());
  for (const std::vector<size_t>& places : facts.places) {
    std::vector<double> sorted;
    std::vector<double> errors;
    for (const size_t place : places) {
      sorted.push_back(facts.now[place]);
      errors.push_back(facts.error[place]);
    }
    std::sort(sorted.begin(), sorted.end());
    const double peers_error = errors.empty() ? 0.0 : lower_median(errors);
    for (const size_t place : places) {
      const Series& series = ranks_[static_cast<size_t>(facts.ranks[place])];
      Compared& compared = found[place];
      compared.now = facts.now[place];
      compared.ratio_min = slow_ratio_;
      compared.least = kRankLeastMs;
      compared.window = &series.window;
      if (places.size() >= 2) {
        const auto own = std::lower_bound(sorted.begin(), sorted.end(), compared.now) - sorted.begin();
        compared.usual = median_without(sorted, static_cast<size_t>(own));
        compared.error = std::hypot(facts.error[place], mean_error(peers_error, places.size() - 1));
        compared.is_known = true;
      } else if (facts.drift[place] > 0.0) {
        std::vector<double> others;
        for (size_t other = 0; other < facts.ranks.size(); ++other) {
          if (other != place && facts.drift[other] > 0.0) others.push_back(facts.drift[other]);
        }
        if (!others.empty()) {
          compared.usual = series.baseline_ms * lower_median(others);
          compared.error = 2.0 * facts.error[place];
          compared.is_known = true;
        }
      }
    }
  }
  return found;
}

// By rank, kConfirm samples ago.
std::vector<bool> PaceTable::were_slow() const {
  std::vector<bool> slow(ranks_.size(), false);
  const Facts then = facts(static_cast<int>(kConfirm));
  const std::vector<Compared> found = compare_ranks(then);
  for (size_t place = 0; place < found.size(); ++place) {
    slow[static_cast<size_t>(then.ranks[place])] = found[place].is_slow();
  }
  return slow;
}

void PaceTable::look_at_ranks(const Facts& facts) {
  std::vector<Compared> found = compare_ranks(facts);
  std::vector<bool> slow;
  for (size_t place = 0; place < found.size(); ++place) {
    const int64_t rank = facts.ranks[place];
    Series& series = ranks_[static_cast<size_t>(rank)];
    Compared& compared = found[place];
    if (compared.is_slow() && series.verdict.held_at < 0) {  // rare: what it costs is paid by those alone
      if (slow.empty()) slow = were_slow();
      compared.held_before = slow[static_cast<size_t>(rank)];
    }
    settle(&series.verdict, compared, series.window.count(), SlowKind::kRank, rank);
  }
}

void PaceTable::look_at_stages(const Facts& facts) {
  if (num_stages_ < 2) return;
  for (size_t stage = 0; stage < facts.places.size(); ++stage) {
    const std::vector<size_t>& places = facts.places[stage];
    std::vector<double> own;
    std::vector<double> others;
    std::vector<double> now;
    std::vector<double> errors;
    for (size_t place = 0; place < facts.ranks.size(); ++place) {
      if (facts.drift[place] <= 0.0) continue;
      const bool is_own = stages_[static_cast<size_t>(facts.ranks[place])] == static_cast<int64_t>(stage);
      (is_own ? own : others).push_back(facts.drift[place]);
      errors.push_back(facts.error[place] / facts.now[place]);
      if (is_own) now.push_back(facts.now[place]);
    }
    if (own.size() < 2 || own.size() < places.size() || others.empty()) continue;  // one rank: it is named itself
    const double elsewhere = lower_median(others);
    const double here = lower_median(own);
    const double now_ms = lower_median(now);
    const bool are_all = *std::min_element(own.begin(), own.end()) > (1.0 + (slow_ratio_ - 1.0) / 2.0) * elsewhere;
    Compared compared;
    compared.now = now_ms;
    compared.usual = now_ms * elsewhere / here;
    compared.error = now_ms * std::hypot(mean_error(lower_median(errors), own.size()),
                                         mean_error(lower_median(errors), others.size()));
    compared.ratio_min = slow_ratio_;
    compared.least = kRankLeastMs;
    const RobustWindow& window = ranks_[static_cast<size_t>(facts.ranks[places.front()])].window;
    compared.window = &window;
    compared.is_known = are_all || here < elsewhere * slow_ratio_;
    settle(&stage_verdicts_[stage], compared, window.count(), SlowKind::kStage, static_cast<int64_t>(stage));
  }
}

void PaceTable::look_at_links() {
  std::vector<double> now(links_.size(), 0.0);
  std::vector<double> drifts(links_.size(), 0.0);
  for (size_t index = 0; index < links_.size(); ++index) {
    const Series& series = links_[index].series;
    if (series.baseline_ms <= 0.0) continue;
    now[index] = series.window.median(kRecent);
    drifts[index] = now[index] / series.baseline_ms;
  }
  for (size_t index = 0; index < links_.size(); ++index) {
    Series& series = links_[index].series;
    if (series.baseline_ms <= 0.0) continue;
    std::vector<double> sisters;
    for (size_t other = 0; other < links_.size(); ++other) {
      const bool is_sister = other != index && links_[other].link.kind == links_[index].link.kind;
      if (is_sister && drifts[other] > 0.0) sisters.push_back(drifts[other]);
    }
    const double common = sisters.empty() ? 1.0 : std::max(lower_median(sisters), 1.0);
    Compared compared;
    compared.now = now[index];
    compared.usual = series.baseline_ms * common;
    compared.error = std::sqrt(2.0) * error_of(series.window, kRecent, compared.now);
    // Sister groups show what slows all of them; one that has none is its own measure.
    if (sisters.empty()) compared.wander = kWanders * wander_of(series);
    compared.ratio_min = kLinkRatio;
    compared.least = kLinkLeastMs;
    compared.window = &series.window;
    compared.is_known = true;
    settle(&series.verdict, compared, series.window.count(), SlowKind::kLink, static_cast<int64_t>(index));
  }
}

void PaceTable::look_at_drift(const Facts& facts) {
  // Of several ranks the one in the middle; of two the faster one: the other is a slow rank.
  std::vector<std::pair<double, int64_t>> drifts;
  for (const int64_t rank : facts.ranks) {
    const Series& series = ranks_[static_cast<size_t>(rank)];
    if (series.baseline_ms <= 0.0 || series.window.size() < RobustWindow::kSize) continue;
    drifts.emplace_back(series.window.median(RobustWindow::kSize) / series.baseline_ms, rank);
  }
  if (drifts.empty() || drifts.size() < facts.ranks.size()) return;
  const auto middle = drifts.begin() + static_cast<std::ptrdiff_t>((drifts.size() - 1) / 2);
  std::nth_element(drifts.begin(), middle, drifts.end());
  const Series& series = ranks_[static_cast<size_t>(middle->second)];
  Compared compared;
  compared.now = series.window.median(RobustWindow::kSize);
  compared.usual = series.baseline_ms;
  compared.error = std::sqrt(2.0) * error_of(series.window, RobustWindow::kSize, compared.now);
  compared.wander = kWanders * wander_of(series);
  compared.ratio_min = kDriftRatio;
  compared.least = kRankLeastMs;
  compared.window = &series.window;
  compared.confirm = kDriftConfirm;
  compared.is_known = true;
  settle(&drift_, compared, series.window.count(), SlowKind::kDrift, -1);
}

std::vector<Slow> PaceTable::look() {
  const Facts known = facts(0);
  look_at_ranks(known);
  look_at_stages(known);
  look_at_links();
  look_at_drift(known);
  std::vector<Slow> slow;
  const auto take = [&](const Verdict& verdict) {
    if (verdict.is_in_force) slow.push_back(verdict.slow);
  };
  for (const Series& series : ranks_) take(series.verdict);
  for (const Verdict& verdict : stage_verdicts_) take(verdict);
  for (const LinkSeries& entry : links_) take(entry.series.verdict);
  take(drift_);
  return slow;
}

}  // namespace unicron::monitor
