// Element-wise kernels.
#pragma once
#include <cmath>
#include <cstdio>

#include "register.h"

namespace libai {

inline float Number(KernelComputeContext* c, const char* attribute) {
  return attribute == nullptr ? 0.0f : static_cast<float>(c->Attr<double>(attribute));
}

// OneFlow names the arguments of some functions x and y, and the arguments of other functions in and out.
template<Unary Maths::*function>
void RunUnary(const float* x, float* y, int64_t n) {
  ForRanges(n, kHeavyGrain, [=](int64_t i, int64_t end) { (g_maths->*function)(x + i, y + i, end - i); });
}
template<Unary Maths::*function>
void RunXy(KernelComputeContext* c) { RunUnary<function>(In(c, "x"), Out(c, "y"), Size(c, "x")); }
template<Unary Maths::*function>
void RunInOut(KernelComputeContext* c) { RunUnary<function>(In(c, "in"), Out(c, "out"), Size(c, "in")); }
template<UnaryGrad Maths::*function>
void RunUnaryGrad(const float* x, const float* dy, float* dx, int64_t n) {
  ForRanges(n, kHeavyGrain, [=](int64_t i, int64_t end) { (g_maths->*function)(x + i, dy + i, dx + i, end - i); });
}
template<UnaryGrad Maths::*function>
void RunGrad(KernelComputeContext* c) { RunUnaryGrad<function>(In(c, "x"), In(c, "dy"), Out(c, "dx"), Size(c, "x")); }

inline void RunSigmoidGrad(KernelComputeContext* c) {
  RunUnaryGrad<&Maths::SigmoidGrad>(In(c, "y"), In(c, "dy"), Out(c, "dx"), Size(c, "y"));
}
inline void RunLeakyRelu(KernelComputeContext* c) {
  const float *x = In(c, "x"), alpha = c->Attr<float>("alpha");
  float* y = Out(c, "y");
  ForRanges(Size(c, "x"), kLightGrain, [=](int64_t i, int64_t end) { g_maths->LeakyRelu(x + i, y + i, end - i, alpha); });
}
inline void RunLeakyReluGrad(KernelComputeContext* c) {
  const float *x = In(c, "x"), *dy = In(c, "dy"), alpha = c->Attr<float>("alpha");
  float* dx = Out(c, "dx");
  ForRanges(Size(c, "x"), kLightGrain,
            [=](int64_t i, int64_t end) { g_maths->LeakyReluGrad(x + i, dy + i, dx + i, end - i, alpha); });
}

// A curve with up to two parameters, which are attributes of the operation.
template<Curve Maths::*function>
void RunCurve(KernelComputeContext* c, const char* a, const char* b) {
  const float *x = In(c, "in"), first = Number(c, a), second = Number(c, b);
  float* y = Out(c, "out");
  ForRanges(Size(c, "in"), kHeavyGrain,
            [=](int64_t i, int64_t end) { (g_maths->*function)(x + i, y + i, end - i, first, second); });
}
template<CurveGrad Maths::*function>
void RunCurveGrad(KernelComputeContext* c, const char* a, const char* b) {
  const float *x = In(c, "x"), *dy = In(c, "dy"), first = Number(c, a), second = Number(c, b);
  float* dx = Out(c, "dx");
  ForRanges(Size(c, "x"), kHeavyGrain,
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
  if (exponent == 2.0) return RunUnary<&Maths::Square>(x, y, n);
  if (exponent == 3.0) return RunUnary<&Maths::Cube>(x, y, n);
  if (exponent == 0.5) return RunUnary<&Maths::SqrtAll>(x, y, n);
  if (exponent == -0.5) return RunUnary<&Maths::Rsqrt>(x, y, n);
  for (int64_t i = 0; i < n; ++i) y[i] = std::pow(x[i], static_cast<float>(exponent));
}
inline void RunPowerGrad(KernelComputeContext* c) {
  const double exponent = Operand(c);
  const float *x = In(c, "x"), *dy = In(c, "dy");
  float* dx = Out(c, "dx");
  const int64_t n = Size(c, "x");
  if (exponent == 2.0) return RunUnaryGrad<&Maths::SquareGrad>(x, dy, dx, n);
  if (exponent == 3.0) return RunUnaryGrad<&Maths::CubeGrad>(x, dy, dx, n);
  if (exponent == 0.5) return RunUnaryGrad<&Maths::SqrtGrad>(x, dy, dx, n);
  if (exponent == -0.5) return RunUnaryGrad<&Maths::RsqrtGrad>(x, dy, dx, n);
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
  Register("gelu", "in", &RunInOut<&Maths::Gelu>);
  Register("fast_gelu", "in", &RunInOut<&Maths::FastGelu>);
  Register("quick_gelu", "x", &RunXy<&Maths::QuickGelu>);
  Register("silu", "in", &RunInOut<&Maths::Silu>);
  Register("sigmoid", "x", &RunXy<&Maths::SigmoidAll>);
  Register("tanh", "x", &RunXy<&Maths::TanhAll>);
  Register("exp", "x", &RunXy<&Maths::ExpAll>);
  Register("erf", "x", &RunXy<&Maths::ErfAll>);
  Register("sqrt", "x", &RunXy<&Maths::SqrtAll>);
  Register("rsqrt", "x", &RunXy<&Maths::Rsqrt>);
  Register("gelu_grad", "x", &RunGrad<&Maths::GeluGrad>);
  Register("fast_gelu_grad", "x", &RunGrad<&Maths::FastGeluGrad>);
  Register("quick_gelu_grad", "x", &RunGrad<&Maths::QuickGeluGrad>);
  Register("silu_grad", "x", &RunGrad<&Maths::SiluGrad>);
  Register("sigmoid_grad", "y", &RunSigmoidGrad);
  Register("tanh_grad", "x", &RunGrad<&Maths::TanhGrad>);
  Register("exp_grad", "x", &RunGrad<&Maths::ExpGrad>);
  Register("erf_grad", "x", &RunGrad<&Maths::ErfGrad>);
  Register("sqrt_grad", "x", &RunGrad<&Maths::SqrtGrad>);
  Register("rsqrt_grad", "x", &RunGrad<&Maths::RsqrtGrad>);
  Register("leaky_relu", "x", &RunLeakyRelu);
  Register("leaky_relu_grad", "x", &RunLeakyReluGrad);
#define REGISTER_CURVE(OP, NAME, A, B)                                                             \
  Register(OP, "in", [](KernelComputeContext* c) { RunCurve<&Maths::NAME>(c, A, B); });            \
  Register(OP "_grad", "x", [](KernelComputeContext* c) { RunCurveGrad<&Maths::NAME##Grad>(c, A, B); });
  REGISTER_CURVE("softplus", Softplus, "beta", "threshold")
  REGISTER_CURVE("elu", Elu, "alpha", nullptr)
  REGISTER_CURVE("celu", Celu, "alpha", nullptr)
  REGISTER_CURVE("selu", Selu, nullptr, nullptr)
  REGISTER_CURVE("mish", Mish, nullptr, nullptr)
#undef REGISTER_CURVE
  Register("scalar_pow", "in", &RunPower);
  Register("scalar_pow_grad", "x", &RunPowerGrad);
  Register("masked_fill", "out", &RunMaskedFill, [](const KernelRegContext& c) { return IsBool(c, "mask"); });
}

}  // namespace libai
