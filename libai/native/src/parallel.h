// Loops on several threads that give the same bits as on one: their parts do not depend on each other, nor on how many
// threads there are, nor on who computes which.
#pragma once
#include <algorithm>
#include <cstdint>

#include "sharing.h"

namespace libai {

// Computes part `part` of `loop`, or all of it for kWhole.
using Part = void (*)(void* loop, int64_t part);
constexpr int64_t kWhole = -1;

// How many threads there are for a loop; 1 before they are started.
int NumThreads();
// Calls `part` for 0 ... num_parts - 1, on this thread and on those that are free, or once for all. `sharing` learns
// what is faster: `work` is in any unit that makes loops of one kind comparable.
void RunParts(int64_t num_parts, double work, Sharing& sharing, Part part, void* loop);
// Of the operation that this thread computes.
Sharing& CurrentSharing();
void SetCurrentSharing(Sharing* sharing);

constexpr int64_t kPartsPerThread = 2;

// Numbers that are worth a part: some 5 us of arithmetic that waits for memory, and of functions that compute longer.
constexpr int64_t kLightGrain = 16384, kHeavyGrain = 4096;

// `run(begin, end)` for ranges that cover 0 ... n - 1 and begin at multiples of `grain`. `work`: see RunParts.
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

// `run(begin, end)` for ranges of rows of `width` numbers, of at least `grain` numbers.
template<typename Function>
void ForRows(int64_t rows, int64_t width, int64_t grain, const Function& run) {
  ForRanges(rows, std::max<int64_t>(1, grain / std::max<int64_t>(1, width)), run, static_cast<double>(rows) * width);
}

}  // namespace libai
