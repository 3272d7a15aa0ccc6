// Norms and softmax over rows. Included by level.cpp only.

void LayerNorm(const float* x, const float* gamma, const float* beta, float* y, float* mean, float* inv, int64_t rows,
               int64_t d, double eps) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* in = x + r * d;
    float* out = y + r * d;
    float s = 0.0f, q = 0.0f;
#pragma omp simd reduction(+ : s)
    for (int64_t i = 0; i < d; ++i) s += in[i];
    const float mu = s / d;
#pragma omp simd reduction(+ : q)
    for (int64_t i = 0; i < d; ++i) q += (in[i] - mu) * (in[i] - mu);
    const float k = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(q) / d + eps));
    mean[r] = mu;
    inv[r] = k;
    if (gamma != nullptr && beta != nullptr) {
      SIMD for (int64_t i = 0; i < d; ++i) out[i] = Fma((in[i] - mu) * k, gamma[i], beta[i]);
    } else if (gamma != nullptr) {
      SIMD for (int64_t i = 0; i < d; ++i) out[i] = (in[i] - mu) * k * gamma[i];
    } else if (beta != nullptr) {
      SIMD for (int64_t i = 0; i < d; ++i) out[i] = Fma(in[i] - mu, k, beta[i]);
    } else {
      SIMD for (int64_t i = 0; i < d; ++i) out[i] = (in[i] - mu) * k;
    }
  }
}

// dx may have the memory of dy or of `add`, which is null if there is nothing to add. gamma may be null.
void LayerNormGrad(const float* dy, const float* x, const float* mean, const float* inv, const float* gamma,
                   const float* add, float* dx, int64_t rows, int64_t d) {
  for (int64_t r = 0; r < rows; ++r) {
    const float *g = dy + r * d, *in = x + r * d;
    float* out = dx + r * d;
    const float mu = mean[r], k = inv[r];
    float s = 0.0f, t = 0.0f;
    if (gamma != nullptr) {
#pragma omp simd reduction(+ : s, t)
      for (int64_t i = 0; i < d; ++i) {
        const float v = g[i] * gamma[i];
        s += v;
        t += v * (in[i] - mu);
      }
    } else {
#pragma omp simd reduction(+ : s, t)
      for (int64_t i = 0; i < d; ++i) {
        s += g[i];
        t += g[i] * (in[i] - mu);
      }
    }
    s /= d;
    t = t * k * k / d;
    if (gamma != nullptr) {
      SIMD for (int64_t i = 0; i < d; ++i) {
        const float v = k * (g[i] * gamma[i] - s - (in[i] - mu) * t);
        out[i] = add == nullptr ? v : v + add[r * d + i];
      }
    } else {
      SIMD for (int64_t i = 0; i < d; ++i) {
        const float v = k * (g[i] - s - (in[i] - mu) * t);
        out[i] = add == nullptr ? v : v + add[r * d + i];
      }
    }
  }
}

// Adds to dgamma and dbeta, four rows at a time. Either may be null.
void LayerNormParamGrad(const float* dy, const float* x, const float* mean, const float* inv, float* dgamma,
                        float* dbeta, int64_t rows, int64_t d) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const float *g0 = dy + r * d, *g1 = g0 + d, *g2 = g1 + d, *g3 = g2 + d;
    const float *x0 = x + r * d, *x1 = x0 + d, *x2 = x1 + d, *x3 = x2 + d;
    const float m0 = mean[r], m1 = mean[r + 1], m2 = mean[r + 2], m3 = mean[r + 3];
    const float k0 = inv[r], k1 = inv[r + 1], k2 = inv[r + 2], k3 = inv[r + 3];
    if (dgamma != nullptr) {
      SIMD for (int64_t i = 0; i < d; ++i)
        dgamma[i] += (g0[i] * ((x0[i] - m0) * k0) + g1[i] * ((x1[i] - m1) * k1))
                     + (g2[i] * ((x2[i] - m2) * k2) + g3[i] * ((x3[i] - m3) * k3));
    }
    if (dbeta != nullptr) {
      SIMD for (int64_t i = 0; i < d; ++i) dbeta[i] += (g0[i] + g1[i]) + (g2[i] + g3[i]);
    }
  }
  for (; r < rows; ++r) {
    const float *g = dy + r * d, *in = x + r * d;
    const float mu = mean[r], k = inv[r];
    if (dgamma != nullptr) {
      SIMD for (int64_t i = 0; i < d; ++i) dgamma[i] += g[i] * ((in[i] - mu) * k);
    }
    if (dbeta != nullptr) {
      SIMD for (int64_t i = 0; i < d; ++i) dbeta[i] += g[i];
    }
  }
}

