// A linear layer as one operation, OneFlow's fused_matmul_bias, for which OneFlow 0.9.0 has no CPU kernel. OneFlow's function on
// CPU runs a matmul and an addition. The gradient function of the operation is OneFlow's; its operations and bits are those of the two.
#include "dispatch.h"

namespace {

using namespace oneflow;       // NOLINT
using namespace oneflow::one;  // NOLINT
namespace F = oneflow::one::functional;
using F::T;
using libai::IsFloatOnCpu;
using Linear = Maybe<Tensor> (*)(const T&, const T&, const T&, const Optional<Tensor>&);
Linear g_own = nullptr;

// Returns true if each rank has all numbers. The operation cannot add the bias to a part of a sum.
bool IsWhole(const T& x) {
  if (x->is_local()) return true;
  for (const auto& sbp : CHECK_JUST(x->nd_sbp())->sbp_parallel()) {
    if (!sbp.has_broadcast_parallel()) return false;
  }
  return true;
}
bool Fits(const T& x, const T& weight, const T& bias) {
  if (!libai::AreProductsOn() || !IsFloatOnCpu(x) || !IsFloatOnCpu(weight) || !IsFloatOnCpu(bias)) return false;
  const int axes = x->shape()->NumAxes();
  return axes >= 2 && weight->shape()->NumAxes() == 2 && bias->shape()->NumAxes() == 1
         && x->shape()->At(axes - 1) == weight->shape()->At(1) && bias->shape()->At(0) == weight->shape()->At(0)
         && x->is_local() == weight->is_local() && IsWhole(weight) && IsWhole(bias);
}

Maybe<Tensor> LinearOnCpu(const T& x, const T& weight, const T& bias, const Optional<Tensor>& addend) {
  if (addend) return g_own(x, weight, bias, addend);
  if (!Fits(x, weight, bias)) return F::Add(JUST(F::MatMul(x, weight, false, true, 1.0)), bias, Scalar(1), false);
  static const auto operation =
      CHECK_JUST(OpBuilder("fused_matmul_bias", "libai-linear").Input("x").Input("weight").Input("bias").Output("out").Build());
  return OpInterpUtil::Dispatch<Tensor>(*operation, {x, weight, bias}, OpExprInterpContext(AttrMap{}));
}

}  // namespace

// Returns the function that replaces OneFlow's function `own`.
extern "C" __attribute__((visibility("default"))) void* libai_linear(void* own) {
  g_own = reinterpret_cast<Linear>(own);
  return reinterpret_cast<void*>(&LinearOnCpu);
}
