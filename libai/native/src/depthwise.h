// Loops of convolutions in which each output channel reads one input channel. Included by level.cpp only.

// y[r, i] += weight x[r, i] for lines of `n` numbers. Lines lie `x_row` and `y_row` apart, and numbers `x_step` and
// `y_step`.
void AddShifted(const float* x, int64_t x_row, int64_t x_step, float weight, float* y, int64_t y_row, int64_t y_step,
                int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows; ++r, x += x_row, y += y_row) {
    if (x_step == 1 && y_step == 1) {
      SIMD for (int64_t i = 0; i < n; ++i) y[i] = Fma(weight, x[i], y[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) y[i * y_step] = Fma(weight, x[i * x_step], y[i * y_step]);
    }
  }
}

// The sum of x[r, i] y[r, i]; see AddShifted. The lines of y are contiguous.
double SumShifted(const float* x, int64_t x_row, int64_t x_step, const float* y, int64_t y_row, int64_t rows, int64_t n) {
  double total = 0.0;
  for (int64_t r = 0; r < rows; ++r, x += x_row, y += y_row) {
    float sum = 0.0f;
    if (x_step == 1) {
      _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < n; ++i) sum = Fma(x[i], y[i], sum);
    } else {
      for (int64_t i = 0; i < n; ++i) sum = Fma(x[i * x_step], y[i], sum);
    }
    total += sum;
  }
  return total;
}
