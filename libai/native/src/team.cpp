// The threads that compute loops together.
#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <xmmintrin.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "parallel.h"

namespace libai {
namespace {

using Clock = std::chrono::steady_clock;

// Waking a thread takes as long as a part of a loop, so an idle thread polls for the next loop before it sleeps.
constexpr auto kLookOut = std::chrono::microseconds(200);
constexpr int kMostThreads = 32;
constexpr timespec kNap{0, 20'000};

std::atomic<bool> g_is_enabled{true}, g_is_forced{false};

// Splits one loop at a time among the threads. A thread that has another loop meanwhile computes it by itself.
class Team {
 public:
  explicit Team(int num_threads) : num_threads_(std::min(num_threads, kMostThreads)) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // the program's own threads handle signals
    for (int i = 1; i < num_threads_; ++i) std::thread(&Team::Help, this, i).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // Runs a loop, split or whole, and returns true. Returns false during another thread's loop or inside a loop.
  bool TryRun(int64_t num_parts, double work, Sharing& sharing, Part part, void* loop) {
    if (is_inside_ || !owner_.try_lock()) return false;
    std::lock_guard<std::mutex> owned(owner_, std::adopt_lock);
    is_inside_ = true;
    const bool is_shared = choice_.IsShared() || g_is_forced;
    const auto start = Clock::now();
    if (is_shared) {
      Share(num_parts, part, loop);
    } else {
      part(loop, kWhole);
    }
    const std::chrono::duration<double> seconds = Clock::now() - start;
    if (!g_is_forced) choice_.Note(sharing, seconds.count(), work);
    ++(is_shared ? num_shared : num_alone);
    is_inside_ = false;
    return true;
  }
  int num_threads() const { return num_threads_; }

  std::atomic<int64_t> num_shared{0}, num_alone{0};

 private:
  void Share(int64_t num_parts, Part part, void* loop) {
    part_ = part;
    loop_ = loop;
    num_parts_ = num_parts;
    rounding_ = _mm_getcsr();
    num_slots_ = static_cast<int>(std::min<int64_t>(num_threads_, num_parts));
    for (int i = 0; i < num_slots_; ++i) slots_[i].next = num_parts * i / num_slots_;
    ++number_;  // open the loop
    if (num_asleep_ != 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      for (int i = 1; i < num_slots_; ++i) opened_.notify_one();
    }
    RunRest(0);
    ++number_;  // close the loop: threads that have not joined yet are not waited for
    for (const auto end = Clock::now() + kLookOut; num_inside_ != 0;) {
      if (Clock::now() < end) _mm_pause(); else nanosleep(&kNap, nullptr);
    }
  }

  // Each thread first takes its own parts, which are the same in every loop, because their numbers are in its cache.
  // Then it takes parts of other threads.
  void RunRest(int own) {
    for (int i = 0; i < num_slots_; ++i) {
      const int slot = (own + i) % num_slots_;
      const int64_t end = num_parts_ * (slot + 1) / num_slots_;
      for (int64_t number; (number = slots_[slot].next.fetch_add(1)) < end;) part_(loop_, number);
    }
  }

  bool IsNew(uint64_t seen) const {
    const uint64_t number = number_;
    return number % 2 == 1 && number != seen;
  }

  void Help(int own) {
    uint64_t seen = 0;
    is_inside_ = true;
    for (auto end = Clock::now();;) {
      const uint64_t number = number_;
      if (number % 2 == 1 && number != seen) {
        seen = number;
        ++num_inside_;
        if (number_ == number) {  // otherwise the loop has been closed meanwhile, and the next one may be opening
          _mm_setcsr(rounding_);
          RunRest(own);
        }
        --num_inside_;
        end = Clock::now() + kLookOut;
      } else if (Clock::now() < end) {
        _mm_pause();
      } else {
        std::unique_lock<std::mutex> lock(mutex_);
        ++num_asleep_;
        opened_.wait(lock, [&] { return IsNew(seen); });
        --num_asleep_;
      }
    }
  }

  static thread_local bool is_inside_;  // this thread is inside a loop
  const int num_threads_;
  Choice choice_;  // guarded by `owner_`
  std::mutex owner_, mutex_;
  std::condition_variable opened_;
  // the open loop; these members change only while no other thread is inside
  Part part_ = nullptr;
  void* loop_ = nullptr;
  int64_t num_parts_ = 0;
  unsigned rounding_ = 0;  // the MXCSR register: rounding and the treatment of denormal numbers
  int num_slots_ = 0;
  struct alignas(64) Slot {
    std::atomic<int64_t> next{0};
  };
  Slot slots_[kMostThreads];
  std::atomic<uint64_t> number_{0};  // odd while a loop is open
  std::atomic<int> num_inside_{0}, num_asleep_{0};
};

thread_local bool Team::is_inside_ = false;

std::atomic<Team*> g_team{nullptr};  // never freed: its threads wait in it until the process ends

Sharing g_others;  // for loops outside of any operation
thread_local Sharing* g_sharing = nullptr;

}  // namespace

int NumThreads() {
  const Team* team = g_team;
  return team == nullptr || !g_is_enabled ? 1 : team->num_threads();
}
Sharing& CurrentSharing() { return g_sharing == nullptr ? g_others : *g_sharing; }
void SetCurrentSharing(Sharing* sharing) { g_sharing = sharing; }

void RunParts(int64_t num_parts, double work, Sharing& sharing, Part part, void* loop) {
  Team* team = g_team;
  if (team != nullptr && num_parts > 1 && team->TryRun(num_parts, work, sharing, part, loop)) return;
  part(loop, kWhole);
}

}  // namespace libai

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Call this once per process, before the first loop.
EXPORTED void libai_team_start(int num_threads) {
  libai::g_team = new libai::Team(num_threads);
  pthread_atfork(nullptr, nullptr, [] { libai::g_team = nullptr; });  // a forked child has none of these threads
}
// For comparisons in one process: if not enabled, each thread computes its loops by itself; if forced, it splits them.
EXPORTED void libai_team_enable(bool is_enabled, bool is_forced) {
  libai::g_is_enabled = is_enabled;
  libai::g_is_forced = is_forced;
}
// The number of loops that were split. libai_team_alone is the number of loops that were large enough, but not split.
// Both are 0 without threads.
EXPORTED int64_t libai_team_shared() {
  const libai::Team* team = libai::g_team;
  return team == nullptr ? 0 : team->num_shared.load();
}
EXPORTED int64_t libai_team_alone() {
  const libai::Team* team = libai::g_team;
  return team == nullptr ? 0 : team->num_alone.load();
}
// For tests: computes which of `count` loops of equal work are split. `shared` and `alone` are the seconds that each
// loop takes if it is split and if it is not.
EXPORTED void libai_team_simulate(const double* shared, const double* alone, int count, bool* is_shared) {
  libai::Choice choice;
  libai::Sharing sharing;
  for (int i = 0; i < count; ++i) {
    is_shared[i] = choice.IsShared();
    choice.Note(sharing, is_shared[i] ? shared[i] : alone[i], 1.0);
  }
}
