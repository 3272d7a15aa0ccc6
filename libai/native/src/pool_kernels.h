// Max and mean pooling of images and sequences, and the gradients.
#pragma once
#include <algorithm>
#include <limits>

#include "register.h"

namespace libai {

// The planes of x and y (a plane is one channel of a sample) and windows over two axes. For sequences, the first axis
// has size 1.
struct PoolShape {
  int64_t planes, h, w, y_h, y_w;
  int64_t kernel[2] = {1, 1}, stride[2] = {1, 1}, padding[2] = {0, 0}, dilation[2] = {1, 1};

  // Adaptive windows have no attributes.
  PoolShape(KernelComputeContext* c, const char* x, const char* y, bool is_adaptive) {
    const auto xs = c->Tensor4ArgNameAndIndex(x, 0)->shape_view(), ys = c->Tensor4ArgNameAndIndex(y, 0)->shape_view();
    const int n = static_cast<int>(xs.NumAxes());
    const int own = is_adaptive ? 2 : static_cast<int>(c->Attr<std::vector<int32_t>>("kernel_size").size());
    h = own == 2 ? xs.At(n - 2) : 1;
    w = xs.At(n - 1);
    y_h = own == 2 ? ys.At(n - 2) : 1;
    y_w = ys.At(n - 1);
    planes = h * w == 0 ? 0 : xs.elem_cnt() / (h * w);
    for (int i = 0; !is_adaptive && i < own; ++i) {
      kernel[i + 2 - own] = c->Attr<std::vector<int32_t>>("kernel_size")[i];
      stride[i + 2 - own] = c->Attr<std::vector<int32_t>>("stride")[i];
      padding[i + 2 - own] = c->Attr<std::vector<int32_t>>("padding")[i];
    }
  }
  void ReadDilation(KernelComputeContext* c) {
    const auto& all = c->Attr<std::vector<int32_t>>("dilation");
    std::copy(all.begin(), all.end(), dilation + 2 - all.size());
  }
  // Calls `run(plane)` for all planes, on several threads. A number in a window costs several numbers of a plain loop.
  template<typename Function>
  void ForPlanes(const Function& run) const {
    ForRows(planes, std::max(h * w, y_h * y_w * kernel[0] * kernel[1]), kHeavyGrain, [&](int64_t plane, int64_t end) {
      for (; plane < end; ++plane) run(plane);
    });
  }
};

// Sets `y` to the largest number in each window of a plane, or to NaN if there is one, and `index` to its position in
// the plane. Of equal numbers, the first one counts. `s` is a copy that no store can change, so loops keep it in
// registers.
inline void MaxOfWindows(const PoolShape s, const float* x, float* y, int64_t* index) {
  for (int64_t i = 0; i < s.y_h; ++i)
    for (int64_t j = 0; j < s.y_w; ++j) {
      const int64_t top = i * s.stride[0] - s.padding[0], left = j * s.stride[1] - s.padding[1];
      const int64_t bottom = std::min(s.h, top + s.kernel[0] * s.dilation[0]);
      const int64_t right = std::min(s.w, left + s.kernel[1] * s.dilation[1]);
      const int64_t first_row = top < 0 ? top + (-top + s.dilation[0] - 1) / s.dilation[0] * s.dilation[0] : top;
      const int64_t first_column = left < 0 ? left + (-left + s.dilation[1] - 1) / s.dilation[1] * s.dilation[1] : left;
      float largest = -std::numeric_limits<float>::infinity();
      int64_t at = first_row * s.w + first_column;
      for (int64_t row = first_row; row < bottom; row += s.dilation[0])
        for (int64_t column = first_column; column < right; column += s.dilation[1]) {
          const float number = x[row * s.w + column];
          if (number > largest || number != number) {
            largest = number;
            at = row * s.w + column;
          }
        }
      *y++ = largest;
      *index++ = at;
    }
}
inline void RunMaxPool(KernelComputeContext* c) {
  PoolShape s(c, "x", "y", false);
  s.ReadDilation(c);
  const float* x = In(c, "x");
  float* y = Out(c, "y");
  int64_t* index = c->Tensor4ArgNameAndIndex("indice", 0)->mut_dptr<int64_t>();
  s.ForPlanes([&](int64_t plane) {
    const int64_t to = plane * s.y_h * s.y_w;
    MaxOfWindows(s, x + plane * s.h * s.w, y + to, index + to);
  });
}
inline void RunMaxPoolGrad(KernelComputeContext* c) {
  const PoolShape s(c, "dx", "dy", false);
  const float* dy = In(c, "dy");
  const int64_t* index = c->Tensor4ArgNameAndIndex("indice", 0)->dptr<int64_t>();
  float* dx = Out(c, "dx");
  s.ForPlanes([&](int64_t plane) {
    const int64_t of_x = s.h * s.w, of_y = s.y_h * s.y_w;
    const float* from = dy + plane * of_y;
    const int64_t* at = index + plane * of_y;
    float* to = dx + plane * of_x;
    std::memset(to, 0, of_x * sizeof(float));
    for (int64_t i = 0; i < of_y; ++i) to[at[i]] += from[i];
  });
}

// For each output along an axis: the range of inputs that it averages, and the length of its window with padding.
struct MeanAxis {
  std::vector<int64_t> first, end, length;

