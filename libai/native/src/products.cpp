// Matrix products on several threads with the same bits as on one thread. The rows of the result are split where
// OpenBLAS's own blocks end. A single-threaded call of OpenBLAS computes each part, on the next free thread.
#include <cmath>
#include <cstring>
#include <vector>

#include "parallel.h"

namespace {

using Sgemm = void (*)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
                       const float* b, int ldb, float beta, float* c, int ldc);

constexpr int kRowMajor = 101, kNoTrans = 111;
constexpr int kRows = 48;                 // a multiple of the number of rows that any OpenBLAS kernel computes together
constexpr int64_t kPartWork = 2'000'000;  // about 30 us; below 1,000,000 OpenBLAS uses other kernels

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

  // Splits the product into at most `num_threads` parts. Returns false if it is too small to be split.
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

// Returns true if a product in parts has the bits of the whole product, with this OpenBLAS on this CPU.
bool PartsHaveTheBitsOfTheWhole() {
  constexpr int m = 300, n = 97, k = 500;
  std::vector<float> numbers(m * k), whole(m * n), parts(m * n);
  for (int i = 0; i < m * k; ++i) numbers[i] = std::sin(static_cast<float>(i));
  Product product{kNoTrans, kNoTrans, m, n, k, 1.0f, numbers.data(), k, numbers.data(), n, 0.0f, whole.data(), n, 0, 0};
  product.Multiply(libai::kWhole);
  product.c = parts.data();
  if (!product.Cut(4)) return false;
  for (int part = 0; part < product.num_parts; ++part) product.Multiply(part);
  return std::memcmp(whole.data(), parts.data(), whole.size() * sizeof(float)) == 0;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Call this once per process, before the first product. `sgemm` is OpenBLAS's function, which must use one thread.
// Returns false if products in parts would have other bits.
EXPORTED bool libai_products_start(void* sgemm) {
  g_sgemm = reinterpret_cast<Sgemm>(sgemm);
  return PartsHaveTheBitsOfTheWhole();
}
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
// For tests: computes a product in the parts for `num_threads` threads, one after another. Returns false and computes
// nothing if the product is too small to be split.
EXPORTED bool libai_products_in_parts(void* sgemm, int num_threads, int trans_a, int trans_b, int m, int n, int k,
                                      const float* a, const float* b, float beta, float* c) {
  g_sgemm = reinterpret_cast<Sgemm>(sgemm);
  const int lda = trans_a == kNoTrans ? k : m, ldb = trans_b == kNoTrans ? n : k;
  Product product{trans_a, trans_b, m, n, k, 1.0f, a, lda, b, ldb, beta, c, n, 0, 0};
  if (!product.Cut(num_threads)) return false;
  for (int part = 0; part < product.num_parts; ++part) product.Multiply(part);
  return true;
}
