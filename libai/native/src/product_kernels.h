// Matrix products, computed by our own loops or by OpenBLAS through OneFlow's pointer to it. Every number of a result
// is a sum over k in a fixed order, regardless of the thread and of the other numbers that are computed with it.
#pragma once
#include "conv_kernels.h"

namespace libai {

using Sgemm = void (*)(int order, int transposes_a, int transposes_b, int m, int n, int k, float alpha, const float* a, int lda,
                       const float* b, int ldb, float beta, float* c, int ldc);
inline Sgemm* g_sgemm = nullptr;  // OneFlow's pointer; null: OneFlow keeps its own kernels
inline bool g_sgemm_is_narrow = false;  // true if it lacks AVX-512, which our loops use

// c (m, n) = alpha op(a) op(b) + bias + addend, for contiguous matrices. `bias` (n,) is added to each row. `bias` and
// `addend` (m, n) may be null. The bits are those of separate operations, but each block of c is finished in the cache.
struct Product {
  bool transposes_a, transposes_b;
  float alpha;
  const float *bias, *addend;
  int64_t m, n, k;

  double Work() const { return static_cast<double>(m) * n * k; }
  // True if our loops are faster: at least as wide as an AVX2 vector, and not so large that OpenBLAS is as fast.
  bool IsOurs() const {
    const double most = g_maths == &kMathsAvx2 ? (transposes_a ? 2e6 : 1e9) : g_maths == &kMathsAvx512 && !transposes_a ? 1e9 : 5e7;
    return m >= 4 && n >= kNarrow / 2 && Work() >= 1e3 && (Work() < most || g_sgemm_is_narrow);
  }
  void operator()(const float* a, const float* b, float* c) const {
    if (m * n == 0) return;
    if (IsOfFewRows()) {
      MultiplyFewRows(a, b, c);
    } else if (!IsOurs()) {
      (*g_sgemm)(101, transposes_a ? 112 : 111, transposes_b ? 112 : 111, m, n, k, 1.0f, a, std::max<int64_t>(1, transposes_a ? m : k),
                 b, std::max<int64_t>(1, transposes_b ? k : n), 0.0f, c, n);
      if (HasMore()) ForRows(m, n, kLightGrain, [&](int64_t row, int64_t end) { Finish(row, end, 0, n, c); });
    } else {
      MultiplyTiles(a, b, c);
    }
  }

  // Sizes of the blocks: `terms` rows of a panel of b (`width` columns) stay in the L1 cache while they are multiplied by rows of
  // a. `in_l2` numbers of these rows, of `chunk` blocks of terms, stay in the L2 cache. Tiles and panels are those of tiles.h.
  struct Block {
    int64_t tile_rows, width, terms, chunk, in_l2;
  };
  static Block BlockOf() {
    if (g_maths == &kMathsAvx512) return {8, 32, 256, 1, 65536};
    return g_maths == &kMathsAvx2 ? Block{6, 16, 384, 4, 73728} : Block{4, 8, 384, 4, 73728};
  }
  static Block BlockOf(int64_t n) {  // the loops for AVX-512 need 16 columns
    return n < kNarrow && g_maths == &kMathsAvx512 ? Block{6, 16, 384, 4, 73728} : BlockOf();
  }

 private:
  static constexpr int64_t kFewRows = 8;
  static constexpr int64_t kRowsWorthPacking = 256;
  static constexpr int64_t kNarrow = 16;  // numbers in an AVX-512 vector

  bool HasMore() const { return alpha != 1.0f || bias != nullptr || addend != nullptr; }
  void Finish(int64_t row, int64_t end, int64_t first, int64_t width, float* c) const {
    for (int64_t i = row * n + first; row < end; ++row, i += n) {
      if (alpha != 1.0f) g_maths->MulLine(c + i, 1, &alpha, 0, c + i, width);
      if (bias != nullptr) g_maths->AddLine(c + i, 1, bias + first, 1, c + i, width);
      if (addend != nullptr) g_maths->AddLine(c + i, 1, addend + i, 1, c + i, width);
    }
  }

