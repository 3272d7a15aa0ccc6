// The loops of the kernels, free of OneFlow: one table of functions for each instruction set (see level.cpp).
#pragma once
#include <cstdint>

namespace libai {

// The settings of an update of Adam; `step` and `root2` hold the bias corrections.
struct AdamArgs {
  float scale, l1, l2, beta1, beta2, epsilon, decay, rate, step, root2;
};

struct MomentumArgs {
  float scale, l1, l2, beta, dampening, decay, rate;
  bool is_nesterov, maximizes;
};

#define LIBAI_UNARY(X) \
  X(Gelu) X(FastGelu) X(QuickGelu) X(Silu) X(TanhAll) X(ExpAll) X(ErfAll) X(SqrtAll) X(Rsqrt) \
  X(Square) X(Cube)
#define LIBAI_UNARY_GRAD(X) \
  X(GeluGrad) X(FastGeluGrad) X(QuickGeluGrad) X(SiluGrad) X(TanhGrad) X(ExpGrad) X(ErfGrad) X(SqrtGrad) \
  X(RsqrtGrad) X(SquareGrad) X(CubeGrad)
#define LIBAI_BINARY(X) X(AddLine) X(SubLine) X(MulLine) X(DivLine)
#define LIBAI_COMPARISON(X) \
  X(EqualLine) X(NotEqualLine) X(LessLine) X(LessEqualLine) X(GreaterLine) X(GreaterEqualLine)

// Rows are contiguous, of `d` numbers. Which pointers may be null is said where the function is.
#define LIBAI_MATHS(X)                                                                                          \
  X(void, LeakyRelu, (const float* x, float* y, int64_t n, float alpha))                                        \
  X(void, LeakyReluGrad, (const float* x, const float* dy, float* dx, int64_t n, float alpha))                  \
  X(void, Where, (const bool* condition, int c_step, const float* x, int x_step, const float* y, int y_step,    \
                  float* z, int64_t n))                                                                         \
  X(void, MaskedFill, (const bool* mask, const float* x, float value, float* y, int64_t n))                     \
  X(void, Sgd, (const MomentumArgs* args, const float* grad, float* w, int64_t n))                              \
  X(void, Momentum, (const MomentumArgs* args, const float* grad, float* w, float* m, int64_t n))               \
  X(void, Adam, (const AdamArgs* args, const float* grad, float* w, float* m, float* v, float* top, int64_t n)) \
  X(void, LayerNorm, (const float* x, const float* gamma, const float* beta, float* y, float* mean,             \
                      float* inv, int64_t rows, int64_t d, double eps))                                         \
  X(void, LayerNormGrad, (const float* dy, const float* x, const float* mean, const float* inv,                 \
                          const float* gamma, const float* add, float* dx, int64_t rows, int64_t d))            \
  X(void, LayerNormParamGrad, (const float* dy, const float* x, const float* mean, const float* inv,            \
                               float* dgamma, float* dbeta, int64_t rows, int64_t d))                           \
  X(void, Softmax, (const float* x, float* y, int64_t rows, int64_t d))                                         \
  X(void, SoftmaxGrad, (const float* y, const float* dy, float* dx, int64_t rows, int64_t d))                   \
  X(void, LogSoftmax, (const float* x, float* y, int64_t rows, int64_t d))                                      \
  X(void, LogSoftmaxGrad, (const float* y, const float* dy, float* dx, int64_t rows, int64_t d))                \
  X(void, AddRows, (const float* x, float* y, int64_t rows, int64_t d))                                         \
  X(double, SumAll, (const float* x, int64_t n))                                                                \
  X(void, Transpose, (const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t rows, int64_t cols))

using Unary = void (*)(const float* x, float* y, int64_t n);
using UnaryGrad = void (*)(const float* x, const float* dy, float* dx, int64_t n);
// A step of 0 repeats the first number, else it is 1.
using Binary = void (*)(const float* x, int x_step, const float* y, int y_step, float* z, int64_t n);
using Comparison = void (*)(const float* x, int x_step, const float* y, int y_step, bool* z, int64_t n);

struct Maths {
#define LIBAI_UNARY_MEMBER(name) Unary name;
#define LIBAI_UNARY_GRAD_MEMBER(name) UnaryGrad name;
#define LIBAI_BINARY_MEMBER(name) Binary name;
#define LIBAI_COMPARISON_MEMBER(name) Comparison name;
#define LIBAI_MEMBER(result, name, args) result(*name) args;
  LIBAI_UNARY(LIBAI_UNARY_MEMBER)
  LIBAI_UNARY_GRAD(LIBAI_UNARY_GRAD_MEMBER)
  LIBAI_BINARY(LIBAI_BINARY_MEMBER)
  LIBAI_COMPARISON(LIBAI_COMPARISON_MEMBER)
  LIBAI_MATHS(LIBAI_MEMBER)
};

extern const Maths kMathsSse2, kMathsAvx2, kMathsAvx512;

}  // namespace libai
