// The optimizers' updates.
#pragma once
#include "register.h"

namespace libai {

// An input of one number, or the attribute that stands for it.
inline float Given(KernelComputeContext* c, const char* input, const char* attribute) {
  return Has(c, input) ? *In(c, input) : c->Attr<float>(attribute);
}
// A gradient scaler in a graph says by an input that this update is left out.
inline bool IsSkipped(KernelComputeContext* c) {
  return Has(c, "skip_if") && *c->Tensor4ArgNameAndIndex("skip_if", 0)->dptr<int64_t>() != 0;
}
inline float GradientScale(KernelComputeContext* c) {
  const float scale = static_cast<float>(c->Attr<double>("scale"));
  return Has(c, "scale_by_tensor") ? scale * *In(c, "scale_by_tensor") : scale;
}
inline bool HasFloatGradient(const KernelRegContext& c) {
  return c.TensorDesc4ArgNameAndIndex("model_diff", 0)->data_type() == DataType::kFloat
         && !c.user_op_conf().has_input("model_copy", 0);
}

inline void RunAdam(KernelComputeContext* c) {
  if (IsSkipped(c)) return;
  AdamArgs p;
  p.scale = GradientScale(c);
  p.l1 = c->Attr<float>("l1");
  p.l2 = c->Attr<float>("l2");
  p.beta1 = c->Attr<float>("beta1");
  p.beta2 = c->Attr<float>("beta2");
  p.epsilon = c->Attr<float>("epsilon");
  p.decay = c->Attr<float>("weight_decay");
  p.rate = Given(c, "learning_rate", "learning_rate_val") * c->Attr<float>("learning_rate_scale");
  p.step = p.rate / Given(c, "bias_correction1", "bias_correction1_val");
  p.root2 = __builtin_sqrtf(Given(c, "bias_correction2", "bias_correction2_val"));
  float* top = c->Attr<bool>("amsgrad") ? Out(c, "max_v") : nullptr;
  g_maths->Adam(&p, In(c, "model_diff"), Out(c, "model"), Out(c, "m"), Out(c, "v"), top, Size(c, "model"));
}

inline MomentumArgs ReadMomentumArgs(KernelComputeContext* c) {
  MomentumArgs p{};
  p.scale = GradientScale(c);
  p.l1 = c->Attr<float>("l1");
  p.l2 = c->Attr<float>("l2");
  p.decay = c->Attr<float>("weight_decay");
  p.rate = Given(c, "learning_rate", "learning_rate_val") * c->Attr<float>("learning_rate_scale");
  return p;
}
inline void RunSgd(KernelComputeContext* c) {
  if (IsSkipped(c)) return;
  const MomentumArgs p = ReadMomentumArgs(c);
  g_maths->Sgd(&p, In(c, "model_diff"), Out(c, "model"), Size(c, "model"));
}
inline void RunMomentum(KernelComputeContext* c) {
  if (IsSkipped(c)) return;
  MomentumArgs p = ReadMomentumArgs(c);
  p.beta = c->Attr<float>("beta");
  p.dampening = c->Attr<float>("dampening");
  p.is_nesterov = c->Attr<bool>("nesterov");
  p.maximizes = c->Attr<bool>("maximize");
  g_maths->Momentum(&p, In(c, "model_diff"), Out(c, "model"), Out(c, "momentum"), Size(c, "model"));
}

inline void RegisterUpdates() {
  Register("adam_update", "model", &RunAdam, &HasFloatGradient, true);
  Register("sgd_update", "model", &RunSgd, &HasFloatGradient, true);
  Register("momentum_update", "model", &RunMomentum, &HasFloatGradient, true);
}

}  // namespace libai