  MeanAxis(int64_t x, int64_t y, int64_t kernel, int64_t stride, int64_t padding) {
    for (int64_t i = 0; i < y; ++i) {
      const int64_t from = i * stride - padding, to = std::min(from + kernel, x + padding);
      Add(std::max<int64_t>(from, 0), std::min(to, x), to - from);
    }
  }
  MeanAxis(int64_t x, int64_t y) {  // y windows that cover x
    for (int64_t i = 0; i < y; ++i) Add(i * x / y, ((i + 1) * x + y - 1) / y, ((i + 1) * x + y - 1) / y - i * x / y);
  }

 private:
  void Add(int64_t from, int64_t to, int64_t count) {
    first.push_back(from);
    end.push_back(to);
    length.push_back(count);
  }
};

// Calls `run(offset of a window's row in x, its length, offset in y, divisor)` for all rows of all windows.
template<typename Function>
void ForWindows(const PoolShape& shape, const MeanAxis& rows, const MeanAxis& columns, bool counts_padding, int64_t divisor,
                const Function& run_window) {
  shape.ForPlanes([&](int64_t plane) {
    const PoolShape s = shape;  // copies that no store can change, so loops keep them in registers
    const Function run = run_window;
    for (int64_t i = 0; i < s.y_h; ++i)
      for (int64_t j = 0; j < s.y_w; ++j) {
        const int64_t width = columns.end[j] - columns.first[j], height = rows.end[i] - rows.first[i];
        const int64_t count = divisor != 0 ? divisor : counts_padding ? rows.length[i] * columns.length[j] : width * height;
        for (int64_t row = rows.first[i]; row < rows.end[i]; ++row)
          run((plane * s.h + row) * s.w + columns.first[j], width, (plane * s.y_h + i) * s.y_w + j, static_cast<float>(count));
      }
  });
}
template<typename Function>
void ForMeans(KernelComputeContext* c, const char* x, const char* y, bool is_adaptive, const Function& run) {
  const PoolShape s(c, x, y, is_adaptive);
  if (is_adaptive) return ForWindows(s, MeanAxis(s.h, s.y_h), MeanAxis(s.w, s.y_w), false, 0, run);
  const MeanAxis rows(s.h, s.y_h, s.kernel[0], s.stride[0], s.padding[0]);
  const MeanAxis columns(s.w, s.y_w, s.kernel[1], s.stride[1], s.padding[1]);
  ForWindows(s, rows, columns, c->Attr<bool>("count_include_pad"), c->Attr<int32_t>("divisor_override"), run);
}
template<bool is_adaptive>
void RunMeanPool(KernelComputeContext* c) {
  const float* x = In(c, "x");
  float* y = Out(c, "y");
  std::memset(y, 0, Size(c, "y") * sizeof(float));
  ForMeans(c, "x", "y", is_adaptive, [x, y](int64_t from, int64_t width, int64_t to, float count) {
    float sum = 0.0f;
    for (int64_t i = 0; i < width; ++i) sum += x[from + i];
    y[to] += sum / count;
  });
}
template<bool is_adaptive>
void RunMeanPoolGrad(KernelComputeContext* c) {
  const float* dy = In(c, "dy");
  float* dx = Out(c, "dx");
  std::memset(dx, 0, Size(c, "dx") * sizeof(float));
  ForMeans(c, "dx", "dy", is_adaptive, [dx, dy](int64_t to, int64_t width, int64_t from, float count) {
    const float part = dy[from] / count;
    for (int64_t i = 0; i < width; ++i) dx[to + i] += part;
  });
}

inline bool HasImagesFirst(const KernelRegContext& c) { return c.Attr<std::string>("data_format") == "channels_first"; }

inline void RegisterPools() {
  Register("max_pool_1d", "x", &RunMaxPool, &HasImagesFirst);
  Register("max_pool_2d", "x", &RunMaxPool, &HasImagesFirst);
  Register("max_pool_1d_grad", "dy", &RunMaxPoolGrad, &HasImagesFirst);
  Register("max_pool_2d_grad", "dy", &RunMaxPoolGrad, &HasImagesFirst);
  Register("avg_pool_2d", "x", &RunMeanPool<false>, &HasImagesFirst);
  Register("avg_pool_2d_grad", "dy", &RunMeanPoolGrad<false>, &HasImagesFirst);
  Register("adaptive_avg_pool2d", "x", &RunMeanPool<true>);
  Register("adaptive_avg_pool2d_grad", "dy", &RunMeanPoolGrad<true>);
}

}  // namespace libai