INLINE float Largest(const float* x, int64_t n) {
  float top = x[0];
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

// Short rows are transposed and computed sixteen at a time, with one number of each row in a vector.
constexpr int64_t kShort = 32, kTogether = 16;

template<bool is_log>
INLINE void SoftmaxOfShortRows(const float* x, float* y, int64_t rows, int64_t d) {
  float numbers[kShort * kTogether] = {};
  for (int64_t r = 0; r < rows; r += kTogether) {
    const int64_t count = rows - r < kTogether ? rows - r : kTogether;
    Transpose(x + r * d, d, numbers, kTogether, count, d);
    float top[kTogether], sum[kTogether] = {};
    SIMD for (int64_t i = 0; i < kTogether; ++i) top[i] = numbers[i];
    for (int64_t c = 1; c < d; ++c) {
      const float* in = numbers + c * kTogether;
      SIMD for (int64_t i = 0; i < kTogether; ++i) top[i] = in[i] > top[i] ? in[i] : top[i];
    }
    for (int64_t c = 0; c < d; ++c) {
      float* in = numbers + c * kTogether;
      SIMD for (int64_t i = 0; i < kTogether; ++i) {
        const float z = in[i] - top[i];
        float e = Exp(z);
        e = z < -87.0f ? 0.0f : e;  // masked scores give exactly 0
        sum[i] += e;
        in[i] = is_log ? z : e;
      }
    }
    for (int64_t i = 0; i < kTogether; ++i) sum[i] = is_log ? __builtin_logf(sum[i]) : 1.0f / sum[i];
    for (int64_t c = 0; c < d; ++c) {
      float* in = numbers + c * kTogether;
      SIMD for (int64_t i = 0; i < kTogether; ++i) in[i] = is_log ? in[i] - sum[i] : in[i] * sum[i];
    }
    Transpose(numbers, kTogether, y + r * d, d, d, count);
  }
}

void Softmax(const float* x, float* y, int64_t rows, int64_t d) {
  if (d < kShort) return SoftmaxOfShortRows<false>(x, y, rows, d);
  for (int64_t r = 0; r < rows; ++r) {
    const float* in = x + r * d;
    float* out = y + r * d;
    const float top = Largest(in, d);
    float s = 0.0f;
#pragma omp simd reduction(+ : s)
    for (int64_t i = 0; i < d; ++i) {
      const float z = in[i] - top;
      float e = Exp(z);
      e = z < -87.0f ? 0.0f : e;  // masked scores give exactly 0
      out[i] = e;
      s += e;
    }
    const float k = 1.0f / s;
    SIMD for (int64_t i = 0; i < d; ++i) out[i] *= k;
  }
}

void SoftmaxGrad(const float* y, const float* dy, float* dx, int64_t rows, int64_t d) {
  for (int64_t r = 0; r < rows; ++r) {
    const float *p = y + r * d, *g = dy + r * d;
    float* out = dx + r * d;
    float s = 0.0f;
#pragma omp simd reduction(+ : s)
    for (int64_t i = 0; i < d; ++i) s += p[i] * g[i];
    SIMD for (int64_t i = 0; i < d; ++i) out[i] = p[i] * (g[i] - s);
  }
}

void LogSoftmax(const float* x, float* y, int64_t rows, int64_t d) {
  if (d < kShort) return SoftmaxOfShortRows<true>(x, y, rows, d);
  for (int64_t r = 0; r < rows; ++r) {
    const float* in = x + r * d;
    float* out = y + r * d;
    const float top = Largest(in, d);
    float s = 0.0f;
#pragma omp simd reduction(+ : s)
    for (int64_t i = 0; i < d; ++i) {
      const float z = in[i] - top;
      s += z < -87.0f ? 0.0f : Exp(z);
    }
    const float log = __builtin_logf(s);
    SIMD for (int64_t i = 0; i < d; ++i) out[i] = (in[i] - top) - log;
  }
}

void LogSoftmaxGrad(const float* y, const float* dy, float* dx, int64_t rows, int64_t d) {
  for (int64_t r = 0; r < rows; ++r) {
    const float *p = y + r * d, *g = dy + r * d;
    float* out = dx + r * d;
    float s = 0.0f;
#pragma omp simd reduction(+ : s)
    for (int64_t i = 0; i < d; ++i) s += g[i];
    SIMD for (int64_t i = 0; i < d; ++i) {
      const float e = p[i] < -87.0f ? 0.0f : Exp(p[i]);
      out[i] = g[i] - e * s;
    }
  }
}
