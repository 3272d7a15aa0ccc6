// Nearest and bilinear interpolation of images, and the gradients.
#pragma once
#include <algorithm>
#include <cmath>

#include "register.h"

namespace libai {

// The two inputs that an output of an axis reads, and the weight of the second.
struct ResizeTap {
  int64_t first, second;
  float weight;
};

class Resize {
 public:
  // `x` and `y`: the names of the small and the resized images.
  Resize(KernelComputeContext* c, const char* x, const char* y, bool is_bilinear) : is_bilinear(is_bilinear) {
    const auto xs = c->Tensor4ArgNameAndIndex(x, 0)->shape_view(), ys = c->Tensor4ArgNameAndIndex(y, 0)->shape_view();
    planes = xs.At(0) * xs.At(1);
    x_w = xs.At(3);
    x_pixels = xs.At(2) * x_w;
    const bool has_size = !c->Attr<std::vector<int64_t>>("output_size").empty();
    const bool aligns_corners = is_bilinear && c->Attr<bool>("align_corners");
    lines = Taps(xs.At(2), ys.At(2), has_size ? 0.0 : c->Attr<double>("height_scale"), aligns_corners);
    columns = Taps(x_w, ys.At(3), has_size ? 0.0 : c->Attr<double>("width_scale"), aligns_corners);
  }

  void Run(const float* x, float* y) const {
    ForPlanes([&](int64_t plane) {
      float* to = y + plane * lines.size() * columns.size();
      for (const ResizeTap& line : lines) {
        const float *top = x + plane * x_pixels + line.first * x_w, *bottom = x + plane * x_pixels + line.second * x_w;
        if (!is_bilinear) {
          for (const ResizeTap& at : columns) *to++ = top[at.first];
          continue;
        }
        const float below = line.weight, above = 1.0f - below;
        for (const ResizeTap& at : columns) {
          const float right = at.weight, left = 1.0f - right;
          *to++ = above * (left * top[at.first] + right * top[at.second])
                  + below * (left * bottom[at.first] + right * bottom[at.second]);
        }
      }
    });
  }

  void RunGrad(const float* dy, float* dx) const {
    ForPlanes([&](int64_t plane) {
      float* const to = dx + plane * x_pixels;
      const float* from = dy + plane * lines.size() * columns.size();
      std::fill(to, to + x_pixels, 0.0f);
      for (const ResizeTap& line : lines) {
        float *top = to + line.first * x_w, *bottom = to + line.second * x_w;
        for (const ResizeTap& at : columns) {
          const float g = *from++, above = (1.0f - line.weight) * g, below = line.weight * g;
          if (!is_bilinear) {
            top[at.first] += g;
            continue;
          }
          top[at.first] += (1.0f - at.weight) * above;
          top[at.second] += at.weight * above;
          bottom[at.first] += (1.0f - at.weight) * below;
          bottom[at.second] += at.weight * below;
        }
      }
    });
  }

 private:
  std::vector<ResizeTap> Taps(int64_t x, int64_t y, double factor, bool aligns_corners) const {
    // OneFlow rounds the factor of the nearest pixel first
    const double exact = factor > 0.0 ? 1.0 / factor : static_cast<double>(x) / y;
    const float ratio = is_bilinear || factor <= 0.0 ? static_cast<float>(exact) : 1.0f / static_cast<float>(factor);
    const float step = !aligns_corners ? ratio : y > 1 ? static_cast<float>(x - 1) / static_cast<float>(y - 1) : 0.0f;
    std::vector<ResizeTap> taps;
    for (int64_t i = 0; i < y; ++i) {
      const float at = !is_bilinear || aligns_corners ? i * step : std::max(0.0f, (i + 0.5f) * step - 0.5f);
      const int64_t first = std::min<int64_t>(static_cast<int64_t>(std::floor(at)), x - 1);
      taps.push_back({first, std::min(first + 1, x - 1), at - static_cast<float>(first)});
    }
    return taps;
  }
  template<typename Function>
  void ForPlanes(const Function& run) const {
    ForRows(planes, 2 * lines.size() * columns.size(), kHeavyGrain, [&](int64_t plane, int64_t end) {
      for (; plane < end; ++plane) run(plane);
    });
  }

  const bool is_bilinear;
  int64_t planes, x_w, x_pixels;
  std::vector<ResizeTap> lines, columns;  // one entry for each output
};

template<bool is_bilinear>
void RunResize(KernelComputeContext* c) { Resize(c, "x", "y", is_bilinear).Run(In(c, "x"), Out(c, "y")); }
template<bool is_bilinear>
void RunResizeGrad(KernelComputeContext* c) { Resize(c, "dx", "dy", is_bilinear).RunGrad(In(c, "dy"), Out(c, "dx")); }

inline void RegisterResize() {
  const auto fits = [](const KernelRegContext& c) { return c.Attr<std::string>("data_format") == "channels_first"; };
  Register("upsample_nearest_2d", "x", &RunResize<false>, fits);
  Register("upsample_nearest_2d_grad", "dy", &RunResizeGrad<false>, fits);
  Register("upsample_bilinear_2d", "x", &RunResize<true>, fits);
  Register("upsample_bilinear_2d_grad", "dy", &RunResizeGrad<true>, fits);
}

}  // namespace libai
