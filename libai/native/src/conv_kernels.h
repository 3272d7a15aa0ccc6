// Convolutions of 1 to 3 axes and their gradients, without a matrix of patches. The channels of each pixel are made
// contiguous. Pixels that use the same taps of the filter are then computed together, several at a time.
#pragma once
#include <algorithm>

#include "scratch.h"

namespace libai {

constexpr int64_t kWidth = 32;  // channels in a block that is computed at a time

inline int64_t RoundUp(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
inline int64_t WidthOf(int64_t channels) { return channels <= kWidth / 2 ? kWidth / 2 : kWidth; }

// One of the three axes of the images and the filter.
struct ConvAxis {
  int64_t x, y, k, stride, padding, dilation;  // x, y and k: the sizes of input, output and filter

  // Forward, the input position that tap `tap` of output `at` reads. Backward, the output position whose tap `tap`
  // reads input `at`. Negative if there is no such position.
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
  int64_t samples, groups, c, o;  // c and o: the input and output channels of a group
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
      const int own = i - (3 - n);  // the tensors have only the last axes; earlier axes have size 1
      axis[i] = own < 0 ? ConvAxis{1, 1, 1, 1, 0, 1}
                        : ConvAxis{xs.At(2 + own), ys.At(2 + own), kernel[own], stride[own], padding[own], dilation[own]};
    }
  }
};

// Positions of an axis that use the same taps, at the same distances from their bases.
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

// Pixels of the first samples that use the same taps.
struct PixelClass {
  std::vector<ConvTap> taps;
  std::vector<int64_t> from, to;  // each pixel's base in the source and its position in the result, in pixels
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

// Copies x (samples, …, pixels), which has `step` numbers per sample, to y (samples, pixels, stride). This makes the
// channels of each pixel contiguous.
inline void ChannelsLast(const float* x, int64_t step, float* y, int64_t stride, int64_t samples, int64_t channels,
                         int64_t pixels) {
  for (int64_t n = 0; n < samples; ++n)
    g_maths->Transpose(x + n * step, pixels, y + n * pixels * stride, stride, channels, pixels);
}

constexpr double kPartWork = 3e5;    // the minimum multiplications in a part of a split loop: about 5 us
constexpr double kPackingWork = 8;   // the cost of packing a number for the loops, in multiplications
constexpr int64_t kPixelsAtATime = 1024;

// Calls `run(begin, end)` for ranges of `n` items that take `work` multiplications in total.
template<typename Function>
void ForWork(int64_t n, double work, const Function& run) {
  ForRanges(n, std::max<int64_t>(1, static_cast<int64_t>(kPartWork * n / std::max(work, 1.0))), run, work);
}

// Computes the output or, if `is_backward`, the gradient of the input.
class Convolution {
 public:
  Convolution(const ConvShape& shape, bool is_backward)
      : s(shape), is_backward(is_backward), num_taps(s.Pixels(&ConvAxis::k)), inputs(is_backward ? s.o : s.c),
        outputs(is_backward ? s.c : s.o), x_pixels(s.Pixels(is_backward ? &ConvAxis::y : &ConvAxis::x)),
        y_pixels(s.Pixels(is_backward ? &ConvAxis::x : &ConvAxis::y)), width(WidthOf(outputs)),
        num_blocks(RoundUp(outputs, width) / width), samples_at_a_time(SamplesAtATime()) {}

  void Run(const float* x, const float* filter, const float* bias, const float* add, float* y) {
    if (s.samples * y_pixels * outputs == 0) return;
    classes = PixelClasses(s, samples_at_a_time, is_backward);
    for (auto& p : classes) {
      for (auto& tap : p.taps) tap = {tap.x_shift * inputs, tap.w_shift * width};
      for (auto& from : p.from) from *= inputs;
      for (auto& to : p.to) to *= width;
    }
    const int64_t weights = inputs * num_taps * width;  // in a block of outputs
    float* const w = ScratchFor(0, s.groups * num_blocks * weights);
    ForWork(s.groups * num_blocks, kPackingWork * s.groups * num_blocks * weights, [&](int64_t i, int64_t end) {
      for (; i < end; ++i) Pack(filter + i / num_blocks * s.o * s.c * num_taps, i % num_blocks * width, w + i * weights);
    });
    const int64_t steps = (s.samples + samples_at_a_time - 1) / samples_at_a_time;
    const double work = static_cast<double>(s.samples) * y_pixels * s.groups * outputs * inputs * num_taps;
    ForWork(s.groups * steps, work, [&](int64_t i, int64_t end) {
      for (; i < end; ++i) {
        const int64_t group = i / steps;
        Compute(group, i % steps * samples_at_a_time, x, w + group * num_blocks * weights, bias, add, y);
      }
    });
  }

