// The loops of the kernels, independent of OneFlow: one table of functions for each instruction set (see level.cpp).
#pragma once
#include <cstdint>

namespace libai {

// The settings of an update of Adam or LAMB. `step` and `root2` contain the bias corrections (see update_kernels.h).
struct AdamArgs {
  float scale, l1, l2, beta1, beta2, epsilon, decay, rate, step, root2;
};

struct MomentumArgs {
  float scale, l1, l2, beta, dampening, decay, rate;
  bool is_nesterov, maximizes;
};

// A tap of a filter: the offset of its inputs from the base of a pixel, and the offset of its weights.
struct ConvTap {
  int64_t x_shift, w_shift;
};

// Pixels that use the same taps. `x`: rows of channels. `w`: rows of `width` weights, with `w_step` from one channel to
// the next. `start`: the initial sums of every pixel, or null to start from the values in `y`.
struct ConvRun {
  const float *x, *w, *start;
  float* y;
  const ConvTap* taps;
  int64_t num_taps, channels, w_step, width;
};

// The filter gradient of one tap, over `lines` lines of `count` pixels. The lines begin at `dy_at` and `x_at`, and the
// pixels of a line lie `dy_step` and `x_step` apart.
struct FilterRun {
  const float *dy, *x;
  float* dw;
  const int64_t *dy_at, *x_at;
  int64_t lines, count, dy_step, x_step, dw_step, rows, width;
};

// c (rows, width) = a (rows, terms) b (terms, width). If `first_term` > 0, a begins with this term and the product is added
// to c. The strides are `a_row` and `a_term` for a, `b_row` and `b_column` for b, and `c_row` for the rows of c. If
// `b_row` is 0, b lies in panels: as many columns as are computed together (see Multiply) are next to each other in a row.
// `block_terms` terms are computed at a time. `width` is at least the length of a vector.
struct ProductRun {
  const float *a, *b;
  float* c;
  int64_t a_row, a_term, b_row, b_column, c_row, rows, first_term, terms, block_terms, width;
};

#define LIBAI_CURVE(X) \
  X(Gelu) X(FastGelu) X(QuickGelu) X(Silu) X(SigmoidAll) X(TanhAll) X(ExpAll) X(ErfAll) X(SqrtAll) X(Rsqrt) X(Square) X(Cube) \
  X(Softplus) X(Elu) X(Celu) X(Selu) X(Mish) X(LeakyRelu) X(LogSigmoid) X(Hardswish) X(Hardsigmoid)
#define LIBAI_BINARY(X) X(AddLine) X(SubLine) X(MulLine) X(DivLine)
#define LIBAI_COMPARISON(X) \
  X(EqualLine) X(NotEqualLine) X(LessLine) X(LessEqualLine) X(GreaterLine) X(GreaterEqualLine)

// Rows are contiguous and have `d` numbers. The definition of a function states which pointers may be null.
#define LIBAI_MATHS(X)                                                                                          \
  X(void, Where, (const bool* condition, int c_step, const float* x, int x_step, const float* y, int y_step,    \
                  float* z, int64_t n))                                                                         \
  X(void, MaskedFill, (const bool* mask, const float* x, float value, float* y, int64_t n))                     \
  X(void, DropLine, (uint32_t row, const uint32_t* words, float shift, float scale, float* y, int64_t n))       \
  X(void, Sgd, (const MomentumArgs* args, const float* grad, float* w, int64_t n))                              \
  X(void, Momentum, (const MomentumArgs* args, const float* grad, float* w, float* m, int64_t n))               \
  X(void, Adam, (const AdamArgs* args, const float* grad, float* w, float* m, float* v, float* top, int64_t n)) \
  X(void, LambDirection, (const AdamArgs* args, const float* grad, const float* w, float* m, float* v,          \
                          float* d, int64_t n))                                                                 \
  X(void, LambStep, (const float* d, float* w, float rate, float decay, int64_t n))                             \
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
  X(double, SumAbs, (const float* x, int64_t n))                                                                \
  X(float, MaxAbs, (const float* x, int64_t n))                                                                 \
  X(double, SumSquares, (const float* x, float mean, int64_t n))                                                \
  X(double, SumProducts, (const float* dy, const float* x, float mean, int64_t n))                              \
  X(void, AddProducts, (const float* dy, const float* x, const float* mean, float* y, int64_t rows, int64_t d)) \
  X(void, Affine, (const float* x, const float* mean, const float* scale, const float* shift, int step,         \
                   float* y, int64_t n))                                                                        \
  X(void, AffineGrad, (const float* dy, const float* x, const float* mean, const float* a, const float* b,      \
                       const float* c, int step, float* dx, int64_t n))                                         \
  X(void, ConvPixels, (const ConvRun* run, const int64_t* x_at, const int64_t* y_at, int64_t pixels))           \
  X(void, AddShifted, (const float* x, int64_t x_row, int64_t x_step, float weight, float* y, int64_t y_row,    \
                       int64_t y_step, int64_t rows, int64_t n))                                                \
  X(double, SumShifted, (const float* x, int64_t x_row, int64_t x_step, const float* y, int64_t y_row,          \
                         int64_t rows, int64_t n))                                                              \
  X(void, ConvFilter, (const FilterRun* run))                                                                   \
  X(void, Multiply, (const ProductRun* run))                                                                    \
  X(void, DotRows, (const float* x, int64_t num_x, const float* w, int64_t num_w, int64_t d, float alpha,       \
                    float* y, int64_t y_step))                                                                  \
  X(void, WeighRows, (const float* p, const float* v, int64_t count, int64_t d, float* y))                      \
  X(void, LstmStep, (float* gates, const float* c_before, float* c, float* h, int64_t h_row, int64_t rows,      \
                     int64_t d))                                                                                \
  X(void, LstmStepGrad, (const float* gates, const float* c_before, const float* c, const float* dh,            \
                         const float* dy, int64_t dy_row, float* dc, float* dgates, int64_t rows, int64_t d))   \
  X(void, GruStep, (float* gates, float* hidden, const float* bias, const float* h_before, int64_t before_row,  \
                    float* h, int64_t h_row, int64_t rows, int64_t d))                                          \
  X(void, GruStepGrad, (const float* gates, const float* hidden, const float* h_before, int64_t before_row,     \
                        float* dh, const float* dy, int64_t dy_row, float* dx, float* dhidden, int64_t rows,    \
                        int64_t d))                                                                             \
  X(void, RnnStep, (float* gates, float* h, int64_t h_row, bool is_relu, int64_t rows, int64_t d))              \
  X(void, RnnStepGrad, (const float* h, int64_t h_row, const float* dh, const float* dy, int64_t dy_row,        \
                        float* dgates, bool is_relu, int64_t rows, int64_t d))                                  \
  X(void, CopyRows, (const float* x, int64_t x_step, float* y, int64_t rows, int64_t d))                        \
  X(void, Transpose, (const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t rows, int64_t cols))

// y = f(x) and dx = dy f'(x), with up to two parameters.
using Curve = void (*)(const float* x, float* y, int64_t n, float a, float b);
using CurveGrad = void (*)(const float* x, const float* dy, float* dx, int64_t n, float a, float b);
// A step is 1, or 0 to repeat the first number.
using Binary = void (*)(const float* x, int x_step, const float* y, int y_step, float* z, int64_t n);
using Comparison = void (*)(const float* x, int x_step, const float* y, int y_step, bool* z, int64_t n);

struct Maths {
#define LIBAI_CURVE_MEMBER(name) Curve name; CurveGrad name##Grad;
#define LIBAI_BINARY_MEMBER(name) Binary name;
#define LIBAI_COMPARISON_MEMBER(name) Comparison name;
#define LIBAI_MEMBER(result, name, args) result(*name) args;
  LIBAI_CURVE(LIBAI_CURVE_MEMBER)
  LIBAI_BINARY(LIBAI_BINARY_MEMBER)
  LIBAI_COMPARISON(LIBAI_COMPARISON_MEMBER)
  LIBAI_MATHS(LIBAI_MEMBER)
};

extern const Maths kMathsSse2, kMathsAvx2, kMathsAvx512;

}  // namespace libai
