// Sums over many numbers, on several threads.
#pragma once
#include <vector>

#include "register.h"

namespace libai {

// Returns the total of `sum(begin, count)` over pieces of n numbers. Pieces depend only on n and are added in order.
template<typename Sum>
double SumPieces(int64_t n, const Sum& sum) {
  constexpr int64_t kPiece = 65536;
  const int64_t num_pieces = (n + kPiece - 1) / kPiece;
  if (num_pieces < 2) return sum(int64_t{0}, n);
  std::vector<double> sums(num_pieces);
  double* const to = sums.data();
  ForRanges(num_pieces, 1, [&](int64_t i, int64_t end) {
    for (; i < end; ++i) to[i] = sum(i * kPiece, std::min(kPiece, n - i * kPiece));
  }, static_cast<double>(n));
  double total = 0.0;
  for (double part : sums) total += part;
  return total;
}

// Adds up rows of `d` numbers in blocks. `sum(first, count, sums)` adds the rows of a block to `sums`, which holds
// `num_sums` zeros at first. Then `add(sums)` is called for each block in order. Blocks depend only on the sizes, so
// results do not depend on the number of threads.
template<typename Sum, typename Add>
void AddBlocks(int64_t rows, int64_t d, int64_t num_sums, const Sum& sum, const Add& add) {
  constexpr int64_t kMostBlocks = 32;
  const int64_t least = std::max<int64_t>(64, kLightGrain / std::max<int64_t>(1, d));
  const int64_t length = std::max(least, (rows + kMostBlocks - 1) / kMostBlocks + 3 & ~int64_t{3});
  const int64_t num_blocks = (rows + length - 1) / length;
  std::vector<float> sums(num_blocks * num_sums, 0.0f);
  float* const first = sums.data();
  ForRanges(num_blocks, 1, [&](int64_t block, int64_t end) {
    for (; block < end; ++block) {
      const int64_t row = block * length;
      sum(row, std::min(length, rows - row), first + block * num_sums);
    }
  });
  for (int64_t block = 0; block < num_blocks; ++block) add(first + block * num_sums);
}

}  // namespace libai
