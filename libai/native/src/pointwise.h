// Element-wise loops. An output may have the same memory as an input. Included by level.cpp only.

INLINE float GeluOf(float v) {
  const float distance = Abs(v), a = distance < 13.0f ? distance : 13.0f;
  const float e = distance < 13.0f ? Bell(a) : 0.0f;  // beyond 13, the tail is smaller than every normal number
  const float tail = e * ScaledTail(a);
  return v * (v > 0.0f ? 1.0f - tail : tail);
}
INLINE float GeluDerivative(float v) {
  v = v > 13.0f ? 13.0f : v;  // beyond +-13 the derivative is 1 or 0, and the formula fails for inf
  v = v < -13.0f ? -13.0f : v;
  const float a = Abs(v), e = Bell(a), tail = e * ScaledTail(a);
  return Fma(v, e * 0.3989422804014327f, v > 0.0f ? 1.0f - tail : tail);
}

// x sigmoid(2 z) = x (1 + tanh(z)) / 2 with z = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks & Gimpel 2016)
constexpr float kTanhLinear = 1.5957691216057308f, kTanhCubic = 0.07135481282f;
INLINE float TanhArgument(float v) { return v * Fma(kTanhCubic * v, v, kTanhLinear); }
INLINE float TanhGeluDerivative(float v) {
  v = v > 20.0f ? 20.0f : v;  // beyond +-20 the derivative is 1 or 0
  v = v < -20.0f ? -20.0f : v;
  return GateDerivative(v, TanhArgument(v), Fma(3.0f * kTanhCubic * v, v, kTanhLinear));
}
INLINE float SiluDerivative(float v, float k) {
  v = v > 120.0f ? 120.0f : v;
  v = v < -120.0f ? -120.0f : v;
  return GateDerivative(v, k * v, k);
}

// y = f(x) and dx = dy f'(x) with two parameters a and b; EXPRESSION and DERIVATIVE read x as v
#define CURVE(NAME, EXPRESSION, DERIVATIVE)                                                        \
  void NAME(const float* x, float* y, int64_t n, float a, float b) {                               \
    SIMD for (int64_t i = 0; i < n; ++i) {                                                         \
      const float v = x[i];                                                                        \
      y[i] = (EXPRESSION);                                                                         \
    }                                                                                              \
  }                                                                                                \
  void NAME##Grad(const float* x, const float* dy, float* dx, int64_t n, float a, float b) {       \
    SIMD for (int64_t i = 0; i < n; ++i) {                                                         \
      const float v = x[i];                                                                        \
      dx[i] = dy[i] * (DERIVATIVE);                                                                \
    }                                                                                              \
  }

INLINE float Negative(float v) { return v > 0.0f ? 0.0f : v; }
// log(1 + exp(a v)) / a, and v where a v > b
INLINE float SoftplusOf(float v, float a, float b) {
  const float z = a * v, log = (z > 0.0f ? z : 0.0f) + Log1p(ExpFull(-Abs(z)));
  return z > b ? v : log / a;
}
// tanh(log(1 + e)) = (e^2 + 2 e) / (e^2 + 2 e + 2) with e = exp(v); beyond 20 it is 1
INLINE float MishGate(float v) {
  const float e = ExpFull(v > 20.0f ? 20.0f : v), n = e * (e + 2.0f);
  return n / (n + 2.0f);
}
INLINE float MishDerivative(float v) {
  v = v > 20.0f ? 20.0f : v;
  v = v < -110.0f ? -110.0f : v;  // below, exp(v) is 0
  const float e = ExpFull(v), d = Fma(e, e + 2.0f, 2.0f);
  return Fma(4.0f * v * e / d, (1.0f + e) / d, MishGate(v));
}
// min(max(v + 3, 0), 6) / 6; NaN stays NaN
INLINE float HardGate(float v) {
  const float z = v + 3.0f, low = z < 0.0f ? 0.0f : z;
  return (low > 6.0f ? 6.0f : low) * (1.0f / 6.0f);
}
constexpr float kSeluScale = 1.0507009873554805f, kSeluAlpha = 1.6732632423543772f;

CURVE(Gelu, GeluOf(v), GeluDerivative(v))
CURVE(FastGelu, v * Sigmoid(TanhArgument(v)), TanhGeluDerivative(v))
CURVE(QuickGelu, v * Sigmoid(1.702f * v), SiluDerivative(v, 1.702f))
CURVE(Silu, v * Sigmoid(v), SiluDerivative(v, 1.0f))
CURVE(SigmoidAll, Sigmoid(v), v * (1.0f - v))  // for the derivative, v is the sigmoid of the input
CURVE(TanhAll, Tanh(v), 1.0f - Tanh(v) * Tanh(v))
CURVE(ExpAll, ExpFull(v), ExpFull(v))
CURVE(ErfAll, Erf(v), 1.1283791670955126f * ExpFull(-v * v))
CURVE(SqrtAll, Sqrt(v), 0.5f / Sqrt(v))
CURVE(Rsqrt, 1.0f / Sqrt(v), -0.5f / (v * Sqrt(v)))
CURVE(Square, v * v, 2.0f * v)
CURVE(Cube, v * v * v, 3.0f * (v * v))
CURVE(Softplus, SoftplusOf(v, a, b), a * v > b ? 1.0f : Sigmoid(a * v))
CURVE(Elu, v > 0.0f ? v : a * Expm1(Negative(v)), v > 0.0f ? 1.0f : a * ExpFull(Negative(v)))
CURVE(Celu, v > 0.0f ? v : a * Expm1(Negative(v) / a), v > 0.0f ? 1.0f : ExpFull(Negative(v) / a))
CURVE(Selu, kSeluScale * (v > 0.0f ? v : kSeluAlpha * Expm1(Negative(v))),
      kSeluScale * (v > 0.0f ? 1.0f : kSeluAlpha * ExpFull(Negative(v))))
