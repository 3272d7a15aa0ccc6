// Optimizer updates of one or several parameters, and norms of gradients.
#pragma once
#include <cmath>

#include "blocks.h"
#include "scratch.h"

namespace libai {

// Returns the value of a one-element input, or the attribute if the input is not given.
inline float Given(KernelComputeContext* c, const char* input, const char* attribute) {
  return Has(c, input) ? *In(c, input) : c->Attr<float>(attribute);
}
// In a graph, a gradient scaler sets the input `skip_if` to skip an update.
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

// The number of parameters that an operation updates.
inline int NumModels(KernelComputeContext* c) {
  int count = 0;
  for (const auto& input : c->inputs()) count += input.first == "model";
  return count;
}
// The writable memory of the `index`-th tensor of an argument.
inline float* Changed(KernelComputeContext* c, const char* name, int index) {
  return c->Tensor4ArgNameAndIndex(name, index)->mut_dptr<float>();
}
inline int64_t Count(KernelComputeContext* c, const char* name, int index) {
  return c->Tensor4ArgNameAndIndex(name, index)->shape_view().elem_cnt();
}

// Calls `run(model, at, count)` for ranges that cover all models. `model` is an index and `at` an offset in that model.
template<typename Function>
void ForModels(KernelComputeContext* c, const Function& run) {
  std::vector<int64_t> ends;
  for (int i = 0; i < NumModels(c); ++i) ends.push_back((i == 0 ? 0 : ends.back()) + Count(c, "model", i));
  if (ends.empty()) return;
  ForRanges(ends.back(), kLightGrain, [&](int64_t begin, int64_t end) {
    for (size_t i = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin(); begin < end; ++i) {
      const int64_t first = i == 0 ? 0 : ends[i - 1], stop = std::min(end, ends[i]);
      run(static_cast<int>(i), begin - first, stop - begin);
      begin = stop;
    }
  });
}

inline AdamArgs ReadAdamArgs(KernelComputeContext* c) {
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
  return p;
}
inline void RunAdam(KernelComputeContext* c) {
  if (IsSkipped(c)) return;
  const AdamArgs p = ReadAdamArgs(c);
  const float* diff = In(c, "model_diff");
  float *model = Out(c, "model"), *m = Out(c, "m"), *v = Out(c, "v"), *top = c->Attr<bool>("amsgrad") ? Out(c, "max_v") : nullptr;
  ForRanges(Size(c, "model"), kLightGrain, [=](int64_t i, int64_t end) {
    g_maths->Adam(&p, diff + i, model + i, m + i, v + i, top == nullptr ? nullptr : top + i, end - i);
  });
}
inline void RunMultiAdam(KernelComputeContext* c) {
  if (IsSkipped(c)) return;
  const AdamArgs p = ReadAdamArgs(c);
  ForModels(c, [&](int i, int64_t at, int64_t count) {
    g_maths->Adam(&p, In(c, "model_diff", i) + at, Changed(c, "model", i) + at, Changed(c, "m", i) + at,
                  Changed(c, "v", i) + at, nullptr, count);
  });
}

inline double SumOfSquares(const float* x, int64_t n) {
  return SumPieces(n, [=](int64_t at, int64_t count) { return g_maths->SumSquares(x + at, 0.0f, count); });
}

// The norms have a relative error of about 1e-7. OneFlow adds the squares one by one in float32, which is less exact.
inline void RunLamb(KernelComputeContext* c) {
  if (IsSkipped(c)) return;
  AdamArgs p = ReadAdamArgs(c);
  const bool corrects = c->Attr<bool>("do_bias_correction");
  p.step = corrects ? Given(c, "bias_correction1", "bias_correction1_val") : 1.0f;
  if (!corrects) p.root2 = 1.0f;
  const int64_t n = Size(c, "model");
  const float* diff = In(c, "model_diff");
  float *w = Out(c, "model"), *m = Out(c, "m"), *v = Out(c, "v"), *d = ScratchFor(0, n);
  ForRanges(n, kLightGrain, [=](int64_t i, int64_t end) {
    g_maths->LambDirection(&p, diff + i, w + i, m + i, v + i, d + i, end - i);
  });
  const float of_w = __builtin_sqrtf(static_cast<float>(SumOfSquares(w, n)));
  const float of_d = __builtin_sqrtf(static_cast<float>(SumOfSquares(d, n)));
  const float rate = p.rate * (of_w > 0.0f && of_d > 0.0f ? of_w / of_d : 1.0f);
  ForRanges(n, kLightGrain, [=](int64_t i, int64_t end) { g_maths->LambStep(d + i, w + i, rate, p.decay, end - i); });
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
inline MomentumArgs ReadAllMomentumArgs(KernelComputeContext* c) {
  MomentumArgs p = ReadMomentumArgs(c);
  p.beta = c->Attr<float>("beta");
  p.dampening = c->Attr<float>("dampening");
  p.is_nesterov = c->Attr<bool>("nesterov");
  p.maximizes = c->Attr<bool>("maximize");
  return p;
}
inline void RunSgd(KernelComputeContext* c) {
  if (IsSkipped(c)) return;
  const MomentumArgs p = ReadMomentumArgs(c);
  const float* diff = In(c, "model_diff");
  float* model = Out(c, "model");
  ForRanges(Size(c, "model"), kLightGrain,
            [=](int64_t i, int64_t end) { g_maths->Sgd(&p, diff + i, model + i, end - i); });
}
inline void RunMultiSgd(KernelComputeContext* c) {
  if (IsSkipped(c)) return;
  const MomentumArgs p = ReadMomentumArgs(c);
  ForModels(c, [&](int i, int64_t at, int64_t count) {
    g_maths->Sgd(&p, In(c, "model_diff", i) + at, Changed(c, "model", i) + at, count);
  });
}
inline void RunMomentum(KernelComputeContext* c) {
  if (IsSkipped(c)) return;
  const MomentumArgs p = ReadAllMomentumArgs(c);
  const float* diff = In(c, "model_diff");
  float *model = Out(c, "model"), *momentum = Out(c, "momentum");
  ForRanges(Size(c, "model"), kLightGrain, [=](int64_t i, int64_t end) {
    g_maths->Momentum(&p, diff + i, model + i, momentum + i, end - i);
  });
}
inline void RunMultiMomentum(KernelComputeContext* c) {
  if (IsSkipped(c)) return;
  const MomentumArgs p = ReadAllMomentumArgs(c);
  ForModels(c, [&](int i, int64_t at, int64_t count) {
    g_maths->Momentum(&p, In(c, "model_diff", i) + at, Changed(c, "model", i) + at, Changed(c, "momentum_buf", i) + at, count);
  });
}

// y = the sum of |x|^p over all numbers of all inputs
inline void RunSumPowAbs(KernelComputeContext* c) {
  const float p = c->Attr<float>("p");
  double total = 0.0;
  for (int i = 0; i < static_cast<int>(c->inputs().size()); ++i) {
    const float* x = In(c, "x", i);
    const int64_t n = Count(c, "x", i);
    if (p == 2.0f) total += SumOfSquares(x, n);
    else if (p == 1.0f) total += SumPieces(n, [=](int64_t at, int64_t count) { return g_maths->SumAbs(x + at, count); });
    else for (int64_t k = 0; k < n; ++k) total += std::pow(std::fabs(static_cast<double>(x[k])), p);
  }
  *Out(c, "y") = static_cast<float>(total);
}
inline void RunMaxAbs(KernelComputeContext* c) {
  float top = 0.0f;
  for (int i = 0; i < static_cast<int>(c->inputs().size()); ++i) {
    const float next = g_maths->MaxAbs(In(c, "x", i), Count(c, "x", i));
    if (!(next <= top)) top = next;
    if (top != top) break;
  }
  *Out(c, "y") = top;
}

inline void RegisterUpdates() {
  Register("adam_update", "model", &RunAdam, &HasFloatGradient, true);
  Register("sgd_update", "model", &RunSgd, &HasFloatGradient, true);
  Register("momentum_update", "model", &RunMomentum, &HasFloatGradient, true);
  Register("lamb_update", "model", &RunLamb, &HasFloatGradient, true);
  Register("multi_tensor_adam_update", "model", &RunMultiAdam, &HasFloatGradient, true);
  Register("multi_tensor_sgd_update", "model", &RunMultiSgd, &HasFloatGradient, true);
  Register("multi_tensor_momentum_update", "model", &RunMultiMomentum, &HasFloatGradient, true);
  Register("multi_reduce_sum_pow_abs", "x", &RunSumPowAbs);
  Register("multi_reduce_max_abs", "x", &RunMaxAbs);
  Register("local_multi_reduce_max_abs", "x", &RunMaxAbs);
}

}  // namespace libai
