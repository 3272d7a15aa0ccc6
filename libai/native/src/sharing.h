// Whether loops pay to be shared out among threads: they do on idle cores, and seldom on those that others keep busy.
// One choice for all operations, for a stretch of time: where some are shared out and others not, their numbers go to
// and fro between the caches of two cores, and whichever way is rarer looks slow.
#pragma once
#include <algorithm>
#include <cstdint>

namespace libai {

// How long an operation takes, shared out or not.
class Sharing {
 public:
  // In seconds; 0 where nothing is known.
  double Usual(bool is_shared, double work) const {
    return work_[is_shared] > 0.0 ? seconds_[is_shared] / work_[is_shared] * work : 0.0;
  }
  void Note(bool is_shared, double seconds, double work) {
    seconds_[is_shared] = seconds_[is_shared] * kKept + seconds;
    work_[is_shared] = work_[is_shared] * kKept + work;
  }

 private:
  static constexpr double kKept = 31.0 / 32.0;  // what counts are the last 32 or so

  double seconds_[2] = {}, work_[2] = {};
};

// The faster way is taken, and the other is tried for a while now and then.
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
  static constexpr double kTrial = 0.02;
  static constexpr int kLoops = 16;                   // at least, of a trial
  static constexpr double kOften = 4.0, kSeldom = 128.0;  // how many times as long as a trial until the next one
  static constexpr double kClearly = 0.9;  // a second core has costs outside of the operation too

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