CURVE(Mish, v * MishGate(v), MishDerivative(v))
CURVE(LeakyRelu, v > 0.0f ? v : a * v, v > 0.0f ? 1.0f : a)
CURVE(LogSigmoid, Negative(v) - Log1p(ExpFull(-Abs(v))), Sigmoid(-v))
CURVE(Hardswish, v * HardGate(v), v <= -3.0f ? 0.0f : v >= 3.0f ? 1.0f : v * (1.0f / 3.0f) + 0.5f)
CURVE(Hardsigmoid, HardGate(v), Abs(v) >= 3.0f ? 0.0f : Fma(v, 0.0f, 1.0f / 6.0f))  // NaN stays NaN
#undef CURVE

// A step is 1, or 0 to repeat the first number.
void Where(const bool* condition, int c_step, const float* x, int x_step, const float* y, int y_step, float* z, int64_t n) {
  const uint8_t* is_x = reinterpret_cast<const uint8_t*>(condition);
  if (c_step != 0 && x_step != 0 && y_step != 0) {
    SIMD for (int64_t i = 0; i < n; ++i) z[i] = is_x[i] != 0 ? x[i] : y[i];
  } else {
    for (int64_t i = 0; i < n; ++i) z[i] = is_x[i * c_step] != 0 ? x[i * x_step] : y[i * y_step];
  }
}

void MaskedFill(const bool* mask, const float* x, float value, float* y, int64_t n) {
  const uint8_t* is_filled = reinterpret_cast<const uint8_t*>(mask);
  SIMD for (int64_t i = 0; i < n; ++i) y[i] = is_filled[i] != 0 ? value : x[i];
}

// z = x op y. A step is 1, or 0 to repeat the first number.
#define BINARY(NAME, OP)                                                                               \
  void NAME(const float* x, int x_step, const float* y, int y_step, float* z, int64_t n) {             \
    if (x_step != 0 && y_step != 0) {                                                                  \
      SIMD for (int64_t i = 0; i < n; ++i) z[i] = x[i] OP y[i];                                        \
    } else if (x_step != 0) {                                                                          \
      const float v = y[0];                                                                            \
      SIMD for (int64_t i = 0; i < n; ++i) z[i] = x[i] OP v;                                           \
    } else if (y_step != 0) {                                                                          \
      const float v = x[0];                                                                            \
      SIMD for (int64_t i = 0; i < n; ++i) z[i] = v OP y[i];                                           \
    } else {                                                                                           \
      const float same = x[0] OP y[0];                                                                 \
      SIMD for (int64_t i = 0; i < n; ++i) z[i] = same;                                                \
    }                                                                                                  \
  }
BINARY(AddLine, +)
BINARY(SubLine, -)
BINARY(MulLine, *)
BINARY(DivLine, /)
#undef BINARY

// Like BINARY, with boolean results.
#define COMPARISON(NAME, OP)                                                                           \
  void NAME(const float* x, int x_step, const float* y, int y_step, bool* truth, int64_t n) {          \
    uint8_t* z = reinterpret_cast<uint8_t*>(truth);                                                    \
    if (x_step != 0 && y_step != 0) {                                                                  \
      SIMD for (int64_t i = 0; i < n; ++i) z[i] = x[i] OP y[i];                                        \
    } else if (x_step != 0) {                                                                          \
      const float v = y[0];                                                                            \
      SIMD for (int64_t i = 0; i < n; ++i) z[i] = x[i] OP v;                                           \
    } else if (y_step != 0) {                                                                          \
      const float v = x[0];                                                                            \
      SIMD for (int64_t i = 0; i < n; ++i) z[i] = v OP y[i];                                           \
    } else {                                                                                           \
      const uint8_t same = x[0] OP y[0];                                                               \
      SIMD for (int64_t i = 0; i < n; ++i) z[i] = same;                                                \
    }                                                                                                  \
  }
COMPARISON(EqualLine, ==)
COMPARISON(NotEqualLine, !=)
COMPARISON(LessLine, <)
COMPARISON(LessEqualLine, <=)
COMPARISON(GreaterLine, >)
COMPARISON(GreaterEqualLine, >=)
#undef COMPARISON

// A line of a dropout mask. An element is `scale` if row * word, as a signed 32-bit integer, is above -`shift`, else 0.
void DropLine(uint32_t row, const uint32_t* words, float shift, float scale, float* y, int64_t n) {
  SIMD for (int64_t i = 0; i < n; ++i) {
    const float x = static_cast<float>(static_cast<int32_t>(row * words[i])) + shift;
    y[i] = (x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f) * scale;
  }
}
