// Sums and loops of batch norm, over `n` numbers of one channel or `rows` of `d` numbers of many. Included by level.cpp only.

// The sum of (x - mean)^2; as in SumAll, float32 for some numbers and double for more.
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

// y (d) += the sums of a (x - mean) over rows, with a dy, or x - mean where dy is null
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

// y = (x - mean) scale + shift, with a `step` of 0 for one channel and 1 for a channel each
void Affine(const float* x, const float* mean, const float* scale, const float* shift, int step, float* y, int64_t n) {
  if (step == 0) {
    const float m = mean[0], k = scale[0], b = shift[0];
    SIMD for (int64_t i = 0; i < n; ++i) y[i] = Fma(x[i] - m, k, b);
  } else {
    SIMD for (int64_t i = 0; i < n; ++i) y[i] = Fma(x[i] - mean[i], scale[i], shift[i]);
  }
}

// dx = dy a + (x - mean) b + c, likewise
void AffineGrad(const float* dy, const float* x, const float* mean, const float* a, const float* b, const float* c, int step,
                float* dx, int64_t n) {
  if (step == 0) {
    const float m = mean[0], p = a[0], q = b[0], s = c[0];
    SIMD for (int64_t i = 0; i < n; ++i) dx[i] = Fma(dy[i], p, Fma(x[i] - m, q, s));
  } else {
    SIMD for (int64_t i = 0; i < n; ++i) dx[i] = Fma(dy[i], a[i], Fma(x[i] - mean[i], b[i], c[i]));
  }
}
