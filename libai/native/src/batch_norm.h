// Sums and loops of batch norm, over `n` numbers of one channel or over `rows` rows of `d` numbers of several channels.
// Included by level.cpp only.

// The sum of (x - mean)^2. As in SumAll, 4096 numbers at a time are added in float32, and their sums in double.
double SumSquares(const float* x, float mean, int64_t n) {
  double total = 0.0;
  for (int64_t begin = 0; begin < n; begin += 4096) {
    const int64_t end = begin + 4096 < n ? begin + 4096 : n;
    float s = 0.0f;
#pragma omp simd reduction(+ : s)
    for (int64_t i = begin; i < end; ++i) s += (x[i] - mean) * (x[i] - mean);
    total += s;
  }
  return total;
}

// The sum of dy (x - mean)
double SumProducts(const float* dy, const float* x, float mean, int64_t n) {
  double total = 0.0;
  for (int64_t begin = 0; begin < n; begin += 4096) {
    const int64_t end = begin + 4096 < n ? begin + 4096 : n;
    float s = 0.0f;
#pragma omp simd reduction(+ : s)
    for (int64_t i = begin; i < end; ++i) s += dy[i] * (x[i] - mean);
    total += s;
  }
  return total;
}

// y (d) += the sum over rows of dy (x - mean), or of (x - mean)^2 if dy is null
void AddProducts(const float* dy, const float* x, const float* mean, float* y, int64_t rows, int64_t d) {
  for (int64_t r = 0; r < rows; ++r, x += d) {
    if (dy == nullptr) {
      SIMD for (int64_t i = 0; i < d; ++i) y[i] += (x[i] - mean[i]) * (x[i] - mean[i]);
    } else {
      SIMD for (int64_t i = 0; i < d; ++i) y[i] += dy[i] * (x[i] - mean[i]);
      dy += d;
    }
  }
}

// y = (x - mean) scale + shift. `step` is 0 if all numbers are of one channel, or 1 if each number has its own mean,
// scale and shift.
void Affine(const float* x, const float* mean, const float* scale, const float* shift, int step, float* y, int64_t n) {
  if (step == 0) {
    const float m = mean[0], k = scale[0], b = shift[0];
    SIMD for (int64_t i = 0; i < n; ++i) y[i] = Fma(x[i] - m, k, b);
  } else {
    SIMD for (int64_t i = 0; i < n; ++i) y[i] = Fma(x[i] - mean[i], scale[i], shift[i]);
  }
}

// dx = dy a + (x - mean) b + c, with `step` as in Affine
void AffineGrad(const float* dy, const float* x, const float* mean, const float* a, const float* b, const float* c, int step,
                float* dx, int64_t n) {
  if (step == 0) {
    const float m = mean[0], p = a[0], q = b[0], s = c[0];
    SIMD for (int64_t i = 0; i < n; ++i) dx[i] = Fma(dy[i], p, Fma(x[i] - m, q, s));
  } else {
    SIMD for (int64_t i = 0; i < n; ++i) dx[i] = Fma(dy[i], a[i], Fma(x[i] - mean[i], b[i], c[i]));
  }
}
