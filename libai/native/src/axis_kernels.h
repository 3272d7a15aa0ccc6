// Copies that take each output from one input or fill it, where each axis decides on its own: padding, slices, flips
// and rolls, and their gradients. Also concatenation and its gradient.
#pragma once
#include <algorithm>

#include "pointwise_kernels.h"

namespace libai {

// Fills y from x. `from(axis, i, length)` returns the index along an axis of x, which has this length, for index i of y.
// Outside of the axis, y gets `fill`.
template<typename Function>
void CopyByAxis(KernelComputeContext* c, const char* x_name, const char* y_name, float fill, const Function& from) {
  const auto xs = c->Tensor4ArgNameAndIndex(x_name, 0)->shape_view(), ys = c->Tensor4ArgNameAndIndex(y_name, 0)->shape_view();
  const int64_t last = ys.NumAxes() - 1, width = last < 0 ? 1 : ys.At(last), count = ys.elem_cnt();
  if (count == 0) return;
  std::vector<std::vector<int64_t>> offsets(last + 1);  // in x, or -1 to fill
  for (int64_t axis = last, step = 1; axis >= 0; step *= xs.At(axis--))
    for (int64_t i = 0; i < ys.At(axis); ++i) {
      const int64_t at = from(axis, i, xs.At(axis));
      offsets[axis].push_back(at < 0 || at >= xs.At(axis) ? -1 : at * step);
    }
  if (last < 0) offsets.push_back({0});
  const auto& columns = offsets.back();
  std::vector<int64_t> ends;  // of runs of columns that are filled or contiguous in x
  for (int64_t i = 1; i <= width; ++i)
    if (i == width || columns[i] != (columns[i - 1] < 0 ? -1 : columns[i - 1] + 1)) ends.push_back(i);
  const float* const x = In(c, x_name);
  float* const y = Out(c, y_name);
  ForRows(count / width, width, kLightGrain, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      int64_t base = 0;
      for (int64_t axis = last - 1, rest = row; axis >= 0 && base >= 0; rest /= ys.At(axis--)) {
        const int64_t offset = offsets[axis][rest % ys.At(axis)];
        base = offset < 0 ? -1 : base + offset;
      }
      float* const to = y + row * width;
      int64_t i = 0;
      for (int64_t run_end : ends) {
        if (base < 0 || columns[i] < 0) {
          std::fill(to + i, to + run_end, fill);
        } else {
          std::copy(x + base + columns[i], x + base + columns[i] + run_end - i, to + i);
        }
        i = run_end;
      }
    }
  });
}

inline void RunPad(KernelComputeContext* c) {  // its gradient has negative padding
  const auto& before = c->Attr<std::vector<int64_t>>("padding_before");
  CopyByAxis(c, "x", "y", Number(c, "floating_constant_value"), [&](int64_t axis, int64_t i, int64_t) { return i - before[axis]; });
}
inline void RunSliceGrad(KernelComputeContext* c) {
  const auto &start = c->Attr<std::vector<int64_t>>("start"), &step = c->Attr<std::vector<int64_t>>("step");
  CopyByAxis(c, "dy", "dx", 0.0f, [&](int64_t axis, int64_t i, int64_t) {
    const int64_t steps = i - start[axis];
    return steps < 0 || steps % step[axis] != 0 ? -1 : steps / step[axis];
  });
}
inline void RunFlip(KernelComputeContext* c) {
  const auto& dims = c->Attr<std::vector<int32_t>>("dims");
  CopyByAxis(c, "x", "y", 0.0f, [&](int64_t axis, int64_t i, int64_t length) {
    return std::find(dims.begin(), dims.end(), axis) == dims.end() ? i : length - 1 - i;
  });
}
inline void RunRoll(KernelComputeContext* c) {
  const auto &dims = c->Attr<std::vector<int32_t>>("dims"), &shifts = c->Attr<std::vector<int32_t>>("shifts");
  if (dims[0] == -1) {  // a roll of all elements in order
    const int64_t n = Size(c, "in"), first = n == 0 ? 0 : (shifts[0] % n + n) % n;
    std::copy(In(c, "in"), In(c, "in") + n - first, Out(c, "out") + first);
    std::copy(In(c, "in") + n - first, In(c, "in") + n, Out(c, "out"));
    return;
  }
  CopyByAxis(c, "in", "out", 0.0f, [&](int64_t axis, int64_t i, int64_t length) {
    for (size_t k = 0; k < dims.size(); ++k) i -= dims[k] == axis ? shifts[k] : 0;
    return (i % length + length) % length;
  });
}

// Copies between a tensor and the tensors that lie side by side in it along an axis.
template<bool joins>
void RunJoin(KernelComputeContext* c) {
  const auto whole = c->Tensor4ArgNameAndIndex(joins ? "out" : "in", 0);
  const int64_t axis = c->Attr<int64_t>("axis"), length = whole->shape_view().At(axis), count = whole->shape_view().elem_cnt();
  int64_t inner = 1, first = 0;
  for (int64_t i = axis + 1; i < whole->shape_view().NumAxes(); ++i) inner *= whole->shape_view().At(i);
  const int num_parts = static_cast<int>(joins ? c->inputs().size() : c->outputs().size());
  for (int k = 0; k < num_parts; ++k) {
    auto* part = c->Tensor4ArgNameAndIndex(joins ? "in" : "out", k);
    const int64_t width = part->shape_view().At(axis) * inner, row_width = length * inner;
    if (width * count == 0) continue;
    ForRows(count / row_width, width, kLightGrain, [&](int64_t row, int64_t end) {
      for (; row < end; ++row) {
        const int64_t at = row * row_width + first, own = row * width;
        if (joins) {
          std::memcpy(whole->mut_dptr<float>() + at, part->dptr<float>() + own, width * sizeof(float));
        } else {
          std::memcpy(part->mut_dptr<float>() + own, whole->dptr<float>() + at, width * sizeof(float));
        }
      }
    });
    first += width;
  }
}

inline void RegisterAxes() {
  Register("pad", "x", &RunPad);
  Register("slice_grad", "dy", &RunSliceGrad);
  Register("flip", "x", &RunFlip);
  Register("roll", "in", &RunRoll);
  Register("concat", "out", &RunJoin<true>);
  Register("split_like", "in", &RunJoin<false>);
}

}  // namespace libai