  int64_t RowsOfPart() const { return RoundUp(static_cast<int64_t>(kPartWork * m / Work()) + 1, BlockOf().tile_rows); }

  // For text generation, with one row per sequence: b is read only once, so packing it does not pay.
  bool IsOfFewRows() const { return m <= kFewRows && transposes_b && !transposes_a && n >= kFewRows && Work() >= 3e4; }

  // Multiplies all rows of a by a block of b's rows while the block is in the cache.
  void MultiplyFewRows(const float* a, const float* b, float* c) const {
    const int64_t length = std::max<int64_t>(1, kLightGrain / k);
    ForRanges(n, length, [&](int64_t first, int64_t end) {
      for (; first < end; first += length) {
        const int64_t count = std::min(length, end - first);
        g_maths->DotRows(a, m, b + first * k, count, k, 1.0f, c + first, n);
        if (HasMore()) Finish(0, m, first, count, c);
      }
    }, Work());
  }
  void MultiplyTiles(const float* a, const float* b, float* c) const {
    const Maths& maths = n < kNarrow && g_maths == &kMathsAvx512 ? kMathsAvx2 : *g_maths;
    const Block block = BlockOf();
    const int64_t num_blocks = (k + block.terms - 1) / block.terms, block_terms = (k + num_blocks - 1) / num_blocks;
    ProductRun run{a, b, c, transposes_a ? 1 : k, transposes_a ? m : 1, n, 1, n, 0, 0, 0, block_terms, n};
    if (transposes_b || m >= kRowsWorthPacking) {
      float* const packed = ScratchFor(0, n * k);
      const int64_t num_panels = std::max<int64_t>(1, (n + block.width / 2 - 1) / block.width);
      ForRanges(num_panels, std::max<int64_t>(1, kLightGrain / (k * block.width)), [&](int64_t panel, int64_t end) {
        Pack(b, panel * block.width, end == num_panels ? n : end * block.width, block.width, packed);
      }, kPackingWork * static_cast<double>(n * k));
      run.b = packed;
      run.b_row = 0;
      run.b_column = k;
    }
    ForRanges(m, RowsOfPart(), [&](int64_t row, int64_t end) { MultiplyRange(run, maths, row, end); }, Work());
  }
  // Packs columns `begin` ... `end` - 1 of b panel by panel, in the order in which `Multiply` reads them.
  void Pack(const float* b, int64_t begin, int64_t end, int64_t width_of_panel, float* to) const {
    constexpr int64_t kAtOnce = 128;  // rows whose next columns are still in the cache for the next panel
    for (int64_t row = 0; row < k; row += kAtOnce) {
      const int64_t rows = std::min(kAtOnce, k - row);
      for (int64_t first = begin, width; first < end; first += width) {
        width = end - first > width_of_panel + width_of_panel / 2 ? width_of_panel : end - first;
        float* const at = to + first * k + row * width;
        if (transposes_b) {
          g_maths->Transpose(b + first * k + row, k, at, width, width, rows);
        } else {
          g_maths->CopyRows(b + row * n + first, n, at, rows, width);
        }
      }
    }
  }
  void MultiplyRange(ProductRun run, const Maths& maths, int64_t begin, int64_t end) const {
    const Block block = BlockOf();
    const float* const a = run.a;
    float* const c = run.c;
    const int64_t chunk = run.block_terms * block.chunk, terms = std::min(chunk, k);
    const int64_t rows = std::max<int64_t>(1, block.in_l2 / terms / block.tile_rows) * block.tile_rows;
    for (int64_t row = begin; row < end; row += rows) {
      run.rows = std::min(rows, end - row);
      run.c = c + row * n;
      for (run.first_term = 0; run.first_term < k; run.first_term += chunk) {
        run.terms = std::min(chunk, k - run.first_term);
        run.a = a + row * run.a_row + run.first_term * run.a_term;
        maths.Multiply(&run);
      }
      if (HasMore()) Finish(row, row + run.rows, 0, n, c);
    }
  }
};

inline Product ReadProduct(KernelComputeContext* c, bool transposes_a, bool transposes_b) {
  return {transposes_a, transposes_b, static_cast<float>(c->Attr<double>("alpha")), nullptr, MaybeIn(c, "_add_to_output"), 0, 0, 0};
}

// The last two axes are matrices; the axes before them are broadcast.
inline void RunMatmul(KernelComputeContext* c) {
  const auto as = c->Tensor4ArgNameAndIndex("a", 0)->shape_view(), bs = c->Tensor4ArgNameAndIndex("b", 0)->shape_view();
  const auto cs = c->Tensor4ArgNameAndIndex("out", 0)->shape_view();
  Product p = ReadProduct(c, c->Attr<bool>("transpose_a"), c->Attr<bool>("transpose_b"));
  const int64_t axes = cs.NumAxes() - 2, a_axes = as.NumAxes() - 2, b_axes = bs.NumAxes() - 2;
  p.m = cs.At(axes);
  p.n = cs.At(axes + 1);
  p.k = as.At(p.transposes_a ? a_axes : a_axes + 1);
  const float *a = In(c, "a"), *b = In(c, "b");
  float* out = Out(c, "out");
  int64_t count = 1;
  for (int64_t i = 0; i < axes; ++i) count *= cs.At(i);
  if (b_axes == 0 && a_axes == axes && !p.transposes_a) {  // one product with the rows of all matrices
    p.m *= count;
    return p(a, b, out);
  }
  const auto multiply = [&](int64_t i) {
    int64_t rest = i, a_at = 0, b_at = 0, a_step = p.m * p.k, b_step = p.k * p.n;
    for (int64_t axis = 0; axis < axes; ++axis) {  // from last to first
      const int64_t size = cs.At(axes - 1 - axis), at = rest % size;
      const int64_t a_size = axis < a_axes ? as.At(a_axes - 1 - axis) : 1, b_size = axis < b_axes ? bs.At(b_axes - 1 - axis) : 1;
      a_at += a_size == 1 ? 0 : at * a_step;
      b_at += b_size == 1 ? 0 : at * b_step;
      a_step *= a_size;
      b_step *= b_size;
      rest /= size;
    }
    Product one = p;
    if (p.addend != nullptr) one.addend += i * p.m * p.n;
    one(a + a_at, b + b_at, out + i * p.m * p.n);
  };
  const int64_t worth_a_part = static_cast<int64_t>(kPartWork / std::max(1.0, p.Work())) + 1;
  ForRanges(count, worth_a_part, [&](int64_t i, int64_t end) {
    for (; i < end; ++i) multiply(i);
  }, count * p.Work());
}
// The gradient of a matrix b by which all rows of a were multiplied.
inline void RunMatmulGradB(KernelComputeContext* c) {
  Product p = ReadProduct(c, true, false);
  p.m = LastAxis(c, "a");
  p.n = LastAxis(c, "b");
  p.k = p.m == 0 ? 0 : Size(c, "a") / p.m;
  p(In(c, "a"), In(c, "b"), Out(c, "out"));
}

// A linear layer in one operation: in compiled jobs, libai fuses a product with the addition of its bias.
inline void RunMatmulBias(KernelComputeContext* c) {
  Product p{false, true, 1.0f, In(c, "bias"), MaybeIn(c, "_add_to_output"), 0, Size(c, "bias"), LastAxis(c, "x")};
  p.m = p.n == 0 ? 0 : Size(c, "out") / p.n;
  p(In(c, "x"), In(c, "weight"), Out(c, "out"));
}

inline bool HasSgemm(const KernelRegContext&) { return g_sgemm != nullptr; }

inline void RegisterProducts() {
  for (const char* op : {"matmul", "batch_matmul", "broadcast_matmul"}) Register(op, "a", &RunMatmul, &HasSgemm);
  Register("broadcast_matmul_grad_b", "a", &RunMatmulGradB, &HasSgemm);
  Register("fused_matmul_bias", "x", &RunMatmulBias, &HasSgemm);
}

}  // namespace libai