 private:
  // As many samples as stay in the cache, but few enough to make parts for all threads. If possible, a part has at
  // least 64 pixels, which are computed together.
  int64_t SamplesAtATime() const {
    const int64_t pixels = std::max<int64_t>(1, y_pixels), threads = NumThreads();
    const int64_t most = std::max<int64_t>(1, kPixelsAtATime / pixels), least = (64 + pixels - 1) / pixels;
    const int64_t parts = threads == 1 ? 1 : kPartsPerThread * threads;
    const int64_t of_a_part = std::max(least, (s.samples * s.groups + parts - 1) / parts);
    return std::max<int64_t>(1, std::min({s.samples, most, of_a_part}));
  }
  // Packs the weights of the `width` outputs from `first` on as (inputs, taps, width).
  void Pack(const float* of_group, int64_t first, float* to) const {
    const int64_t count = std::min(width, outputs - first), step = num_taps * width;
    if (count < width) std::memset(to, 0, inputs * step * sizeof(float));
    if (!is_backward) {
      g_maths->Transpose(of_group + first * inputs * num_taps, inputs * num_taps, to, width, count, inputs * num_taps);
      return;
    }
    for (int64_t i = 0; i < inputs; ++i)
      g_maths->Transpose(of_group + (i * outputs + first) * num_taps, num_taps, to + i * step, width, count, num_taps);
  }
  // Computes some samples, from sample `n` on, of a group of channels. `w` contains its packed weights.
  void Compute(int64_t group, int64_t n, const float* x, const float* w, const float* bias, const float* add, float* y) const {
    const int64_t samples = std::min(samples_at_a_time, s.samples - n), of_sample = s.groups * inputs * x_pixels;
    float* xs = ScratchFor(1, samples_at_a_time * x_pixels * inputs);         // (samples, pixels, inputs)
    float* ys = ScratchFor(2, samples_at_a_time * y_pixels * width + width);  // (samples, pixels, width)
    float* start = ys + samples_at_a_time * y_pixels * width;
    ChannelsLast(x + n * of_sample + group * inputs * x_pixels, of_sample, xs, inputs, samples, inputs, x_pixels);
    for (int64_t b = 0; b < num_blocks; ++b) {
      const int64_t first = b * width, count = std::min(width, outputs - first);
      std::memset(start, 0, width * sizeof(float));
      if (bias != nullptr) std::memcpy(start, bias + group * outputs + first, count * sizeof(float));
      for (const auto& p : classes) ComputeClass(p, samples, xs, w + b * inputs * num_taps * width, start, ys);
      for (int64_t i = 0; i < samples; ++i) {
        const int64_t to = (((n + i) * s.groups + group) * outputs + first) * y_pixels;
        g_maths->Transpose(ys + i * y_pixels * width, width, y + to, y_pixels, y_pixels, count);
        if (add != nullptr) g_maths->AddLine(y + to, 1, add + to, 1, y + to, count * y_pixels);
      }
    }
  }
  // Computes as many channels and taps at a time as stay in the first-level cache together with their weights.
  void ComputeClass(const PixelClass& p, int64_t samples, const float* xs, const float* w, const float* start, float* ys) const {
    const int64_t channels = std::min<int64_t>(inputs, 256), most_taps = std::max<int64_t>(1, 256 / channels);
    const int64_t pixels = static_cast<int64_t>(p.to.size()) / samples_at_a_time * samples, taps = p.taps.size();
    ConvRun run{xs, w, start, ys, nullptr, 0, 0, num_taps * width, width};
    for (int64_t c = 0; c == 0 || c < inputs; c += channels)
      for (int64_t t = 0; t == 0 || t < taps; t += most_taps) {
        run.x = xs + c;
        run.w = w + c * num_taps * width;
        run.taps = p.taps.data() + t;
        run.num_taps = std::min(most_taps, taps - t);
        run.channels = std::min(channels, inputs - c);
        g_maths->ConvPixels(&run, p.from.data(), p.to.data(), pixels);
        run.start = nullptr;
      }
  }

  const ConvShape& s;
  const bool is_backward;
  const int64_t num_taps, inputs, outputs, x_pixels, y_pixels, width, num_blocks, samples_at_a_time;
  std::vector<PixelClass> classes;
};

// The range of outputs whose tap `tap` reads an input: the first output, and the last output + 1.
inline std::pair<int64_t, int64_t> ReadersOf(const ConvAxis& a, int64_t tap) {
  int64_t first = 0, end = a.y;
  while (first < end && a.Source(first, tap, false) < 0) ++first;
  while (end > first && a.Source(end - 1, tap, false) < 0) --end;
  return {first, end};
}

class FilterGradient {
 public:
  explicit FilterGradient(const ConvShape& shape)
      : s(shape), num_taps(s.Pixels(&ConvAxis::k)), x_pixels(s.Pixels(&ConvAxis::x)), y_pixels(s.Pixels(&ConvAxis::y)),
        c_stride(RoundUp(s.c, kWidth / 2)),
        samples_at_a_time(std::min(s.samples, std::max<int64_t>(1, kPixelsAtATime / std::max<int64_t>(y_pixels, 1)))) {
    for (int64_t tap = 0; tap < num_taps; ++tap) lines.push_back(LinesOf(tap));
  }

