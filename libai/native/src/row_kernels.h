// Layer norm and softmax.
#pragma once
#include "register.h"

namespace libai {

inline void RunLayerNorm(KernelComputeContext* c) {
  const int64_t rows = Size(c, "mean");
  if (rows == 0) return;
  g_maths->LayerNorm(In(c, "x"), MaybeIn(c, "gamma"), MaybeIn(c, "beta"), Out(c, "y"), Out(c, "mean"),
                     Out(c, "inv_variance"), rows, Size(c, "x") / rows, c->Attr<double>("epsilon"));
}
inline void RunLayerNormGrad(KernelComputeContext* c) {
  const int64_t rows = Size(c, "mean");
  if (rows == 0) return;
  g_maths->LayerNormGrad(In(c, "dy"), In(c, "x"), In(c, "mean"), In(c, "inv_variance"), MaybeIn(c, "gamma"),
                         MaybeIn(c, "_add_to_output"), Out(c, "dx"), rows, Size(c, "x") / rows);
}
inline void RunLayerNormParamGrad(KernelComputeContext* c) {
  float* dgamma = c->has_output("gamma_diff", 0) ? Out(c, "gamma_diff") : nullptr;
  float* dbeta = c->has_output("beta_diff", 0) ? Out(c, "beta_diff") : nullptr;
  const int64_t d = dgamma != nullptr ? Size(c, "gamma_diff") : dbeta != nullptr ? Size(c, "beta_diff") : 0;
  if (dgamma != nullptr) std::memset(dgamma, 0, d * sizeof(float));
  if (dbeta != nullptr) std::memset(dbeta, 0, d * sizeof(float));
  const int64_t rows = Size(c, "mean");
  if (rows == 0) return;  // its inputs may have no memory
  g_maths->LayerNormParamGrad(In(c, "dy"), In(c, "x"), In(c, "mean"), In(c, "inv_variance"), dgamma, dbeta, rows, d);
}

inline void RunSoftmax(KernelComputeContext* c) {
  const int64_t d = LastAxis(c, "in"), n = Size(c, "in");
  if (n != 0) g_maths->Softmax(In(c, "in"), Out(c, "out"), n / d, d);
}
inline void RunSoftmaxGrad(KernelComputeContext* c) {
  const int64_t d = LastAxis(c, "y"), n = Size(c, "y");
  if (n != 0) g_maths->SoftmaxGrad(In(c, "y"), In(c, "dy"), Out(c, "dx"), n / d, d);
}
inline void RunLogSoftmax(KernelComputeContext* c) {
  const int64_t d = LastAxis(c, "in"), n = Size(c, "in");
  if (n != 0) g_maths->LogSoftmax(In(c, "in"), Out(c, "prob"), n / d, d);
}
inline void RunLogSoftmaxGrad(KernelComputeContext* c) {
  const int64_t d = LastAxis(c, "prob"), n = Size(c, "prob");
  if (n != 0) g_maths->LogSoftmaxGrad(In(c, "prob"), In(c, "dy"), Out(c, "dx"), n / d, d);
}

inline void RegisterRows() {
  Register("layer_norm", "x", &RunLayerNorm);
  Register("layer_norm_grad", "x", &RunLayerNormGrad);
  Register("layer_norm_param_grad", "x", &RunLayerNormParamGrad);
  Register("softmax", "in", &RunSoftmax);
  Register("softmax_grad", "y", &RunSoftmaxGrad);
  Register("log_softmax", "in", &RunLogSoftmax);
  Register("log_softmax_grad", "prob", &RunLogSoftmaxGrad);
}

}  // namespace libai
