// Convolutions of 1 to 3 axes in which each output channel reads one input channel: no channels to combine, so each
// plane is computed as a sum of shifted planes.
#pragma once
#include "conv_kernels.h"

namespace libai {

class Depthwise {
 public:
  explicit Depthwise(const ConvShape& shape)
      : s(shape), num_taps(s.Pixels(&ConvAxis::k)), x_pixels(s.Pixels(&ConvAxis::x)), y_pixels(s.Pixels(&ConvAxis::y)),
        planes(s.samples * s.groups * s.o), work(static_cast<double>(planes) * y_pixels * num_taps) {
    const ConvAxis &d = s.axis[0], &h = s.axis[1], &w = s.axis[2];
    const int64_t at_a_time = std::max<int64_t>(1, 4096 / std::max<int64_t>(w.y, 1));  // lines that stay in the cache
    for (int64_t yd = 0; yd < d.y; ++yd)
      for (int64_t top = 0; top < h.y; top += at_a_time)
        for (int64_t tap = 0; tap < num_taps; ++tap) AddPart(yd, top, std::min(top + at_a_time, h.y), tap);
  }

  void Run(const float* x, const float* filter, const float* bias, const float* add, float* y) const {
    ForWork(planes, work, [&](int64_t i, int64_t end) {
      for (; i < end; ++i) {
        const int64_t channel = i % (s.groups * s.o);
        float* const to = y + i * y_pixels;
        std::fill(to, to + y_pixels, bias == nullptr ? 0.0f : bias[channel]);
        for (const Part& p : parts)
          g_maths->AddShifted(x + i / s.o * x_pixels + p.x_at, XRow(), XStep(), filter[channel * num_taps + p.tap],
                              to + p.y_at, s.axis[2].y, 1, p.rows, p.count);
        if (add != nullptr) g_maths->AddLine(to, 1, add + i * y_pixels, 1, to, y_pixels);
      }
    });
  }

  void RunDataGrad(const float* dy, const float* filter, const float* add, float* dx) const {
    ForWork(s.samples * s.groups, work, [&](int64_t i, int64_t end) {
      for (; i < end; ++i) {
        float* const to = dx + i * x_pixels;
        std::fill(to, to + x_pixels, 0.0f);
        for (int64_t output = 0; output < s.o; ++output) {
          const int64_t channel = i % s.groups * s.o + output;
          for (const Part& p : parts)
            g_maths->AddShifted(dy + (i * s.o + output) * y_pixels + p.y_at, s.axis[2].y, 1,
                                filter[channel * num_taps + p.tap], to + p.x_at, XRow(), XStep(), p.rows, p.count);
        }
        if (add != nullptr) g_maths->AddLine(to, 1, add + i * x_pixels, 1, to, x_pixels);
      }
    });
  }

  void RunFilterGrad(const float* dy, const float* x, float* dfilter) const {
    const int64_t channels = s.groups * s.o;
    ForWork(channels, work, [&](int64_t channel, int64_t end) {
      for (; channel < end; ++channel) {
        std::vector<double> sums(num_taps, 0.0);
        for (int64_t n = 0; n < s.samples; ++n) {
          const float* const from = x + (n * s.groups + channel / s.o) * x_pixels;
          const float* const gradient = dy + (n * channels + channel) * y_pixels;
          for (const Part& p : parts)
            sums[p.tap] += g_maths->SumShifted(from + p.x_at, XRow(), XStep(), gradient + p.y_at, s.axis[2].y, p.rows, p.count);
        }
        for (int64_t tap = 0; tap < num_taps; ++tap) dfilter[channel * num_taps + tap] = static_cast<float>(sums[tap]);
      }
    });
  }

 private:
  // Lines of a plane that a tap reads: positions in the planes, and the numbers of lines and of outputs in a line.
  struct Part {
    int64_t x_at, y_at, rows, count, tap;
  };
  int64_t XRow() const { return s.axis[1].stride * s.axis[2].x; }
  int64_t XStep() const { return s.axis[2].stride; }
  void AddPart(int64_t yd, int64_t top, int64_t bottom, int64_t tap) {
    const ConvAxis &d = s.axis[0], &h = s.axis[1], &w = s.axis[2];
    const int64_t kd = tap / (h.k * w.k), kh = tap / w.k % h.k, kw = tap % w.k, xd = d.Source(yd, kd, false);
    const auto in_h = ReadersOf(h, kh), in_w = ReadersOf(w, kw);
    const int64_t first = std::max(top, in_h.first), rows = std::min(bottom, in_h.second) - first;
    const int64_t count = in_w.second - in_w.first;
    if (xd < 0 || rows <= 0 || count <= 0) return;
    const int64_t xh = h.Source(first, kh, false), xw = w.Source(in_w.first, kw, false);
    parts.push_back({(xd * h.x + xh) * w.x + xw, (yd * h.y + first) * w.y + in_w.first, rows, count, tap});
  }

  const ConvShape& s;
  const int64_t num_taps, x_pixels, y_pixels, planes;
  const double work;
  std::vector<Part> parts;
};

inline void RunConv(KernelComputeContext* c) {
  const ConvShape s(c, "in", "out");
  const float *x = In(c, "in"), *w = In(c, "weight"), *bias = MaybeIn(c, "bias"), *add = MaybeIn(c, "_add_to_output");
  if (s.c == 1 && s.groups > 1) return Depthwise(s).Run(x, w, bias, add, Out(c, "out"));
  Convolution(s, false).Run(x, w, bias, add, Out(c, "out"));
}
inline void RunConvDataGrad(KernelComputeContext* c) {
  const ConvShape s(c, "dx", "dy");
  const float *dy = In(c, "dy"), *w = In(c, "filter"), *add = MaybeIn(c, "_add_to_output");
  if (s.c == 1 && s.groups > 1) return Depthwise(s).RunDataGrad(dy, w, add, Out(c, "dx"));
  Convolution(s, true).Run(dy, w, nullptr, add, Out(c, "dx"));
}
inline void RunConvFilterGrad(KernelComputeContext* c) {
  const ConvShape s(c, "x", "dy");
  const float *dy = In(c, "dy"), *x = In(c, "x");
  if (s.c == 1 && s.groups > 1) return Depthwise(s).RunFilterGrad(dy, x, Out(c, "filter_diff"));
  FilterGradient(s).Run(dy, x, Out(c, "filter_diff"));
}

inline bool HasChannelsFirst(const KernelRegContext& c) { return c.Attr<std::string>("data_format") == "channels_first"; }

inline void RegisterConvolutions() {
  for (const char* op : {"conv1d", "conv2d", "conv3d"}) Register(op, "in", &RunConv, &HasChannelsFirst);
  Register("conv_data_grad", "dy", &RunConvDataGrad, &HasChannelsFirst);
  Register("conv_filter_grad", "dy", &RunConvFilterGrad, &HasChannelsFirst);
}

}  // namespace libai
