// Broadcast arithmetic, sums over axes and strided copies.
#pragma once
#include "blocks.h"
#include "pointwise_kernels.h"

namespace libai {

// ---- strided copies -----------------------------------------------------------------------------------------------

// Copies x, which has these merged axes, to y, which is contiguous.
inline void CopyMerged(const float* x, float* y, const int64_t* size, const int64_t* step, int n, int64_t count) {
  if (n == 0) {
    *y = *x;
  } else if (n == 1 && step[0] == 1) {
    std::memcpy(y, x, size[0] * sizeof(float));
  } else if (n == 1) {
    for (int64_t i = 0; i < size[0]; ++i) y[i] = x[i * step[0]];
  } else if (n == 2 && step[0] == 1 && step[1] != 0) {
    g_maths->Transpose(x, step[1], y, size[1], size[1], size[0]);
  } else if (n == 2 && step[1] == 1) {
    g_maths->CopyRows(x, step[0], y, size[0], size[1]);
  } else if (n == 3 && step[0] == 1 && step[2] != 0) {  // the first and the last axis change places
    for (int64_t i = 0; i < size[1]; ++i)
      g_maths->Transpose(x + i * step[1], step[2], y + i * size[2], size[1] * size[2], size[2], size[0]);
  } else {
    const int64_t inner = count / size[0];
    for (int64_t i = 0; i < size[0]; ++i) CopyMerged(x + i * step[0], y + i * inner, size + 1, step + 1, n - 1, inner);
  }
}

// Copies x, which has these sizes and steps, to y, which is contiguous and not empty.
inline void CopyStrided(const float* x, float* y, const int64_t* size, const int64_t* step, int64_t num_axes) {
  int64_t merged_size[kMaxAxes], merged_step[kMaxAxes], count = 1;
  int n = 0;
  for (int64_t i = 0; i < num_axes; ++i) {
    count *= size[i];
    if (size[i] == 1) continue;
    if (n > 0 && merged_step[n - 1] == step[i] * size[i]) {  // the two axes are contiguous
      merged_size[n - 1] *= size[i];
      merged_step[n - 1] = step[i];
    } else {
      merged_size[n] = size[i];
      merged_step[n++] = step[i];
    }
  }
  if (n == 0) return CopyMerged(x, y, merged_size, merged_step, n, count);
  // split the copy along its first axis
  const int64_t inner = count / merged_size[0], step_of_first = merged_step[0];
  ForRows(merged_size[0], inner, kLightGrain, [&](int64_t i, int64_t end) {
    int64_t part_size[kMaxAxes];
    std::copy(merged_size, merged_size + n, part_size);
    part_size[0] = end - i;
    CopyMerged(x + i * step_of_first, y + i * inner, part_size, merged_step, n, (end - i) * inner);
  });
}

// ---- broadcasting ---------------------------------------------------------------------------------------------------

// N shapes that are broadcast to one shape, from its last axis on. Adjacent axes are merged if every input repeats
// along both of them or along neither.
template<int N>
struct Broadcast {
  int n = 0;
  int64_t size[kMaxAxes], step[N][kMaxAxes];

