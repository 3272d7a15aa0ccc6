// Sums. Included by level.cpp only.

// y (d) += the sum of the rows of x
void AddRows(const float* x, float* y, int64_t rows, int64_t d) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const float *a = x + r * d, *b = a + d, *c = b + d, *e = c + d;
    SIMD for (int64_t i = 0; i < d; ++i) y[i] += (a[i] + b[i]) + (c[i] + e[i]);
  }
  for (; r < rows; ++r) {
    const float* a = x + r * d;
    SIMD for (int64_t i = 0; i < d; ++i) y[i] += a[i];
  }
}

double SumAll(const float* x, int64_t n) {
  double total = 0.0;
  for (int64_t begin = 0; begin < n; begin += 4096) {  // 4096 numbers at a time in float32, in 4 to 16 lanes
    const int64_t end = begin + 4096 < n ? begin + 4096 : n;
    float s = 0.0f;
#pragma omp simd reduction(+ : s)
    for (int64_t i = begin; i < end; ++i) s += x[i];
    total += s;
  }
  return total;
}

double SumAbs(const float* x, int64_t n) {
  double total = 0.0;
  for (int64_t begin = 0; begin < n; begin += 4096) {
    const int64_t end = begin + 4096 < n ? begin + 4096 : n;
    float s = 0.0f;
#pragma omp simd reduction(+ : s)
    for (int64_t i = begin; i < end; ++i) s += Abs(x[i]);
    total += s;
  }
  return total;
}

// Returns NaN if any number is NaN. Read as integers, the bits of absolute values have the same order as the values,
// and NaN is above infinity.
float MaxAbs(const float* x, int64_t n) {
  int32_t top = 0;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; ++i) {
    const int32_t bits = BitsOf(x[i]) & 0x7fffffff;
    top = bits > top ? bits : top;
  }
  return FromBits(top);
}
