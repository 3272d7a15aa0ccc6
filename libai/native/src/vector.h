// Functions of one number that compilers turn into vector instructions. Included by level.cpp only.

INLINE float Fma(float a, float b, float c) {
#ifdef __FMA__
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

INLINE float Abs(float x) { return __builtin_fabsf(x); }
INLINE float Sqrt(float x) { return __builtin_sqrtf(x); }

INLINE int32_t BitsOf(float x) {
  int32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

INLINE float FromBits(int32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

// Returns p in [0.7, 1.42] with exp(x) = p 2^n, and n in the low bits of `shifted`, for |x| below 2^21. The relative
// error is about 1e-7.
INLINE float ExpParts(float x, float* shifted) {
  *shifted = Fma(x, 1.44269504088896341f, 12582912.0f);  // adding 1.5 * 2^23 rounds to an integer
  const float n = *shifted - 12582912.0f;
  float r = Fma(n, -0.693359375f, x);
  r = Fma(n, 2.12194440e-4f, r);
  float p = 1.0f / 5040.0f;
  p = Fma(p, r, 1.0f / 720.0f);
  p = Fma(p, r, 1.0f / 120.0f);
  p = Fma(p, r, 1.0f / 24.0f);
  p = Fma(p, r, 1.0f / 6.0f);
  p = Fma(p, r, 0.5f);
  p = Fma(p, r, 1.0f);
  return Fma(p, r, 1.0f);
}

// exp(x), with x clamped to [-87, 88]. NaN stays NaN.
INLINE float Exp(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  float shifted;
  const float p = ExpParts(x, &shifted);
  return p * FromBits((BitsOf(shifted) + 127) << 23);
}

// exp(-a^2 / 2) for a in [0, 13.2], where the result is a normal number: 2^n times a minimax fit of 2^r, |r| <= 0.5.
INLINE float Bell(float a) {
  constexpr float kScale = -0.72134752044448170f;  // -1 / (2 log 2)
  const float square = a * a, shifted = Fma(square, kScale, 12582912.0f);  // see ExpParts
  const float r = Fma(square, kScale, 12582912.0f - shifted);
  float p = 1.535336116e-4f;
  p = Fma(p, r, 1.339887466e-3f);
  p = Fma(p, r, 9.618437363e-3f);
  p = Fma(p, r, 5.550332470e-2f);
  p = Fma(p, r, 2.402264791e-1f);
  p = Fma(p, r, 6.931472029e-1f);
  p = Fma(p, r, 1.0f);
  return p * FromBits((BitsOf(shifted) + 127) << 23);
}

// Phi(-a) exp(a^2 / 2) for a >= 0, with the normal distribution function Phi: a minimax fit in 1 / (1 + 0.3 a) with a
// relative error of 1.5e-7 up to a = 14.
INLINE float ScaledTail(float a) {
  const float t = 1.0f / Fma(0.3f, a, 1.0f);
  float p = 0.035674760040369805f;
  p = Fma(p, t, -0.15720297858041837f);
  p = Fma(p, t, 0.20635325450022307f);
  p = Fma(p, t, -0.053683359576086095f);
  p = Fma(p, t, 0.12856146268482638f);
  p = Fma(p, t, 0.09991353826908111f);
  p = Fma(p, t, 0.12075395086178556f);
  p = Fma(p, t, 0.11962929892463851f);
  return p * t;
}

// exp(x) for every x, with subnormal results, and with 0 and inf beyond the range of float32.
INLINE float ExpFull(float x) {
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  float shifted;
  const float p = ExpParts(x, &shifted);
  const int32_t n = BitsOf(shifted) - 0x4B400000, half = n >> 1;  // 2^n is not a normal number at the ends
  return p * FromBits((half + 127) << 23) * FromBits((n - half + 127) << 23);
}

INLINE float Sigmoid(float x) { return 1.0f / (1.0f + ExpFull(-x)); }

// The derivative of x sigmoid(z(x)): sigmoid(z) + x sigmoid(z) (1 - sigmoid(z)) dz, with the derivative `dz` of z
INLINE float GateDerivative(float x, float z, float dz) {
  const float e = ExpFull(-Abs(z)), larger = 1.0f / (1.0f + e);  // 1 - sigmoid(z) without cancellation
  const float gate = z > 0.0f ? larger : e * larger;
  return Fma(x * dz, e * larger * larger, gate);
}

// Tanh and Erf use a minimax fit in x^2 near 0, with a relative error of 1e-7, and the exponential elsewhere.
INLINE float Tanh(float x) {
  const float z = x * x, a = Abs(x);
  float p = -0.005468261567854f;
  p = Fma(p, z, 0.020415189480514f);
  p = Fma(p, z, -0.053665276740574f);
  p = Fma(p, z, 0.133304147889206f);
  p = Fma(p, z, -0.333332290421447f);
  const float near = Fma(p * z, x, x);
  const float far = 1.0f - 2.0f / (Exp(2.0f * a) + 1.0f);
  return a < 0.65f ? near : __builtin_copysignf(far, x);
}

// log(1 + u) for u in [0, 1]: 2 atanh(u / (2 + u)), with a relative error of 1e-7
INLINE float Log1p(float u) {
  const float s = u / (2.0f + u), z = s * s;
  float p = 1.0f / 13.0f;
  p = Fma(p, z, 1.0f / 11.0f);
  p = Fma(p, z, 1.0f / 9.0f);
  p = Fma(p, z, 1.0f / 7.0f);
  p = Fma(p, z, 0.2f);
  p = Fma(p, z, 1.0f / 3.0f);
  return 2.0f * Fma(p * z, s, s);
}

// exp(x) - 1 for x <= 0 without cancellation
INLINE float Expm1(float x) {
  const float t = Tanh(0.5f * x);
  return 2.0f * t / (1.0f - t);
}

INLINE float Erf(float x) {
  const float z = x * x, a = Abs(x);
  float p = -0.000563141900f;
  p = Fma(p, z, 0.004917550610f);
  p = Fma(p, z, -0.026711310600f);
  p = Fma(p, z, 0.112801801000f);
  p = Fma(p, z, -0.376123262000f);
  p = Fma(p, z, 1.128379120000f);
  const float far = 1.0f - 2.0f * Exp(-z) * ScaledTail(1.41421356237f * (a > 9.0f ? 9.0f : a));
  return a < 1.0f ? p * x : __builtin_copysignf(far, x);
}