  Broadcast(KernelComputeContext* c, const char* const (&names)[N], const char* out) {
    const auto zs = c->Tensor4ArgNameAndIndex(out, 0)->shape_view();
    int64_t count[N];
    for (int k = 0; k < N; ++k) count[k] = 1;
    for (int64_t i = 1; i <= zs.NumAxes(); ++i) {
      const int64_t d = zs.At(zs.NumAxes() - i);
      if (d == 1) continue;
      bool is_merged = n > 0;
      for (int k = 0; k < N; ++k) {
        const auto shape = c->Tensor4ArgNameAndIndex(names[k], 0)->shape_view();
        const int64_t own = i <= shape.NumAxes() ? shape.At(shape.NumAxes() - i) : 1;
        step[k][n] = own == 1 ? 0 : count[k];
        count[k] *= own;
        is_merged = is_merged && (step[k][n] != 0) == (step[k][n - 1] != 0);
      }
      if (is_merged) {
        size[n - 1] *= d;
      } else {
        size[n++] = d;
      }
    }
  }
};

// `Number` is float, or bool for a comparison.
template<typename Number, typename Function, Function Maths::*line>
void Walk(const Broadcast<2>& b, int n, const float* x, const float* y, Number* z, int64_t count) {
  if (n == 0) return (g_maths->*line)(x, 1, y, 1, z, 1);
  if (n == 1) return (g_maths->*line)(x, b.step[0][0] != 0, y, b.step[1][0] != 0, z, b.size[0]);
  const int64_t inner = count / b.size[n - 1];
  for (int64_t i = 0; i < b.size[n - 1]; ++i)
    Walk<Number, Function, line>(b, n - 1, x + i * b.step[0][n - 1], y + i * b.step[1][n - 1], z + i * inner, inner);
}

template<typename Number, typename Function, Function Maths::*line>
void RunLine(KernelComputeContext* c) {
  const int64_t count = Size(c, "z");
  if (count == 0) return;
  const Broadcast<2> shapes(c, {"x", "y"}, "z");
  Number* z = c->Tensor4ArgNameAndIndex("z", 0)->mut_dptr<Number>();
  const float *x = In(c, "x"), *y = In(c, "y");
  if (shapes.n == 0) return Walk<Number, Function, line>(shapes, 0, x, y, z, count);
  const int last = shapes.n - 1;  // the outermost axis
  const int64_t inner = count / shapes.size[last], x_step = shapes.step[0][last], y_step = shapes.step[1][last];
  ForRows(shapes.size[last], inner, kLightGrain, [&](int64_t i, int64_t end) {
    Broadcast<2> part = shapes;
    part.size[last] = end - i;
    Walk<Number, Function, line>(part, part.n, x + i * x_step, y + i * y_step, z + i * inner, (end - i) * inner);
  });
}

template<Binary Maths::*line>
constexpr Run kRunBinary = &RunLine<float, Binary, line>;
template<Comparison Maths::*line>
constexpr Run kRunComparison = &RunLine<bool, Comparison, line>;

template<Comparison Maths::*line>
void RunScalarComparison(KernelComputeContext* c) {
  const float operand = static_cast<float>(Operand(c));
  bool* z = c->Tensor4ArgNameAndIndex("out", 0)->mut_dptr<bool>();
  const float* x = In(c, "in");
  ForRanges(Size(c, "in"), kLightGrain,
            [&](int64_t i, int64_t end) { (g_maths->*line)(x + i, 1, &operand, 0, z + i, end - i); });
}

inline void WalkWhere(const Broadcast<3>& b, int n, const bool* condition, const float* x, const float* y, float* z,
                      int64_t count) {
  if (n == 0) return g_maths->Where(condition, 1, x, 1, y, 1, z, 1);
  const int64_t *sc = b.step[0], *sx = b.step[1], *sy = b.step[2];
  if (n == 1) return g_maths->Where(condition, sc[0] != 0, x, sx[0] != 0, y, sy[0] != 0, z, b.size[0]);
  const int64_t inner = count / b.size[n - 1];
  for (int64_t i = 0; i < b.size[n - 1]; ++i)
    WalkWhere(b, n - 1, condition + i * sc[n - 1], x + i * sx[n - 1], y + i * sy[n - 1], z + i * inner, inner);
}
inline void RunWhere(KernelComputeContext* c) {
  const int64_t count = Size(c, "out");
  if (count == 0) return;
  const Broadcast<3> shapes(c, {"condition", "x", "y"}, "out");
  const bool* condition = c->Tensor4ArgNameAndIndex("condition", 0)->dptr<bool>();
  const float *x = In(c, "x"), *y = In(c, "y");
  float* z = Out(c, "out");
  if (shapes.n == 0) return WalkWhere(shapes, 0, condition, x, y, z, count);
  const int last = shapes.n - 1;
  const int64_t inner = count / shapes.size[last], *steps[] = {shapes.step[0], shapes.step[1], shapes.step[2]};
  ForRows(shapes.size[last], inner, kLightGrain, [&](int64_t i, int64_t end) {
    Broadcast<3> part = shapes;
    part.size[last] = end - i;
    WalkWhere(part, part.n, condition + i * steps[0][last], x + i * steps[1][last], y + i * steps[2][last], z + i * inner,
              (end - i) * inner);
  });
}

// y = x, repeated along the axes that a sum has removed
inline void RunBroadcastLike(KernelComputeContext* c) {
  const auto ys = c->Tensor4ArgNameAndIndex("y", 0)->shape_view();
  const auto xs = c->Tensor4ArgNameAndIndex("x", 0)->shape_view();
  if (ys.elem_cnt() == 0) return;
  const auto& axes = c->Attr<std::vector<int32_t>>("broadcast_axes");
  const int64_t n = ys.NumAxes();
  int64_t size[kMaxAxes], step[kMaxAxes], x_size = 1;
  for (int64_t i = n - 1; i >= 0; --i) {
    const int64_t from_right = n - 1 - i;
    int64_t d = from_right < xs.NumAxes() ? xs.At(xs.NumAxes() - 1 - from_right) : 1;
    if (!axes.empty()) {
      d = ys.At(i);
      for (int32_t axis : axes) d = axis == i || axis + n == i ? 1 : d;
    }
    size[i] = ys.At(i);
    step[i] = d == 1 ? 0 : x_size;
    x_size *= d;
  }
  CopyStrided(In(c, "x"), Out(c, "y"), size, step, n);
}

// The sum of tensors with the same shape, added in order. The result may have the memory of the first tensor.
inline void RunAddN(KernelComputeContext* c) {
  std::vector<const float*> terms;
  for (int i = 0; i < static_cast<int>(c->inputs().size()); ++i) terms.push_back(In(c, "in", i));
  float* out = Out(c, "out");
  ForRanges(Size(c, "out"), kLightGrain, [&](int64_t i, int64_t end) {
    const int64_t count = end - i;
    if (terms.size() == 1) std::memmove(out + i, terms[0] + i, count * sizeof(float));
    for (size_t k = 1; k < terms.size(); ++k)
      g_maths->AddLine((k == 1 ? terms[0] : out) + i, 1, terms[k] + i, 1, out + i, count);
  });
}

// ---- sums ---------------------------------------------------------------------------------------------------------

// A sum over axes, as blocks of merged axes that are kept and reduced alternately, from the first axis on.
struct Reduction {
  int n = 0;
  int64_t size[kMaxAxes];
  bool is_reduced[kMaxAxes];

