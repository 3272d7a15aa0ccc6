// Element-wise kernels.
#pragma once
#include <cmath>
#include <cstdio>

#include "register.h"

namespace libai {

inline float Number(KernelComputeContext* c, const char* attribute) {
  return static_cast<float>(c->Attr<double>(attribute));
}

// A curve with up to two parameters. OneFlow names the arguments of some functions x and y, and the arguments of other
// functions in and out. The gradient of the sigmoid reads its result, y.
template<Curve Maths::*function>
void RunCurve(KernelComputeContext* c, float first, float second) {
  const bool is_in = Has(c, "in");
  const float* x = In(c, is_in ? "in" : "x");
  float* y = Out(c, is_in ? "out" : "y");
  ForRanges(Size(c, is_in ? "in" : "x"), kHeavyGrain,
            [=](int64_t i, int64_t end) { (g_maths->*function)(x + i, y + i, end - i, first, second); });
}
template<CurveGrad Maths::*function>
void RunCurveGrad(KernelComputeContext* c, float first, float second) {
  const float *x = In(c, Has(c, "x") ? "x" : "y"), *dy = In(c, "dy");
  float* dx = Out(c, "dx");
  ForRanges(Size(c, "dy"), kHeavyGrain,
            [=](int64_t i, int64_t end) { (g_maths->*function)(x + i, dy + i, dx + i, end - i, first, second); });
}

// The scalar operand of an operation. OneFlow stores it in an integer or a floating-point attribute.
inline double Operand(KernelComputeContext* c) {
  return c->Attr<bool>("has_int_operand") ? static_cast<double>(c->Attr<int64_t>("int_operand"))
                                          : c->Attr<double>("float_operand");
}
inline void RunPower(KernelComputeContext* c) {
  const double exponent = Operand(c);
  const float* x = In(c, "in");
  float* y = Out(c, "out");
  const int64_t n = Size(c, "in");
  if (exponent == 2.0) return RunCurve<&Maths::Square>(c, 0.0f, 0.0f);
  if (exponent == 3.0) return RunCurve<&Maths::Cube>(c, 0.0f, 0.0f);
  if (exponent == 0.5) return RunCurve<&Maths::SqrtAll>(c, 0.0f, 0.0f);
  if (exponent == -0.5) return RunCurve<&Maths::Rsqrt>(c, 0.0f, 0.0f);
  for (int64_t i = 0; i < n; ++i) y[i] = std::pow(x[i], static_cast<float>(exponent));
}
inline void RunPowerGrad(KernelComputeContext* c) {
  const double exponent = Operand(c);
  const float *x = In(c, "x"), *dy = In(c, "dy");
  float* dx = Out(c, "dx");
  const int64_t n = Size(c, "x");
  if (exponent == 2.0) return RunCurveGrad<&Maths::SquareGrad>(c, 0.0f, 0.0f);
  if (exponent == 3.0) return RunCurveGrad<&Maths::CubeGrad>(c, 0.0f, 0.0f);
  if (exponent == 0.5) return RunCurveGrad<&Maths::SqrtAllGrad>(c, 0.0f, 0.0f);
  if (exponent == -0.5) return RunCurveGrad<&Maths::RsqrtGrad>(c, 0.0f, 0.0f);
  const float k = static_cast<float>(exponent), less = static_cast<float>(exponent - 1.0);
  for (int64_t i = 0; i < n; ++i) dx[i] = k * std::pow(x[i], less) * dy[i];
}

inline bool IsBool(const KernelRegContext& c, const char* name) {
  return c.TensorDesc4ArgNameAndIndex(name, 0)->data_type() == DataType::kBool;
}
inline void RunMaskedFill(KernelComputeContext* c) {
  const bool* mask = c->Tensor4ArgNameAndIndex("mask", 0)->dptr<bool>();
  const float *x = In(c, "x"), value = static_cast<float>(Operand(c));
  float* y = Out(c, "out");
  ForRanges(Size(c, "x"), kLightGrain,
            [=](int64_t i, int64_t end) { g_maths->MaskedFill(mask + i, x + i, value, y + i, end - i); });
}

// The mask of libai/layers/dropout.py. It is registered as quantization with integer scales, which OneFlow does not
// have. `in` has the shape of the mask. `zero_point` contains a word for each row, followed by a word for each column.
// `scale` is not read, but OneFlow checks its size. The attribute contains the layer's multiplier and increment, the
// threshold and the factor of elements that are kept.
inline bool HasWords(const KernelRegContext& c) {
  const auto is_int = [&](const char* name) {
    const auto* t = c.TensorDesc4ArgNameAndIndex(name, 0);
    return t != nullptr && t->data_type() == DataType::kInt32;
  };
  return is_int("scale") && is_int("zero_point");
}
inline void RunDropoutMask(KernelComputeContext* c) {
  const auto* words = reinterpret_cast<const uint32_t*>(c->Tensor4ArgNameAndIndex("zero_point", 0)->dptr<int32_t>());
  int32_t multiplier = 0, increment = 0;
  double threshold = 0.0, kept = 0.0;
  const std::string text = c->Attr<std::string>("quantization_formula");
  CHECK_EQ(std::sscanf(text.c_str(), "%d %d %lf %lf", &multiplier, &increment, &threshold, &kept), 4) << text;
  const int64_t n = Size(c, "in"), axes = c->Tensor4ArgNameAndIndex("in", 0)->shape_view().NumAxes();
  if (n == 0) return;
  const int64_t width = axes == 1 ? 1 : LastAxis(c, "in"), rows = n / width;
  CHECK_EQ(rows + width, Size(c, "zero_point"));
  std::vector<uint32_t> columns(words + rows, words + rows + width);
  for (auto& word : columns) word = word * static_cast<uint32_t>(multiplier) + static_cast<uint32_t>(increment);
  float* y = Out(c, "out");
  ForRows(rows, width, kLightGrain, [&](int64_t r, int64_t end) {
    const float shift = static_cast<float>(-threshold), scale = static_cast<float>(kept);
    for (; r < end; ++r) g_maths->DropLine(words[r], columns.data(), shift, scale, y + r * width, width);
  });
}

inline void RegisterPointwise() {
  Register("quantization", "in", &RunDropoutMask, &HasWords);
#define REGISTER_CURVE(OP, X, GRAD_X, NAME, A, B)                                     \
  Register(OP, X, [](KernelComputeContext* c) { RunCurve<&Maths::NAME>(c, A, B); });  \
  Register(OP "_grad", GRAD_X, [](KernelComputeContext* c) { RunCurveGrad<&Maths::NAME##Grad>(c, A, B); });
  REGISTER_CURVE("gelu", "in", "x", Gelu, 0.0f, 0.0f)
  REGISTER_CURVE("fast_gelu", "in", "x", FastGelu, 0.0f, 0.0f)
  REGISTER_CURVE("quick_gelu", "x", "x", QuickGelu, 0.0f, 0.0f)
  REGISTER_CURVE("silu", "in", "x", Silu, 0.0f, 0.0f)
  REGISTER_CURVE("sigmoid", "x", "y", SigmoidAll, 0.0f, 0.0f)
  REGISTER_CURVE("tanh", "x", "x", TanhAll, 0.0f, 0.0f)
  REGISTER_CURVE("exp", "x", "x", ExpAll, 0.0f, 0.0f)
  REGISTER_CURVE("erf", "x", "x", ErfAll, 0.0f, 0.0f)
  REGISTER_CURVE("sqrt", "x", "x", SqrtAll, 0.0f, 0.0f)
  REGISTER_CURVE("rsqrt", "x", "x", Rsqrt, 0.0f, 0.0f)
  REGISTER_CURVE("softplus", "in", "x", Softplus, Number(c, "beta"), Number(c, "threshold"))
  REGISTER_CURVE("elu", "in", "x", Elu, Number(c, "alpha"), 0.0f)
  REGISTER_CURVE("celu", "in", "x", Celu, Number(c, "alpha"), 0.0f)
  REGISTER_CURVE("selu", "in", "x", Selu, 0.0f, 0.0f)
  REGISTER_CURVE("mish", "in", "x", Mish, 0.0f, 0.0f)
  REGISTER_CURVE("leaky_relu", "x", "x", LeakyRelu, c->Attr<float>("alpha"), 0.0f)
  REGISTER_CURVE("log_sigmoid", "x", "x", LogSigmoid, 0.0f, 0.0f)
  REGISTER_CURVE("hardswish", "in", "x", Hardswish, 0.0f, 0.0f)
  REGISTER_CURVE("hardsigmoid", "in", "x", Hardsigmoid, 0.0f, 0.0f)
#undef REGISTER_CURVE
  Register("scalar_pow", "in", &RunPower);
  Register("scalar_pow_grad", "x", &RunPowerGrad);
  Register("masked_fill", "out", &RunMaskedFill, [](const KernelRegContext& c) { return IsBool(c, "mask"); });
}

}  // namespace libai
