// Matrix products on several threads that give the same bits as one. The rows of the result are cut where OpenBLAS's
// own blocks end, every part is a product by one thread of OpenBLAS, and parts go to whoever is free.
#include "parallel.h"

namespace {

using Sgemm = void (*)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
                       const float* b, int ldb, float beta, float* c, int ldc);

constexpr int kRowMajor = 101, kNoTrans = 111;
constexpr int kRows = 48;                 // a multiple of the rows that each of OpenBLAS's kernels computes together
constexpr int64_t kPartWork = 2'000'000;  // some 30 us; OpenBLAS has other kernels below 1,000,000

Sgemm g_sgemm;
libai::Sharing g_sharing;

struct Product {
  int trans_a, trans_b, m, n, k;
  float alpha;
  const float* a;
  int lda;
  const float* b;
  int ldb;
  float beta;
  float* c;
  int ldc, rows, num_parts;

  // Into as many parts as `num_threads` threads want; false where it is too small.
  bool Cut(int num_threads) {
    const int64_t most = int64_t(m) * n * k / kPartWork;
    num_parts = static_cast<int>(std::min<int64_t>({m / kRows, most, num_threads}));
    rows = num_parts < 2 ? m : m / num_parts / kRows * kRows;
    return num_parts >= 2;
  }
  void Multiply(int64_t part) const {
    const int64_t first = part == libai::kWhole ? 0 : part * rows;
    const int height = part == libai::kWhole || part == num_parts - 1 ? m - static_cast<int>(first) : rows;
    g_sgemm(kRowMajor, trans_a, trans_b, height, n, k, alpha, a + first * (trans_a == kNoTrans ? lda : 1), lda, b, ldb,
            beta, c + first * ldc, ldc);
  }
};

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// `sgemm`: OpenBLAS's, which must use one thread. Once per process, before the first product.
EXPORTED void libai_products_start(void* sgemm) { g_sgemm = reinterpret_cast<Sgemm>(sgemm); }
EXPORTED void libai_products_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                                   const float* a, int lda, const float* b, int ldb, float beta, float* c, int ldc) {
  Product product{trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, 0, 0};
  const int num_threads = libai::NumThreads();
  if (order != kRowMajor || num_threads == 1 || !product.Cut(num_threads)) {
    return g_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  }
  const libai::Part part = [](void* loop, int64_t i) { static_cast<Product*>(loop)->Multiply(i); };
  libai::RunParts(product.num_parts, double(m) * n * k, g_sharing, part, &product);
}
// For tests: the parts of a product one after another, cut as for `num_threads` threads. False for one that is not cut.
EXPORTED bool libai_products_in_parts(void* sgemm, int num_threads, int trans_a, int trans_b, int m, int n, int k,
                                      const float* a, const float* b, float beta, float* c) {
  g_sgemm = reinterpret_cast<Sgemm>(sgemm);
  const int lda = trans_a == kNoTrans ? k : m, ldb = trans_b == kNoTrans ? n : k;
  Product product{trans_a, trans_b, m, n, k, 1.0f, a, lda, b, ldb, beta, c, n, 0, 0};
  if (!product.Cut(num_threads)) return false;
  for (int part = 0; part < product.num_parts; ++part) product.Multiply(part);
  return true;
}
