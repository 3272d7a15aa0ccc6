// Decides whether to split loops among threads. Splitting pays on idle cores, but seldom on cores that other programs
// keep busy. The choice holds for all operations, and for a stretch of time. If some loops were split and others not,
// their data would move back and forth between the caches of two cores, and the rarer way would look slow.
#pragma once
#include <algorithm>
#include <cstdint>

namespace libai {

// The time that an operation takes if its loops are split and if they are not.
class Sharing {
 public:
  // Returns the usual seconds for this work, or 0 if nothing is known.
  double Usual(bool is_shared, double work) const {
    return work_[is_shared] > 0.0 ? seconds_[is_shared] / work_[is_shared] * work : 0.0;
  }
  void Note(bool is_shared, double seconds, double work) {
    seconds_[is_shared] = seconds_[is_shared] * kKept + seconds;
    work_[is_shared] = work_[is_shared] * kKept + work;
  }

 private:
  static constexpr double kKept = 31.0 / 32.0;  // averages over about the last 32 calls

  double seconds_[2] = {}, work_[2] = {};
};

// Chooses the faster way, and from time to time tries the other way for a while.
class Choice {
 public:
  bool IsShared() const { return prefers_sharing_ != is_trial_; }
  void Note(Sharing& operation, double seconds, double work) {
    const bool is_shared = IsShared();
    const double usual = operation.Usual(!is_shared, work);
    operation.Note(is_shared, seconds, work);
    if (usual > 0.0) {
      taken_[is_shared] += seconds;
      taken_[!is_shared] += usual;
    }
    seconds_ += seconds;
    if (++loops_ < kLoops || seconds_ < (is_trial_ ? kTrial : stretch_)) return;
    if (is_trial_) Judge();
    is_trial_ = !is_trial_;
    seconds_ = taken_[0] = taken_[1] = 0.0;
    loops_ = 0;
  }

 private:
  static constexpr double kTrial = 0.02;  // the minimum seconds of a trial
  static constexpr int kLoops = 16;       // the minimum loops in a trial, and between trials
  static constexpr double kOften = 4.0, kSeldom = 128.0;  // the least and most time between trials, in trial lengths
  static constexpr double kClearly = 0.9;  // splitting must save 10 %: a second core has costs outside operations too

  void Judge() {
    const bool was_preferred = prefers_sharing_;
    if (taken_[0] > 0.0) prefers_sharing_ = taken_[1] < kClearly * taken_[0];
    interval_ = prefers_sharing_ == was_preferred ? std::min(2.0 * interval_, kSeldom) : kOften;
    stretch_ = interval_ * seconds_;
  }

  bool prefers_sharing_ = true, is_trial_ = false;
  double taken_[2] = {}, seconds_ = 0.0, stretch_ = kTrial, interval_ = kOften;
  int loops_ = 0;
};

}  // namespace libai
