// Matrix products on several threads that give the same bits as one. The rows of the result are cut where OpenBLAS's
// own blocks end, every part is a product by one thread of OpenBLAS, and parts go to whoever is free.
#include <pthread.h>
#include <signal.h>
#include <xmmintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "sharing.h"

namespace {

using Sgemm = void (*)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
                       const float* b, int ldb, float beta, float* c, int ldc);
using Clock = std::chrono::steady_clock;

constexpr int kRowMajor = 101, kNoTrans = 111;
constexpr int kRows = 48;                 // a multiple of the rows that each of OpenBLAS's kernels computes together
constexpr int64_t kPartWork = 2'000'000;  // some 30 us; OpenBLAS has other kernels below 1,000,000
constexpr int kPartsPerThread = 2;
constexpr auto kSpin = std::chrono::microseconds(100);

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
  unsigned rounding;  // and what is done about denormal numbers

  // Into as many parts as `num_threads` threads want; false where it is too small.
  bool Cut(int num_threads) {
    const int64_t most = int64_t(m) * n * k / kPartWork;
    num_parts = static_cast<int>(std::min<int64_t>({m / kRows, most, kPartsPerThread * num_threads}));
    rows = num_parts < 2 ? m : m / num_parts / kRows * kRows;
    return num_parts >= 2;
  }
  void Multiply(int part) const {
    const int64_t first = int64_t(part) * rows;
    const int height = part == num_parts - 1 ? m - static_cast<int>(first) : rows;
    g_sgemm(kRowMajor, trans_a, trans_b, height, n, k, alpha, a + first * (trans_a == kNoTrans ? lda : 1), lda, b, ldb,
            beta, c + first * ldc, ldc);
  }
  void MultiplyWhole() const {
    g_sgemm(kRowMajor, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  }
  static Sgemm g_sgemm;
};
Sgemm Product::g_sgemm;

// One product at a time is shared out; whoever comes meanwhile multiplies alone.
class Team {
 public:
  explicit Team(int num_threads) : num_threads_(num_threads) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
    for (int i = 1; i < num_threads; ++i) std::thread(&Team::Help, this).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  bool TryMultiply(Product product) {
    if (!product.Cut(num_threads_) || !owner_.try_lock()) return false;
    std::lock_guard<std::mutex> owned(owner_, std::adopt_lock);
    const bool is_shared = sharing_.Choose();
    const auto start = Clock::now();
    if (is_shared) Share(product); else product.MultiplyWhole();
    const std::chrono::duration<double> seconds = Clock::now() - start;
    sharing_.Note(is_shared, seconds.count(), double(product.m) * product.n * product.k);
    ++(is_shared ? num_shared : num_alone);
    return true;
  }
  bool Prefers() const { return sharing_.Prefers(); }

  std::atomic<int64_t> num_shared{0}, num_alone{0};

 private:
  void Share(const Product& product) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      product_ = product;
      next_part_ = 0;
      ++number_;
      is_open_ = true;
    }
    for (int i = 1; i < std::min(num_threads_, product.num_parts); ++i) opened_.notify_one();
    MultiplyRest(product);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_open_ = false;
    }
    for (const auto end = Clock::now() + kSpin; num_inside_ != 0 && Clock::now() < end;) _mm_pause();
    std::unique_lock<std::mutex> lock(mutex_);
    left_.wait(lock, [this] { return num_inside_ == 0; });
  }

  void MultiplyRest(const Product& product) {
    for (int part; (part = next_part_.fetch_add(1)) < product.num_parts;) product.Multiply(part);
  }

  void Help() {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      opened_.wait(lock, [&] { return is_open_ && number_ != seen; });
      seen = number_;
      ++num_inside_;
      const Product product = product_;
      lock.unlock();
      _mm_setcsr(product.rounding);
      MultiplyRest(product);
      lock.lock();
      if (--num_inside_ == 0 && !is_open_) left_.notify_one();
    }
  }

  const int num_threads_;
  std::mutex owner_, mutex_;
  std::condition_variable opened_, left_;
  libai::Sharing sharing_;
  // under mutex_
  Product product_{};
  uint64_t number_ = 0;
  bool is_open_ = false;
  // changed under mutex_, or by who is inside
  std::atomic<int> num_inside_{0}, next_part_{0};
};

std::atomic<Team*> g_team{nullptr};  // stays to the end of the process, whose threads wait in it

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// `sgemm`: OpenBLAS's, which must use one thread. Once per process, before the first product.
EXPORTED void libai_products_start(void* sgemm, int num_threads) {
  Product::g_sgemm = reinterpret_cast<Sgemm>(sgemm);
  g_team = new Team(num_threads);
  pthread_atfork(nullptr, nullptr, [] { g_team = nullptr; });  // a forked child has none of its threads
}
EXPORTED void libai_products_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                                   const float* a, int lda, const float* b, int ldb, float beta, float* c, int ldc) {
  Team* const team = g_team;
  if (team != nullptr && order == kRowMajor
      && team->TryMultiply({trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, 0, 0, _mm_getcsr()})) {
    return;
  }
  Product::g_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
// For tests: the parts of a product one after another, cut as for `num_threads` threads. False for one that is not cut.
EXPORTED bool libai_products_in_parts(void* sgemm, int num_threads, int trans_a, int trans_b, int m, int n, int k,
                                      const float* a, const float* b, float beta, float* c) {
  Product::g_sgemm = reinterpret_cast<Sgemm>(sgemm);
  const int lda = trans_a == kNoTrans ? k : m, ldb = trans_b == kNoTrans ? n : k;
  Product product{trans_a, trans_b, m, n, k, 1.0f, a, lda, b, ldb, beta, c, n, 0, 0, 0};
  if (!product.Cut(num_threads)) return false;
  for (int part = 0; part < product.num_parts; ++part) product.Multiply(part);
  return true;
}
// Products that were large enough: how many were shared out, how many not, and whether sharing is the faster way now.
EXPORTED int64_t libai_products_shared() { return g_team.load()->num_shared; }
EXPORTED int64_t libai_products_alone() { return g_team.load()->num_alone; }
EXPORTED bool libai_products_prefers_sharing() { return g_team.load()->Prefers(); }

// For tests: which of `count` products of equal work are shared out when they take so many seconds.
EXPORTED void libai_products_simulate(const double* shared, const double* alone, int count, bool* is_shared) {
  libai::Sharing sharing;
  for (int i = 0; i < count; ++i) {
    is_shared[i] = sharing.Choose();
    sharing.Note(is_shared[i], is_shared[i] ? shared[i] : alone[i], 1.0);
  }
}
