// Batch norm and biases, which have one number for each channel.
#pragma once
#include "register.h"

namespace libai {

// The shape of a tensor with any axes, seen as (samples, channels, inner). If `inner` is small, a row is a whole sample
// and the number of each channel is repeated `inner` times. Otherwise, a row is one channel of a sample.
struct Channels {
  int64_t samples = 1, channels, inner = 1;
  bool is_wide;  // a row is a whole sample

  template<typename Shape>
  Channels(const Shape& shape, int64_t axis) : channels(shape.At(axis)) {
    for (int64_t i = 0; i < axis; ++i) samples *= shape.At(i);
    for (int64_t i = axis + 1; i < shape.NumAxes(); ++i) inner *= shape.At(i);
    is_wide = inner < 32;
  }
  int64_t Count() const { return samples * inner; }  // numbers in a channel
  int64_t Row() const { return is_wide ? channels * inner : inner; }

  // Returns `of_channel` (channels,), with each number repeated if a row is a whole sample.
  std::vector<float> Widened(const float* of_channel) const {
    if (!is_wide) return std::vector<float>(of_channel, of_channel + channels);
    std::vector<float> wide(channels * inner);
    for (int64_t i = 0; i < channels * inner; ++i) wide[i] = of_channel[i / inner];
    return wide;
  }
  // Calls `run(offset, channel)` for all rows, on several threads. `channel` is 0 if a row is a whole sample.
  template<typename Function>
  void ForAll(const Function& run) const {
    ForRows(is_wide ? samples : samples * channels, Row(), kLightGrain, [&](int64_t i, int64_t end) {
      for (; i < end; ++i) run(i * Row(), is_wide ? 0 : i % channels);
    });
  }
  // Returns a sum for each channel. `line(offset, channel)` returns the sum over one channel of a sample; `add(offset,
  // rows, sums)` adds whole samples to `sums`. The order of the float32 additions depends only on the sizes.
  template<typename Line, typename Add>
  std::vector<double> Sums(const Line& line, const Add& add) const {
    std::vector<double> sums(channels, 0.0);
    if (!is_wide) {
      ForRows(channels, Count(), kLightGrain, [&](int64_t c, int64_t end) {
        for (int64_t n = 0; n < samples; ++n)
          for (int64_t i = c; i < end; ++i) sums[i] += line((n * channels + i) * inner, i);
      });
      return sums;
    }
    const int64_t length = std::max<int64_t>(16, std::min<int64_t>(256, samples / 8)), num_parts = (samples + length - 1) / length;
    std::vector<float> parts(num_parts * Row(), 0.0f);
    ForRows(num_parts, length * Row(), kLightGrain, [&](int64_t i, int64_t end) {
      for (; i < end; ++i) add(i * length * Row(), std::min(length, samples - i * length), parts.data() + i * Row());
    });
    for (int64_t part = 0; part < num_parts; ++part)
      for (int64_t i = 0; i < Row(); ++i) sums[i / inner] += parts[part * Row() + i];
    return sums;
  }
};

inline std::vector<double> SumsOf(const Channels& s, const float* x) {
  return s.Sums([&](int64_t at, int64_t) { return g_maths->SumAll(x + at, s.inner); },
                [&](int64_t at, int64_t rows, float* y) { g_maths->AddRows(x + at, y, rows, s.Row()); });
}
// Returns each channel's sum of dy (x - mean), or of (x - mean)^2 if dy is null.
inline std::vector<double> SumsOfProducts(const Channels& s, const float* dy, const float* x, const float* mean) {
  const std::vector<float> wide = s.Widened(mean);
  return s.Sums(
      [&](int64_t at, int64_t c) {
        return dy == nullptr ? g_maths->SumSquares(x + at, mean[c], s.inner)
                             : g_maths->SumProducts(dy + at, x + at, mean[c], s.inner);
      },
      [&](int64_t at, int64_t rows, float* y) {
        g_maths->AddProducts(dy == nullptr ? nullptr : dy + at, x + at, wide.data(), y, rows, s.Row());
      });
}

inline void RunBatchNorm(KernelComputeContext* c) {
  const Channels s(c->Tensor4ArgNameAndIndex("x", 0)->shape_view(), c->Attr<int32_t>("axis"));
  const float *x = In(c, "x"), *gamma = MaybeIn(c, "gamma"), *beta = MaybeIn(c, "beta");
  const float epsilon = c->Attr<float>("epsilon"), momentum = c->Attr<float>("momentum");
  const bool is_training = c->Attr<bool>("training"), has_moving = Has(c, "moving_mean");
  float* moving_mean = has_moving ? Out(c, "moving_mean") : nullptr;
  float* moving_variance = has_moving ? Out(c, "moving_variance") : nullptr;
  std::vector<float> mean(s.channels), scale(s.channels), shift(s.channels, 0.0f);
  if (is_training) {
    const std::vector<double> sums = SumsOf(s, x);
    for (int64_t i = 0; i < s.channels; ++i) mean[i] = static_cast<float>(sums[i] / s.Count());
    const std::vector<double> squares = SumsOfProducts(s, nullptr, x, mean.data());
    float *kept_mean = Out(c, "mean"), *inv = Out(c, "inv_variance");
    for (int64_t i = 0; i < s.channels; ++i) {
      kept_mean[i] = mean[i];
      scale[i] = inv[i] = static_cast<float>(1.0 / std::sqrt(squares[i] / s.Count() + epsilon));
      if (!has_moving) continue;
      const float variance = static_cast<float>(squares[i] / (s.Count() - 1));
      moving_mean[i] = moving_mean[i] * momentum + mean[i] * (1.0f - momentum);
      moving_variance[i] = moving_variance[i] * momentum + variance * (1.0f - momentum);
    }
  } else {
    std::copy(moving_mean, moving_mean + s.channels, mean.begin());
    for (int64_t i = 0; i < s.channels; ++i) scale[i] = 1.0f / std::sqrt(moving_variance[i] + epsilon);
  }
  for (int64_t i = 0; gamma != nullptr && i < s.channels; ++i) scale[i] *= gamma[i];
  if (beta != nullptr) std::copy(beta, beta + s.channels, shift.begin());
  const auto wide_mean = s.Widened(mean.data()), wide_scale = s.Widened(scale.data()), wide_shift = s.Widened(shift.data());
  float* y = Out(c, "y");
  s.ForAll([&](int64_t at, int64_t i) {
    g_maths->Affine(x + at, &wide_mean[i], &wide_scale[i], &wide_shift[i], s.is_wide, y + at, s.Row());
  });
  if (Has(c, "_add_to_output")) g_maths->AddLine(y, 1, In(c, "_add_to_output"), 1, y, s.Count() * s.channels);
}

inline void RunBatchNormGrad(KernelComputeContext* c) {
  const Channels s(c->Tensor4ArgNameAndIndex("x", 0)->shape_view(), c->Attr<int32_t>("axis"));
  const float *x = In(c, "x"), *dy = In(c, "dy"), *gamma = In(c, "gamma"), *mean = In(c, "mean"), *inv = In(c, "inv_variance");
  const std::vector<double> sums = SumsOf(s, dy), products = SumsOfProducts(s, dy, x, mean);
  float *dgamma = Out(c, "gamma_diff"), *dbeta = Out(c, "beta_diff"), *dx = Out(c, "dx");
  std::vector<float> of_dy(s.channels), of_x(s.channels), rest(s.channels);
  for (int64_t i = 0; i < s.channels; ++i) {
    dgamma[i] = static_cast<float>(products[i] * inv[i]);
    dbeta[i] = static_cast<float>(sums[i]);
    const double k = static_cast<double>(gamma[i]) * inv[i];
    of_dy[i] = static_cast<float>(k);
    of_x[i] = static_cast<float>(-k * inv[i] * inv[i] * products[i] / s.Count());
    rest[i] = static_cast<float>(-k * sums[i] / s.Count());
  }
  const auto m = s.Widened(mean), a = s.Widened(of_dy.data()), b = s.Widened(of_x.data()), d = s.Widened(rest.data());
  s.ForAll([&](int64_t at, int64_t i) {
    g_maths->AffineGrad(dy + at, x + at, &m[i], &a[i], &b[i], &d[i], s.is_wide, dx + at, s.Row());
  });
}

// out = a + b, with one number of b for each channel
inline void RunBiasAdd(KernelComputeContext* c) {
  const Channels s(c->Tensor4ArgNameAndIndex("a", 0)->shape_view(), c->Attr<int32_t>("axis"));
  const float* a = In(c, "a");
  const std::vector<float> b = s.Widened(In(c, "b"));
  float* out = Out(c, "out");
  s.ForAll([&](int64_t at, int64_t i) { g_maths->AddLine(a + at, 1, &b[i], s.is_wide, out + at, s.Row()); });
}

inline void RegisterChannels() {
  Register("normalization", "x", &RunBatchNorm);
  Register("normalization_grad", "x", &RunBatchNormGrad);
  Register("bias_add", "a", &RunBiasAdd);
}

}  // namespace libai