  void Run(const float* dy, const float* x, float* dfilter) const {
    const double work = static_cast<double>(s.groups) * s.samples * y_pixels * num_taps * s.o * s.c;
    ForWork(s.groups, work, [&](int64_t group, int64_t end) {
      const int64_t inputs = samples_at_a_time * x_pixels * c_stride;
      float* const xs = ScratchFor(1, inputs);
      std::memset(xs, 0, inputs * sizeof(float));  // also the gap between the channels and the stride
      for (; group < end; ++group) RunGroup(group, dy, x, xs, dfilter + group * s.o * s.c * num_taps);
    });
  }

 private:
  // The positions of the pixels of x and dy that meet at a tap, in lines along the last axis.
  struct Lines {
    std::vector<int64_t> x_at, dy_at;
    int64_t count;  // pixels of each line
  };
  Lines LinesOf(int64_t tap) const {
    const ConvAxis &d = s.axis[0], &h = s.axis[1], &w = s.axis[2];
    const int64_t kd = tap / (h.k * w.k), kh = tap / w.k % h.k, kw = tap % w.k;
    const auto in_d = ReadersOf(d, kd), in_h = ReadersOf(h, kh), in_w = ReadersOf(w, kw);
    Lines found{{}, {}, in_w.second - in_w.first};
    for (int64_t i = 0; found.count > 0 && i < samples_at_a_time; ++i)
      for (int64_t yd = in_d.first; yd < in_d.second; ++yd)
        for (int64_t yh = in_h.first; yh < in_h.second; ++yh) {
          const int64_t xd = d.Source(yd, kd, false), xh = h.Source(yh, kh, false), xw = w.Source(in_w.first, kw, false);
          found.x_at.push_back((((i * d.x + xd) * h.x + xh) * w.x + xw) * c_stride);
          found.dy_at.push_back((((i * d.y + yd) * h.y + yh) * w.y + in_w.first) * s.o);
        }
    return found;
  }
  void RunGroup(int64_t group, const float* dy, const float* x, float* xs, float* dfilter) const {
    const int64_t sums = num_taps * s.o * c_stride, of_x = s.groups * s.c * x_pixels, of_dy = s.groups * s.o * y_pixels;
    float* const dw = ScratchFor(0, sums);  // (taps, outputs, inputs)
    float* const gs = ScratchFor(2, samples_at_a_time * y_pixels * s.o);
    std::memset(dw, 0, sums * sizeof(float));
    for (int64_t n = 0; n < s.samples && y_pixels > 0; n += samples_at_a_time) {
      const int64_t samples = std::min(samples_at_a_time, s.samples - n);
      const float *from_x = x + n * of_x + group * s.c * x_pixels, *from_dy = dy + n * of_dy + group * s.o * y_pixels;
      ForWork(samples, kPackingWork * samples * (s.c * x_pixels + s.o * y_pixels), [&](int64_t i, int64_t end) {
        ChannelsLast(from_x + i * of_x, of_x, xs + i * x_pixels * c_stride, c_stride, end - i, s.c, x_pixels);
        ChannelsLast(from_dy + i * of_dy, of_dy, gs + i * y_pixels * s.o, s.o, end - i, s.o, y_pixels);
      });
      AddSamples(samples, gs, xs, dw);
    }
    ForWork(s.o, kPackingWork * s.o * s.c * num_taps, [&](int64_t o, int64_t end) {
      for (; o < end; ++o)
        g_maths->Transpose(dw + o * c_stride, s.o * c_stride, dfilter + o * s.c * num_taps, num_taps, num_taps, s.c);
    });
  }
  // Every number of dw is a sum over pixels in a fixed order, whichever thread computes it.
  void AddSamples(int64_t samples, const float* gs, const float* xs, float* dw) const {
    constexpr int64_t kRows = 24;  // outputs in a part: whole tiles for every instruction set
    const int64_t of_tap = (s.o + kRows - 1) / kRows;
    const double work = static_cast<double>(samples) * y_pixels * num_taps * s.o * s.c;
    ForWork(num_taps * of_tap, work, [&](int64_t i, int64_t end) {
      for (; i < end; ++i) {
        const Lines& at = lines[i / of_tap];
        const int64_t row = i % of_tap * kRows, num_lines = static_cast<int64_t>(at.x_at.size()) / samples_at_a_time * samples;
        if (num_lines == 0) continue;
        const FilterRun run{gs + row, xs, dw + (i / of_tap * s.o + row) * c_stride, at.dy_at.data(), at.x_at.data(), num_lines,
                            at.count, s.o, s.axis[2].stride * c_stride, c_stride, std::min(kRows, s.o - row), c_stride};
        g_maths->ConvFilter(&run);
      }
    });
  }

  const ConvShape& s;
  const int64_t num_taps, x_pixels, y_pixels, c_stride, samples_at_a_time;
  std::vector<Lines> lines;  // one entry for each tap
};

}  // namespace libai
