// Layer norm and softmax.
#pragma once
#include "blocks.h"

namespace libai {

// Returns `pointer + index`, or null if `pointer` is null.
template<typename Number>
Number* At(Number* pointer, int64_t index) { return pointer == nullptr ? nullptr : pointer + index; }

inline void RunLayerNorm(KernelComputeContext* c) {
  const int64_t rows = Size(c, "mean");
  if (rows == 0) return;
  const int64_t d = Size(c, "x") / rows;
  const float *x = In(c, "x"), *gamma = MaybeIn(c, "gamma"), *beta = MaybeIn(c, "beta");
  float *y = Out(c, "y"), *mean = Out(c, "mean"), *inv = Out(c, "inv_variance");
  const double epsilon = c->Attr<double>("epsilon");
  ForRows(rows, d, kHeavyGrain, [=](int64_t r, int64_t end) {
    g_maths->LayerNorm(x + r * d, gamma, beta, y + r * d, mean + r, inv + r, end - r, d, epsilon);
  });
}
inline void RunLayerNormGrad(KernelComputeContext* c) {
  const int64_t rows = Size(c, "mean");
  if (rows == 0) return;
  const int64_t d = Size(c, "x") / rows;
  const float *dy = In(c, "dy"), *x = In(c, "x"), *mean = In(c, "mean"), *inv = In(c, "inv_variance");
  const float *gamma = MaybeIn(c, "gamma"), *add = MaybeIn(c, "_add_to_output");
  float* dx = Out(c, "dx");
  ForRows(rows, d, kHeavyGrain, [=](int64_t r, int64_t end) {
    const int64_t i = r * d;
    g_maths->LayerNormGrad(dy + i, x + i, mean + r, inv + r, gamma, At(add, i), dx + i, end - r, d);
  });
}
// Computes sums of blocks of rows, and adds them up in order.
inline void RunLayerNormParamGrad(KernelComputeContext* c) {
  float* dgamma = c->has_output("gamma_diff", 0) ? Out(c, "gamma_diff") : nullptr;
  float* dbeta = c->has_output("beta_diff", 0) ? Out(c, "beta_diff") : nullptr;
  const int64_t d = dgamma != nullptr ? Size(c, "gamma_diff") : dbeta != nullptr ? Size(c, "beta_diff") : 0;
  if (dgamma != nullptr) std::memset(dgamma, 0, d * sizeof(float));
  if (dbeta != nullptr) std::memset(dbeta, 0, d * sizeof(float));
  const int64_t rows = Size(c, "mean");
  if (rows == 0 || d == 0) return;  // the inputs may have no memory
  const float *dy = In(c, "dy"), *x = In(c, "x"), *mean = In(c, "mean"), *inv = In(c, "inv_variance");
  AddBlocks(rows, d, 2 * d, [=](int64_t r, int64_t count, float* sums) {
    g_maths->LayerNormParamGrad(dy + r * d, x + r * d, mean + r, inv + r, sums, sums + d, count, d);
  }, [=](const float* sums) {
    if (dgamma != nullptr) g_maths->AddRows(sums, dgamma, 1, d);
    if (dbeta != nullptr) g_maths->AddRows(sums + d, dbeta, 1, d);
  });
}

template<void (*Maths::*function)(const float*, float*, int64_t, int64_t)>
void RunRows(const float* x, float* y, int64_t n, int64_t d) {
  ForRows(n / std::max<int64_t>(1, d), d, kHeavyGrain,
          [=](int64_t r, int64_t end) { (g_maths->*function)(x + r * d, y + r * d, end - r, d); });
}
template<void (*Maths::*function)(const float*, const float*, float*, int64_t, int64_t)>
void RunRowsGrad(const float* y, const float* dy, float* dx, int64_t n, int64_t d) {
  ForRows(n / std::max<int64_t>(1, d), d, kHeavyGrain,
          [=](int64_t r, int64_t end) { (g_maths->*function)(y + r * d, dy + r * d, dx + r * d, end - r, d); });
}
inline void RunSoftmax(KernelComputeContext* c) {
  RunRows<&Maths::Softmax>(In(c, "in"), Out(c, "out"), Size(c, "in"), LastAxis(c, "in"));
}
inline void RunSoftmaxGrad(KernelComputeContext* c) {
  RunRowsGrad<&Maths::SoftmaxGrad>(In(c, "y"), In(c, "dy"), Out(c, "dx"), Size(c, "y"), LastAxis(c, "y"));
}
inline void RunLogSoftmax(KernelComputeContext* c) {
  RunRows<&Maths::LogSoftmax>(In(c, "in"), Out(c, "prob"), Size(c, "in"), LastAxis(c, "in"));
}
inline void RunLogSoftmaxGrad(KernelComputeContext* c) {
  RunRowsGrad<&Maths::LogSoftmaxGrad>(In(c, "prob"), In(c, "dy"), Out(c, "dx"), Size(c, "prob"), LastAxis(c, "prob"));
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
