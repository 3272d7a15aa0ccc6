// Convolutions of 1 to 3 axes and their gradients, without a matrix of patches: the channels of a pixel are made neighbours, and
// pixels that see the same taps of the filter are computed together, several at a time, from where their inputs lie.
#pragma once
#include <algorithm>

#include "register.h"

namespace libai {

// Memory that a thread keeps from call to call, unless it is much.
class Scratch {
 public:
  ~Scratch() { std::free(memory_); }
  // For `count` numbers, not set; valid until the next call.
  float* Get(int64_t count) {
    if (count > size_ || (size_ > kKept && count <= kKept)) {
      std::free(memory_);
      size_ = (count + 15) / 16 * 16;
      memory_ = static_cast<float*>(std::aligned_alloc(64, std::max<int64_t>(size_, 16) * sizeof(float)));
      CHECK(memory_ != nullptr) << "no memory for a convolution";
    }
    return memory_;
  }

 private:
  static constexpr int64_t kKept = 16 << 20;
  float* memory_ = nullptr;
  int64_t size_ = 0;
};
inline float* ScratchFor(int use, int64_t count) {
  thread_local Scratch scratch[3];
  return scratch[use].Get(count);
}

constexpr int64_t kWidth = 32;  // of the blocks of channels that are computed at a time

inline int64_t RoundUp(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
inline int64_t WidthOf(int64_t channels) { return channels <= kWidth / 2 ? kWidth / 2 : kWidth; }

// One of the three axes of images and filter.
struct ConvAxis {
  int64_t x, y, k, stride, padding, dilation;  // sizes of input, output and filter

  // The position in the input that tap `tap` of output `at` reads, -1 for none; or, backwards, the other way round.
  int64_t Source(int64_t at, int64_t tap, bool is_backward) const {
    if (!is_backward) {
      const int64_t i = at * stride - padding + tap * dilation;
      return i < x ? i : -1;
    }
    const int64_t i = at + padding - tap * dilation;
    return i >= 0 && i % stride == 0 && i / stride < y ? i / stride : -1;
  }
};

struct ConvShape {
  int64_t samples, groups, c, o;  // channels of a group, of input and output
  ConvAxis axis[3];

  int64_t Pixels(int64_t ConvAxis::*size) const { return axis[0].*size * (axis[1].*size) * (axis[2].*size); }

  ConvShape(KernelComputeContext* ctx, const char* x, const char* y) {
    const auto xs = ctx->Tensor4ArgNameAndIndex(x, 0)->shape_view(), ys = ctx->Tensor4ArgNameAndIndex(y, 0)->shape_view();
    const auto &kernel = ctx->Attr<std::vector<int32_t>>("kernel_size"), &stride = ctx->Attr<std::vector<int32_t>>("strides");
    const auto& padding = ctx->Attr<std::vector<int32_t>>("padding_before");
    const auto& dilation = ctx->Attr<std::vector<int32_t>>("dilation_rate");
    samples = xs.At(0);
    groups = ctx->Attr<int32_t>("groups");
    c = xs.At(1) / groups;
    o = ys.At(1) / groups;
    const int n = static_cast<int>(kernel.size());
    for (int i = 0; i < 3; ++i) {
      const int own = i - (3 - n);  // the last axes; those before are of size 1
      axis[i] = own < 0 ? ConvAxis{1, 1, 1, 1, 0, 1}
                        : ConvAxis{xs.At(2 + own), ys.At(2 + own), kernel[own], stride[own], padding[own], dilation[own]};
    }
  }
};

// Positions of an axis that see the same taps, at the same distances from `base`.
struct AxisClass {
  std::vector<std::pair<int64_t, int64_t>> taps;       // tap, shift from the base
  std::vector<std::pair<int64_t, int64_t>> positions;  // position, base
};
inline std::vector<AxisClass> Classes(const ConvAxis& a, bool is_backward) {
  std::vector<AxisClass> classes;
  for (int64_t at = 0; at < (is_backward ? a.x : a.y); ++at) {
    const int64_t base = is_backward ? at / a.stride : at * a.stride;
    std::vector<std::pair<int64_t, int64_t>> taps;
    for (int64_t tap = 0; tap < a.k; ++tap) {
      const int64_t source = a.Source(at, tap, is_backward);
      if (source >= 0) taps.emplace_back(tap, source - base);
    }
    auto same = std::find_if(classes.begin(), classes.end(), [&](const AxisClass& c) { return c.taps == taps; });
    if (same == classes.end()) same = classes.insert(same, AxisClass{std::move(taps), {}});
    same->positions.emplace_back(at, base);
  }
  return classes;
}

// Pixels of the first samples that see the same taps.
struct PixelClass {
  std::vector<ConvTap> taps;
  std::vector<int64_t> from, to;  // a pixel's base in the source and its place in the result, in pixels
};
inline std::vector<PixelClass> PixelClasses(const ConvShape& s, int64_t samples, bool is_backward) {
  std::vector<AxisClass> classes[3];
  for (int i = 0; i < 3; ++i) classes[i] = Classes(s.axis[i], is_backward);
  const auto from_size = is_backward ? &ConvAxis::y : &ConvAxis::x, to_size = is_backward ? &ConvAxis::x : &ConvAxis::y;
  const int64_t h_from = s.axis[1].*from_size, w_from = s.axis[2].*from_size;
  const int64_t h_to = s.axis[1].*to_size, w_to = s.axis[2].*to_size;
  std::vector<PixelClass> result;
  for (const auto& d : classes[0])
    for (const auto& h : classes[1])
      for (const auto& w : classes[2]) {
        PixelClass p;
        for (const auto& kd : d.taps)
          for (const auto& kh : h.taps)
            for (const auto& kw : w.taps)
              p.taps.push_back({(kd.second * h_from + kh.second) * w_from + kw.second,
                                (kd.first * s.axis[1].k + kh.first) * s.axis[2].k + kw.first});
        for (int64_t n = 0; n < samples; ++n)
          for (const auto& pd : d.positions)
            for (const auto& ph : h.positions)
              for (const auto& pw : w.positions) {
                p.from.push_back(((n * s.axis[0].*from_size + pd.second) * h_from + ph.second) * w_from + pw.second);
                p.to.push_back(((n * s.axis[0].*to_size + pd.first) * h_to + ph.first) * w_to + pw.first);
              }
        result.push_back(std::move(p));
      }
  return result;
}

// Channels of each pixel as neighbours: y (samples, pixels, stride), of x (samples, …, pixels) with `step` numbers to a sample.
inline void ChannelsLast(const float* x, int64_t step, float* y, int64_t stride, int64_t samples, int64_t channels,
                         int64_t pixels) {
  for (int64_t n = 0; n < samples; ++n)
    g_maths->Transpose(x + n * step, pixels, y + n * pixels * stride, stride, channels, pixels);
}

// The output, or backwards the gradient of the input, of each group of channels in turn.
inline void Convolve(const ConvShape& s, bool is_backward, const float* x, const float* filter, const float* bias,
                     const float* add, float* y) {
  const int64_t num_taps = s.Pixels(&ConvAxis::k), inputs = is_backward ? s.o : s.c, outputs = is_backward ? s.c : s.o;
  const int64_t x_pixels = s.Pixels(is_backward ? &ConvAxis::y : &ConvAxis::x);
  const int64_t y_pixels = s.Pixels(is_backward ? &ConvAxis::x : &ConvAxis::y);
  if (s.samples * y_pixels * outputs == 0) return;
  const int64_t width = WidthOf(outputs), num_blocks = RoundUp(outputs, width) / width;
  const int64_t block = std::min(s.samples, std::max<int64_t>(1, 1024 / y_pixels));  // samples at a time
  auto classes = PixelClasses(s, block, is_backward);
  for (auto& p : classes) {
    for (auto& tap : p.taps) tap = {tap.x_shift * inputs, tap.w_shift * width};
    for (auto& from : p.from) from *= inputs;
    for (auto& to : p.to) to *= width;
  }
  float* w = ScratchFor(0, num_blocks * inputs * num_taps * width);  // (blocks, inputs, taps, width)
  float* xs = ScratchFor(1, block * x_pixels * inputs);              // (samples, pixels, inputs)
  float* ys = ScratchFor(2, block * y_pixels * width + width);       // (samples, pixels, width)
  float* start = ys + block * y_pixels * width;
  // as many channels and taps at a time as stay in the first cache with their weights
  const int64_t channels_at_a_time = std::min<int64_t>(inputs, 256), taps_at_a_time = std::max<int64_t>(1, 256 / channels_at_a_time);
  for (int64_t g = 0; g < s.groups; ++g) {
    const float* of_group = filter + g * s.o * s.c * num_taps;
    if (outputs % width != 0) std::memset(w, 0, num_blocks * inputs * num_taps * width * sizeof(float));
    for (int64_t b = 0; b < num_blocks; ++b) {
      const int64_t first = b * width, count = std::min(width, outputs - first);
      float* to = w + b * inputs * num_taps * width;
      if (!is_backward) {
        g_maths->Transpose(of_group + first * inputs * num_taps, inputs * num_taps, to, width, count, inputs * num_taps);
      } else {
        for (int64_t i = 0; i < inputs; ++i)
          g_maths->Transpose(of_group + (i * outputs + first) * num_taps, num_taps, to + i * num_taps * width, width, count,
                             num_taps);
      }
    }
    for (int64_t n = 0; n < s.samples; n += block) {
      const int64_t samples = std::min(block, s.samples - n), all_inputs = s.groups * inputs * x_pixels;
      ChannelsLast(x + n * all_inputs + g * inputs * x_pixels, all_inputs, xs, inputs, samples, inputs, x_pixels);
      for (int64_t b = 0; b < num_blocks; ++b) {
        const int64_t first = b * width, count = std::min(width, outputs - first);
        std::memset(start, 0, width * sizeof(float));
        if (bias != nullptr) std::memcpy(start, bias + g * outputs + first, count * sizeof(float));
        for (const auto& p : classes) {
          const int64_t pixels = static_cast<int64_t>(p.to.size()) / block * samples, taps = p.taps.size();
          ConvRun run{xs, nullptr, start, ys, nullptr, 0, 0, num_taps * width, width};
          for (int64_t c = 0; c == 0 || c < inputs; c += channels_at_a_time)
            for (int64_t t = 0; t == 0 || t < taps; t += taps_at_a_time) {
              run.x = xs + c;
              run.w = w + (b * inputs + c) * num_taps * width;
              run.taps = p.taps.data() + t;
              run.num_taps = std::min(taps_at_a_time, taps - t);
              run.channels = std::min(channels_at_a_time, inputs - c);
              g_maths->ConvPixels(&run, p.from.data(), p.to.data(), pixels);
              run.start = nullptr;
            }
        }
        for (int64_t i = 0; i < samples; ++i) {
          const int64_t to = (((n + i) * s.groups + g) * outputs + first) * y_pixels;
          g_maths->Transpose(ys + i * y_pixels * width, width, y + to, y_pixels, y_pixels, count);
          if (add != nullptr) g_maths->AddLine(y + to, 1, add + to, 1, y + to, count * y_pixels);
        }
      }
    }
  }
}

// The outputs that read an input at tap `tap`: first and last + 1.
inline std::pair<int64_t, int64_t> ReadersOf(const ConvAxis& a, int64_t tap) {
  int64_t first = 0, end = a.y;
  while (first < end && a.Source(first, tap, false) < 0) ++first;
  while (end > first && a.Source(end - 1, tap, false) < 0) --end;
  return {first, end};
}

inline void FilterGradient(const ConvShape& s, const float* dy, const float* x, float* dfilter) {
  const int64_t num_taps = s.Pixels(&ConvAxis::k), x_pixels = s.Pixels(&ConvAxis::x), y_pixels = s.Pixels(&ConvAxis::y);
  const int64_t c_stride = RoundUp(s.c, kWidth / 2), o_stride = s.o;
  const int64_t block = std::min(s.samples, std::max<int64_t>(1, 1024 / std::max<int64_t>(y_pixels, 1)));
  const int64_t sums = num_taps * o_stride * c_stride;
  float* dw = ScratchFor(0, sums);  // (taps, outputs, inputs)
  float* xs = ScratchFor(1, block * x_pixels * c_stride);
  float* gs = ScratchFor(2, block * y_pixels * o_stride);
  std::memset(xs, 0, block * x_pixels * c_stride * sizeof(float));
  std::vector<int64_t> x_at, dy_at;
  const ConvAxis &d = s.axis[0], &h = s.axis[1], &w = s.axis[2];
  for (int64_t g = 0; g < s.groups; ++g) {
    std::memset(dw, 0, sums * sizeof(float));
    for (int64_t n = 0; n < s.samples && y_pixels > 0; n += block) {
      const int64_t samples = std::min(block, s.samples - n);
      ChannelsLast(x + (n * s.groups + g) * s.c * x_pixels, s.groups * s.c * x_pixels, xs, c_stride, samples, s.c, x_pixels);
      ChannelsLast(dy + (n * s.groups + g) * s.o * y_pixels, s.groups * s.o * y_pixels, gs, o_stride, samples, s.o, y_pixels);
      for (int64_t tap = 0; tap < num_taps; ++tap) {
        const int64_t kd = tap / (h.k * w.k), kh = tap / w.k % h.k, kw = tap % w.k;
        const auto in_d = ReadersOf(d, kd), in_h = ReadersOf(h, kh), in_w = ReadersOf(w, kw);
        x_at.clear();
        dy_at.clear();
        for (int64_t i = 0; i < samples; ++i)
          for (int64_t yd = in_d.first; yd < in_d.second; ++yd)
            for (int64_t yh = in_h.first; yh < in_h.second; ++yh) {
              const int64_t xd = d.Source(yd, kd, false), xh = h.Source(yh, kh, false), xw = w.Source(in_w.first, kw, false);
              x_at.push_back((((i * d.x + xd) * h.x + xh) * w.x + xw) * c_stride);
              dy_at.push_back((((i * d.y + yd) * h.y + yh) * w.y + in_w.first) * o_stride);
            }
        const int64_t count = in_w.second - in_w.first;
        if (count <= 0 || x_at.empty()) continue;
        const FilterRun run{gs, xs, dw + tap * o_stride * c_stride, dy_at.data(), x_at.data(), static_cast<int64_t>(x_at.size()),
                            count, o_stride, w.stride * c_stride, c_stride, s.o, c_stride};
        g_maths->ConvFilter(&run);
      }
    }
    for (int64_t o = 0; o < s.o; ++o)
      g_maths->Transpose(dw + o * c_stride, o_stride * c_stride, dfilter + (g * s.o + o) * s.c * num_taps, num_taps, num_taps,
                         s.c);
  }
}

inline void RunConv(KernelComputeContext* c) {
  Convolve(ConvShape(c, "in", "out"), false, In(c, "in"), In(c, "weight"), MaybeIn(c, "bias"), MaybeIn(c, "_add_to_output"),
           Out(c, "out"));
}
inline void RunConvDataGrad(KernelComputeContext* c) {
  Convolve(ConvShape(c, "dx", "dy"), true, In(c, "dy"), In(c, "filter"), nullptr, MaybeIn(c, "_add_to_output"), Out(c, "dx"));
}
inline void RunConvFilterGrad(KernelComputeContext* c) {
  FilterGradient(ConvShape(c, "x", "dy"), In(c, "dy"), In(c, "x"), Out(c, "filter_diff"));
}

inline bool HasChannelsFirst(const KernelRegContext& c) { return c.Attr<std::string>("data_format") == "channels_first"; }

inline void RegisterConvolutions() {
  for (const char* op : {"conv1d", "conv2d", "conv3d"}) Register(op, "in", &RunConv, &HasChannelsFirst);
  Register("conv_data_grad", "dy", &RunConvDataGrad, &HasChannelsFirst);
  Register("conv_filter_grad", "dy", &RunConvFilterGrad, &HasChannelsFirst);
}

}  // namespace libai
