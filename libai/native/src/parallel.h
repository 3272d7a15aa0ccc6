// Loops on several threads that give the same bits as on one thread. The result of a part does not depend on the other
// parts, on the number of threads or on the thread that computes it.
#pragma once
#include <algorithm>
#include <cstdint>

#include "sharing.h"

namespace libai {

// Computes part number `part` of `loop`, or the whole loop if `part` is kWhole.
using Part = void (*)(void* loop, int64_t part);
constexpr int64_t kWhole = -1;

// The number of threads for a loop; 1 before the threads are started.
int NumThreads();
// Calls `part` for 0 ... num_parts - 1 on this thread and on free threads, or once for the whole loop. `sharing`
// records which way is faster. `work` may be in any unit that makes loops of the same kind comparable.
void RunParts(int64_t num_parts, double work, Sharing& sharing, Part part, void* loop);
// The record of the operation that this thread computes.
Sharing& CurrentSharing();
void SetCurrentSharing(Sharing* sharing);

constexpr int64_t kPartsPerThread = 2;

// The minimum count of numbers in a part, about 5 us of work, for arithmetic that waits for memory and for functions.
constexpr int64_t kLightGrain = 16384, kHeavyGrain = 4096;

// Calls `run(begin, end)` for ranges that cover 0 ... n - 1 and begin at multiples of `grain`. `work`: see RunParts.
template<typename Function>
void ForRanges(int64_t n, int64_t grain, const Function& run, double work) {
  const int64_t threads = NumThreads(), parts = std::min(n / grain, kPartsPerThread * threads);
  if (threads == 1 || parts < 2) {
    if (n > 0) run(int64_t{0}, n);
    return;
  }
  struct Loop {
    const Function& run;
    int64_t n, length;
  } loop{run, n, (n / parts + grain - 1) / grain * grain};
  const Part part = [](void* state, int64_t i) {
    const Loop& all = *static_cast<Loop*>(state);
    if (i == kWhole) return all.run(int64_t{0}, all.n);
    const int64_t begin = i * all.length;
    if (begin < all.n) all.run(begin, std::min(begin + all.length, all.n));
  };
  RunParts((n + loop.length - 1) / loop.length, work, CurrentSharing(), part, &loop);
}
template<typename Function>
void ForRanges(int64_t n, int64_t grain, const Function& run) { ForRanges(n, grain, run, static_cast<double>(n)); }

// Calls `run(begin, end)` for ranges of rows. A row has `width` numbers, and a range has about `grain` numbers or more.
template<typename Function>
void ForRows(int64_t rows, int64_t width, int64_t grain, const Function& run) {
  ForRanges(rows, std::max<int64_t>(1, grain / std::max<int64_t>(1, width)), run, static_cast<double>(rows) * width);
}

}  // namespace libai
