// Whether an operation pays to be shared out among threads: it does on idle cores, and seldom on those that others keep
// busy. Both ways are timed, the faster one is taken, and the other is tried now and then.
#pragma once
#include <algorithm>
#include <cstdint>

namespace libai {

class Sharing {
 public:
  bool Prefers() const { return seconds_[1] * work_[0] < kClearly * seconds_[0] * work_[1]; }
  // The way of the next one. Drawn at random: those of a step come in a fixed order.
  bool Choose() {
    random_ = random_ * 1664525u + 1013904223u;
    if (!KnowsBoth()) return random_ >> 31;
    return Prefers() != (random_ < UINT32_MAX / interval_);
  }
  void Note(bool was_shared, double seconds, double work) {
    const bool is_trial = KnowsBoth() && was_shared != Prefers();
    if (is_trial) {  // one that has been faster is followed by others soon: large operations are few
      const double usual = seconds_[!was_shared] / work_[!was_shared] * work;
      const bool is_faster = was_shared ? seconds < kClearly * usual : kClearly * seconds < usual;
      interval_ = is_faster ? std::max(interval_ / 2, kOften) : kSeldom;
    }
    const double kept = is_trial ? kKeptOfTrials : kKept;
    seconds_[was_shared] = seconds_[was_shared] * kept + seconds;
    work_[was_shared] = work_[was_shared] * kept + work;
    ++counts_[was_shared];
  }

 private:
  static constexpr int64_t kFirst = 8;
  static constexpr uint32_t kOften = 4, kSeldom = 128;  // one in so many is a trial
  static constexpr double kKept = 63.0 / 64.0;  // what counts are the last 64 or so, or the last 8 trials
  static constexpr double kKeptOfTrials = 7.0 / 8.0;
  static constexpr double kClearly = 0.9;       // a second core has costs outside of the operation too

  bool KnowsBoth() const { return counts_[0] >= kFirst && counts_[1] >= kFirst; }

  double seconds_[2] = {}, work_[2] = {};
  int64_t counts_[2] = {};
  uint32_t random_ = 1, interval_ = kSeldom;
};

}  // namespace libai
