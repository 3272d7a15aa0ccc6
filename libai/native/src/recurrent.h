// The element-wise part of one step of a recurrent layer. Included by level.cpp only.
//
// Rows of `gates` have the numbers of all gates, one gate after another, `d` numbers each.

INLINE float FastSigmoid(float x) { return 1.0f / (1.0f + Exp(-x)); }

// gates: sums for i, f, g and o, replaced by the gates. c and c_before: (rows, d). h has rows `h_row` numbers apart.
void LstmStep(float* gates, const float* c_before, float* c, float* h, int64_t h_row, int64_t rows, int64_t d) {
  for (int64_t r = 0; r < rows; ++r) {
    float *i = gates + r * 4 * d, *f = i + d, *g = f + d, *o = g + d, *to = h + r * h_row;
    const float* before = c_before + r * d;
    float* now = c + r * d;
    SIMD for (int64_t k = 0; k < d; ++k) {
      const float in = FastSigmoid(i[k]), keep = FastSigmoid(f[k]), value = Tanh(g[k]), out = FastSigmoid(o[k]);
      const float cell = Fma(keep, before[k], in * value);
      i[k] = in;
      f[k] = keep;
      g[k] = value;
      o[k] = out;
      now[k] = cell;
      to[k] = out * Tanh(cell);
    }
  }
}

// dh: the gradient of h from the next step, and dc of c; dc is replaced by that of c_before. dy: the gradient of h as output.
void LstmStepGrad(const float* gates, const float* c_before, const float* c, const float* dh, const float* dy, int64_t dy_row,
                  float* dc, float* dgates, int64_t rows, int64_t d) {
  for (int64_t r = 0; r < rows; ++r) {
    const float *i = gates + r * 4 * d, *f = i + d, *g = f + d, *o = g + d;
    const float *before = c_before + r * d, *now = c + r * d, *next = dh + r * d, *out = dy + r * dy_row;
    float *di = dgates + r * 4 * d, *df = di + d, *dg = df + d, *d_o = dg + d, *cell = dc + r * d;
    SIMD for (int64_t k = 0; k < d; ++k) {
      const float t = Tanh(now[k]), grad = next[k] + out[k];
      const float sum = Fma(grad * o[k], 1.0f - t * t, cell[k]);
      d_o[k] = grad * t * (o[k] * (1.0f - o[k]));
      di[k] = sum * g[k] * (i[k] * (1.0f - i[k]));
      df[k] = sum * before[k] * (f[k] * (1.0f - f[k]));
      dg[k] = sum * i[k] * (1.0f - g[k] * g[k]);
      cell[k] = sum * f[k];
    }
  }
}

// gates: sums for r and z, and for n without the hidden part, replaced by the gates. hidden: the hidden part of n, without
// its bias, which is added to it (`bias` may be null).
void GruStep(float* gates, float* hidden, const float* bias, const float* h_before, int64_t before_row, float* h, int64_t h_row,
             int64_t rows, int64_t d) {
  for (int64_t row = 0; row < rows; ++row) {
    float *r = gates + row * 3 * d, *z = r + d, *n = z + d, *part = hidden + row * d, *to = h + row * h_row;
    const float* before = h_before + row * before_row;
    if (bias != nullptr) {
      SIMD for (int64_t k = 0; k < d; ++k) part[k] += bias[k];
    }
    SIMD for (int64_t k = 0; k < d; ++k) {
      const float reset = FastSigmoid(r[k]), keep = FastSigmoid(z[k]), value = Tanh(Fma(reset, part[k], n[k]));
      r[k] = reset;
      z[k] = keep;
      n[k] = value;
      to[k] = Fma(keep, before[k] - value, value);
    }
  }
}

// dx: gradients of the three sums; dhidden: those of the hidden parts. dh is replaced by its part that bypasses the gates.
void GruStepGrad(const float* gates, const float* hidden, const float* h_before, int64_t before_row, float* dh, const float* dy,
                 int64_t dy_row, float* dx, float* dhidden, int64_t rows, int64_t d) {
  for (int64_t row = 0; row < rows; ++row) {
    const float *r = gates + row * 3 * d, *z = r + d, *n = z + d, *part = hidden + row * d, *before = h_before + row * before_row;
    const float* out = dy + row * dy_row;
    float *dr = dx + row * 3 * d, *dz = dr + d, *dn = dz + d, *hr = dhidden + row * 3 * d, *hz = hr + d, *hn = hz + d;
    float* next = dh + row * d;
    SIMD for (int64_t k = 0; k < d; ++k) {
      const float grad = next[k] + out[k];
      const float value = grad * (1.0f - z[k]) * (1.0f - n[k] * n[k]);
      const float keep = grad * (before[k] - n[k]) * (z[k] * (1.0f - z[k]));
      const float reset = value * part[k] * (r[k] * (1.0f - r[k]));
      dr[k] = reset;
      dz[k] = keep;
      dn[k] = value;
      hr[k] = reset;
      hz[k] = keep;
      hn[k] = value * r[k];
      next[k] = grad * z[k];
    }
  }
}

void RnnStep(float* gates, float* h, int64_t h_row, bool is_relu, int64_t rows, int64_t d) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* sum = gates + r * d;
    float* to = h + r * h_row;
    if (is_relu) {
      SIMD for (int64_t k = 0; k < d; ++k) to[k] = sum[k] < 0.0f ? 0.0f : sum[k];
    } else {
      SIMD for (int64_t k = 0; k < d; ++k) to[k] = Tanh(sum[k]);
    }
  }
}

void RnnStepGrad(const float* h, int64_t h_row, const float* dh, const float* dy, int64_t dy_row, float* dgates, bool is_relu,
                 int64_t rows, int64_t d) {
  for (int64_t r = 0; r < rows; ++r) {
    const float *y = h + r * h_row, *next = dh + r * d, *out = dy + r * dy_row;
    float* to = dgates + r * d;
    if (is_relu) {
      SIMD for (int64_t k = 0; k < d; ++k) to[k] = y[k] > 0.0f ? next[k] + out[k] : 0.0f;
    } else {
      SIMD for (int64_t k = 0; k < d; ++k) to[k] = (next[k] + out[k]) * (1.0f - y[k] * y[k]);
    }
  }
}