  template<typename Shape>
  Reduction(const Shape& shape, const std::vector<int32_t>& axes) {
    const int64_t num_axes = shape.NumAxes();
    for (int64_t i = 0; i < num_axes; ++i) {
      if (shape.At(i) == 1) continue;
      bool reduced = false;
      for (int32_t axis : axes) reduced = reduced || axis == i || axis + num_axes == i;
      if (n > 0 && is_reduced[n - 1] == reduced) {
        size[n - 1] *= shape.At(i);
        continue;
      }
      size[n] = shape.At(i);
      is_reduced[n++] = reduced;
    }
  }
};

inline void AddRowsInBlocks(const float* x, float* y, int64_t rows, int64_t d) {
  if (rows * d < 2 * kLightGrain) return g_maths->AddRows(x, y, rows, d);
  AddBlocks(rows, d, d, [=](int64_t r, int64_t count, float* sums) { g_maths->AddRows(x + r * d, sums, count, d); },
            [=](const float* sums) { g_maths->AddRows(sums, y, 1, d); });
}

// Adds x, summed over the blocks from `b` on, to y, which starts with zeros. Within these blocks, x has `x_count`
// numbers and y has `y_count`.
inline void AddUp(const Reduction& r, int b, const float* x, int64_t x_count, float* y, int64_t y_count) {
  if (b == r.n) {
    *y += *x;
    return;
  }
  const int64_t size = r.size[b], x_inner = x_count / size;
  if (r.is_reduced[b]) {
    if (b + 1 == r.n) {
      *y += static_cast<float>(SumPieces(size, [=](int64_t i, int64_t count) { return g_maths->SumAll(x + i, count); }));
    } else if (b + 2 == r.n) {
      AddRowsInBlocks(x, y, size, x_inner);
    } else {
      for (int64_t i = 0; i < size; ++i) AddUp(r, b + 1, x + i * x_inner, x_inner, y, y_count);
    }
    return;
  }
  if (b + 1 == r.n) return g_maths->AddRows(x, y, 1, size);
  const int64_t y_inner = y_count / size;
  for (int64_t i = 0; i < size; ++i) AddUp(r, b + 1, x + i * x_inner, x_inner, y + i * y_inner, y_inner);
}

inline void SumOver(KernelComputeContext* c, const char* x_name, const char* y_name) {
  const int64_t x_count = Size(c, x_name), y_count = Size(c, y_name);
  float* y = Out(c, y_name);
  std::memset(y, 0, y_count * sizeof(float));
  if (x_count == 0) return;
  const Reduction reduction(c->Tensor4ArgNameAndIndex(x_name, 0)->shape_view(), c->Attr<std::vector<int32_t>>("axis"));
  const float* x = In(c, x_name);
  if (reduction.n == 0 || reduction.is_reduced[0]) return AddUp(reduction, 0, x, x_count, y, y_count);
  const int64_t size = reduction.size[0], x_inner = x_count / size, y_inner = y_count / size;
  ForRows(size, x_inner, kLightGrain, [&](int64_t i, int64_t end) {
    if (reduction.n == 1) return g_maths->AddRows(x + i, y + i, 1, end - i);
    for (; i < end; ++i) AddUp(reduction, 1, x + i * x_inner, x_inner, y + i * y_inner, y_inner);
  });
}
inline void RunSum(KernelComputeContext* c) { SumOver(c, "input_tensor", "output_tensor"); }
inline void RunSumLike(KernelComputeContext* c) { SumOver(c, "x", "y"); }

// ---- copies -------------------------------------------------------------------------------------------------------

inline void RunCopy(KernelComputeContext* c) {
  const oneflow::user_op::Tensor* in = c->Tensor4ArgNameAndIndex("in", 0);
  const auto shape = in->shape_view();
  int64_t size[kMaxAxes], step[kMaxAxes];
  for (int64_t i = 0; i < shape.NumAxes(); ++i) {
    size[i] = shape.At(i);
    step[i] = in->stride()[i];
  }
  if (shape.elem_cnt() != 0) CopyStrided(In(c, "in"), Out(c, "out"), size, step, shape.NumAxes());
}
// Only for graphs, because an eager result uses the memory of its input. In a compiled step, the memory plan may have
// put both at the same place, and then there is nothing to copy.
inline void RunSameElements(KernelComputeContext* c) {
  const float* x = In(c, "in");
  float* y = Out(c, "out");
  if (x == y) return;
  ForRanges(Size(c, "in"), kLightGrain, [=](int64_t i, int64_t end) { std::memcpy(y + i, x + i, (end - i) * sizeof(float)); });
}
// Only for graphs. Eager tensors are transposed by changing their strides.
inline void RunTranspose(KernelComputeContext* c) {
  const auto xs = c->Tensor4ArgNameAndIndex("input", 0)->shape_view();
  const auto& order = c->Attr<std::vector<int32_t>>("perm");
  int64_t x_step[kMaxAxes], size[kMaxAxes], step[kMaxAxes], x_size = 1;
  for (int64_t i = xs.NumAxes() - 1; i >= 0; --i) {
    x_step[i] = x_size;
    x_size *= xs.At(i);
  }
  for (int64_t i = 0; i < xs.NumAxes(); ++i) {
    size[i] = xs.At(order[i]);
    step[i] = x_step[order[i]];
  }
  if (x_size != 0) CopyStrided(In(c, "input"), Out(c, "output"), size, step, xs.NumAxes());
}

inline void RegisterShapes() {
  Register("broadcast_add", "x", kRunBinary<&Maths::AddLine>);
  Register("broadcast_sub", "x", kRunBinary<&Maths::SubLine>);
  Register("broadcast_mul", "x", kRunBinary<&Maths::MulLine>);
  Register("broadcast_div", "x", kRunBinary<&Maths::DivLine>);
  Register("broadcast_equal", "x", kRunComparison<&Maths::EqualLine>);
  Register("broadcast_not_equal", "x", kRunComparison<&Maths::NotEqualLine>);
  Register("broadcast_less", "x", kRunComparison<&Maths::LessLine>);
  Register("broadcast_less_equal", "x", kRunComparison<&Maths::LessEqualLine>);
  Register("broadcast_greater", "x", kRunComparison<&Maths::GreaterLine>);
  Register("broadcast_greater_equal", "x", kRunComparison<&Maths::GreaterEqualLine>);
  Register("scalar_logical_equal", "in", &RunScalarComparison<&Maths::EqualLine>);
  Register("scalar_logical_not_equal", "in", &RunScalarComparison<&Maths::NotEqualLine>);
  Register("scalar_logical_less", "in", &RunScalarComparison<&Maths::LessLine>);
  Register("scalar_logical_less_equal", "in", &RunScalarComparison<&Maths::LessEqualLine>);
  Register("scalar_logical_greater", "in", &RunScalarComparison<&Maths::GreaterLine>);
  Register("scalar_logical_greater_equal", "in", &RunScalarComparison<&Maths::GreaterEqualLine>);
  Register("add_n", "out", &RunAddN);
  Register("where", "out", &RunWhere, [](const KernelRegContext& c) { return IsBool(c, "condition"); });
  Register("broadcast_like", "x", &RunBroadcastLike);
  Register("reduce_sum", "input_tensor", &RunSum);
  Register("reduce_sum_like", "x", &RunSumLike);
  Register("to_contiguous", "in", &RunCopy);
  for (const char* op : {"reshape", "flatten", "expand_dims", "squeeze", "identity"}) Register(op, "in", &RunSameElements);
  Register("transpose", "input", &RunTranspose);
}

}  // namespace libai
