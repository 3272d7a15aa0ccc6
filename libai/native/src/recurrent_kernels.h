// LSTM, GRU and plain recurrent layers over whole sequences: all layers and directions in one operation (see recurrent.cpp).
#pragma once
#include "product_kernels.h"

namespace libai {

enum RecurrentKind { kLstm = 0, kGru = 1, kRnnTanh = 2, kRnnRelu = 3 };

// The sizes of a network, and the layout of `reserve`, which keeps what the gradient needs: for each layer and direction the gates
// (steps, batch, gate_width) and `extra` (steps, batch, hidden), the cells of an LSTM or the hidden part of a GRU's third gate;
// for each layer but the last its outputs (steps, batch, directions * hidden).
struct RecurrentSizes {
  int kind;
  bool has_bias;
  int64_t steps, batch, inputs, hidden, layers, directions;

  int64_t GateWidth() const { return hidden * (kind == kLstm ? 4 : kind == kGru ? 3 : 1); }
  bool HasExtra() const { return kind == kLstm || kind == kGru; }
  int64_t Width() const { return directions * hidden; }
  int64_t Rows() const { return steps * batch; }
  int64_t InputsOf(int64_t layer) const { return layer == 0 ? inputs : Width(); }
  int64_t PerUnit() const { return Rows() * (GateWidth() + (HasExtra() ? hidden : 0)); }
  int64_t PerLayer() const { return directions * PerUnit() + Rows() * Width(); }
  int64_t Reserve() const { return layers * PerLayer() - Rows() * Width(); }
  int64_t Gates(int64_t layer, int64_t direction) const { return layer * PerLayer() + direction * PerUnit(); }
  int64_t Extra(int64_t layer, int64_t direction) const { return Gates(layer, direction) + Rows() * GateWidth(); }
  int64_t Output(int64_t layer) const { return layer * PerLayer() + directions * PerUnit(); }
  int WeightsPerUnit() const { return has_bias ? 4 : 2; }
  int WeightOf(int64_t layer, int64_t direction, int i) const {
    return static_cast<int>((layer * directions + direction) * WeightsPerUnit() + i);
  }
  double StepWork() const { return static_cast<double>(Rows()) * directions * GateWidth() * hidden; }
};

// A right factor that many small products share, packed once in the panels of tiles.h. Each panel has an unused first row, because
// `ProductRun` adds to its result only from the second row on.
class PackedFactor {
 public:
  static int64_t Size(int64_t n, int64_t k) { return n * (k + 1); }
  // b: (n, k) if it is transposed, else (k, n) with rows `b_row` numbers apart.
  PackedFactor(const float* b, bool transposes, int64_t b_row, int64_t n, int64_t k, float* memory) : memory_(memory), n_(n), k_(k) {
    const int64_t width_of_panel = Product::BlockOf(n).width;
    for (int64_t first = 0, width; first < n; first += width) {
      width = n - first > width_of_panel + width_of_panel / 2 ? width_of_panel : n - first;
      float* const at = memory + first * (k + 1) + width;
      if (transposes) {
        g_maths->Transpose(b + first * b_row, b_row, at, width, width, k);
      } else {
        g_maths->CopyRows(b + first, b_row, at, k, width);
      }
    }
  }
  // c (rows, n) = a (rows, k) b, or c += a b
  void Multiply(const float* a, int64_t a_row, int64_t rows, bool adds, float* c, int64_t c_row) const {
    if (n_ < 8) return MultiplyNarrow(a, a_row, rows, adds, c, c_row);
    const auto block = Product::BlockOf(n_);
    const int64_t num_blocks = (k_ + block.terms - 1) / block.terms, block_terms = (k_ + num_blocks - 1) / num_blocks;
    if (!adds) {
      for (int64_t r = 0; r < rows; ++r) std::memset(c + r * c_row, 0, n_ * sizeof(float));
    }
    const ProductRun run{a, memory_, c, a_row, 1, 0, k_ + 1, c_row, rows, 1, k_, block_terms, n_};
    Loops()->Multiply(&run);
  }

 private:
  const Maths* Loops() const { return n_ < 16 && g_maths == &kMathsAvx512 ? &kMathsAvx2 : g_maths; }
  void MultiplyNarrow(const float* a, int64_t a_row, int64_t rows, bool adds, float* c, int64_t c_row) const {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < n_; ++i) {
        float sum = 0.0f;
        for (int64_t j = 0; j < k_; ++j) sum += a[r * a_row + j] * memory_[(j + 1) * n_ + i];
        c[r * c_row + i] = adds ? c[r * c_row + i] + sum : sum;
      }
  }
  float* memory_;
  int64_t n_, k_;
};

inline float* RecurrentScratch(int64_t count) {
  thread_local Scratch scratch;
  return scratch.Get(count);
}

inline float* RecurrentScratch2(int64_t count) {
  thread_local Scratch scratch;
  return scratch.Get(count);
}

inline RecurrentSizes ReadSizes(KernelComputeContext* c) {
  const auto x = c->Tensor4ArgNameAndIndex("x", 0)->shape_view(), h = c->Tensor4ArgNameAndIndex("h0", 0)->shape_view();
  RecurrentSizes s;
  s.kind = c->Attr<int32_t>("kind");
  s.has_bias = c->Attr<bool>("has_bias");
  s.steps = x.At(0);
  s.batch = x.At(1);
  s.inputs = x.At(2);
  s.directions = c->Attr<bool>("bidirectional") ? 2 : 1;
  s.layers = h.At(0) / s.directions;
  s.hidden = h.At(2);
  return s;
}
inline float* OutAt(KernelComputeContext* c, const char* name, int index) {
  return c->Tensor4ArgNameAndIndex(name, index)->mut_dptr<float>();
}

// Calls `run(direction, first, rows)` for ranges of the batch, which are independent of one another. A thread takes all steps of its
// rows, so threads need not wait for one another at each step.
template<typename Function>
void ForUnits(const RecurrentSizes& s, const Function& run) {
  constexpr int64_t kTile = 8;
  const int64_t n = s.directions * s.batch, most = std::min<int64_t>(NumThreads(), (n + kTile - 1) / kTile);
  const int64_t length = RoundUp((n + most - 1) / most, kTile / 2), parts = (n + length - 1) / length;
  ForRanges(parts, 1, [&](int64_t part, int64_t end) {
    for (int64_t at = part * length, stop = std::min(end * length, n), next; at < stop; at = next) {
      const int64_t direction = at / s.batch;
      next = std::min(stop, (direction + 1) * s.batch);
      run(direction, at - direction * s.batch, next - at);
    }
  }, s.StepWork());
}

// Multiplies the output of a layer, or its gradient, by the layer's part of the mask (batch, layers - 1, steps, width).
inline void ApplyMask(const RecurrentSizes& s, const float* x, const float* mask, int64_t layer, float* y) {
  const int64_t width = s.Width();
  ForRows(s.Rows(), width, kLightGrain, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      const int64_t t = row / s.batch, b = row % s.batch;
      g_maths->MulLine(x + row * width, 1, mask + ((b * (s.layers - 1) + layer) * s.steps + t) * width, 1, y + row * width, width);
    }
  });
}

inline void RunRecurrent(KernelComputeContext* c) {
  const RecurrentSizes s = ReadSizes(c);
  if (s.Rows() == 0) return;
  const int64_t G = s.GateWidth(), H = s.hidden, B = s.batch, T = s.steps, width = s.Width();
  float* const reserve = static_cast<float*>(c->Tensor4ArgNameAndIndex("reserve", 0)->mut_raw_dptr());
  const float *h0 = In(c, "h0"), *c0 = MaybeIn(c, "c0"), *mask = MaybeIn(c, "mask");
  float *hn = Out(c, "hn"), *cn = s.kind == kLstm ? Out(c, "cn") : nullptr;
  const int64_t factor = PackedFactor::Size(G, H), dropped = mask != nullptr ? s.Rows() * width : 0;
  float* const memory = RecurrentScratch(s.directions * factor + G + dropped);
  float* const bias = memory + s.directions * factor;
  const float* x = In(c, "x");
  for (int64_t layer = 0; layer < s.layers; ++layer) {
    float* const y = layer == s.layers - 1 ? Out(c, "y") : reserve + s.Output(layer);
    if (layer > 0 && mask != nullptr) {
      float* const to = bias + G;
      ApplyMask(s, x, mask, layer - 1, to);
      x = to;
    }
    const float *hidden_bias[2] = {nullptr, nullptr};
    std::vector<PackedFactor> factors, thirds;
    for (int64_t d = 0; d < s.directions; ++d) {
      const float *w_in = In(c, "w", s.WeightOf(layer, d, 0)), *w_hidden = In(c, "w", s.WeightOf(layer, d, 1));
      if (s.has_bias) {
        const float *b_in = In(c, "w", s.WeightOf(layer, d, 2)), *b_hidden = In(c, "w", s.WeightOf(layer, d, 3));
        const int64_t common = s.kind == kGru ? 2 * H : G;
        g_maths->AddLine(b_in, 1, b_hidden, 1, bias, common);
        for (int64_t i = common; i < G; ++i) bias[i] = b_in[i];
        hidden_bias[d] = b_hidden + common;
      }
      Product{false, true, 1.0f, s.has_bias ? bias : nullptr, nullptr, s.Rows(), G, s.InputsOf(layer)}(x, w_in, reserve + s.Gates(layer, d));
      float* const packed = memory + d * factor;
      const int64_t common = s.kind == kGru ? 2 * H : G;
      factors.emplace_back(w_hidden, true, H, common, H, packed);
      if (s.kind == kGru) thirds.emplace_back(w_hidden + common * H, true, H, H, H, packed + PackedFactor::Size(common, H));
    }
    ForUnits(s, [&](int64_t d, int64_t first, int64_t rows) {
      float *const gates = reserve + s.Gates(layer, d) + first * G, *const extra = reserve + s.Extra(layer, d) + first * H;
      const int64_t state = ((layer * s.directions + d) * B + first) * H;
      const float *h = h0 + state, *cell = c0 != nullptr ? c0 + state : nullptr;
      int64_t h_row = H;
      float* out = nullptr;
      for (int64_t i = 0; i < T; ++i) {
        const int64_t t = d == 1 ? T - 1 - i : i;
        float *const gate = gates + t * B * G, *const more = extra + t * B * H;
        out = y + (t * B + first) * width + d * H;
        factors[d].Multiply(h, h_row, rows, true, gate, G);
        if (s.kind == kLstm) {
          g_maths->LstmStep(gate, cell, more, out, width, rows, H);
          cell = more;
        } else if (s.kind == kGru) {
          thirds[d].Multiply(h, h_row, rows, false, more, H);
          g_maths->GruStep(gate, more, hidden_bias[d], h, h_row, out, width, rows, H);
        } else {
          g_maths->RnnStep(gate, out, width, s.kind == kRnnRelu, rows, H);
        }
        h = out;
        h_row = width;
      }
      g_maths->CopyRows(out, width, hn + state, rows, H);
      if (cn != nullptr) std::memcpy(cn + state, cell, rows * H * sizeof(float));
    });
    x = y;
  }
}

inline void RunRecurrentGrad(KernelComputeContext* c) {
  const RecurrentSizes s = ReadSizes(c);
  const int64_t G = s.GateWidth(), H = s.hidden, B = s.batch, T = s.steps, width = s.Width();
  if (s.Rows() == 0) {
    for (const auto& output : c->outputs()) {
      auto* tensor = c->Tensor4ArgNameAndIndex(output.first, output.second);
      std::memset(tensor->mut_raw_dptr(), 0, tensor->shape_view().elem_cnt() * sizeof(float));
    }
    return;
  }
  const float* const reserve = static_cast<const float*>(c->Tensor4ArgNameAndIndex("reserve", 0)->raw_dptr());
  const float *h0 = In(c, "h0"), *c0 = MaybeIn(c, "c0"), *dhn = In(c, "dhn"), *dcn = MaybeIn(c, "dcn"), *mask = MaybeIn(c, "mask");
  float *dh0 = Out(c, "dh0"), *dc0 = c0 != nullptr ? Out(c, "dc0") : nullptr;
  float* const dx_first = c->has_output("dx", 0) ? Out(c, "dx") : nullptr;
  const int64_t unit = s.Rows() * G, outputs = s.Rows() * width, state_size = B * H;
  const int64_t hidden_units = s.kind == kGru ? 2 : 1;
  // dgates of each direction (and the hidden gates' of a GRU), h of the previous steps, dy of a layer (twice), packed factors
  const int64_t factor = PackedFactor::Size(H, G);
  float* at = RecurrentScratch(s.directions * (hidden_units * unit + factor) + s.Rows() * H + 2 * outputs + (mask != nullptr ? outputs : 0));
  const auto take = [&](int64_t count) { float* const memory = at; at += count; return memory; };
  float *dgates[2] = {}, *dhidden[2] = {}, *packed[2] = {};
  for (int64_t d = 0; d < s.directions; ++d) {
    dgates[d] = take(unit);
    dhidden[d] = s.kind == kGru ? take(unit) : dgates[d];
    packed[d] = take(factor);
  }
  float* const before = take(s.Rows() * H);
  float* dys[2] = {take(outputs), take(outputs)};
  float* const dropped = mask != nullptr ? take(outputs) : nullptr;
  const float* dy = In(c, "dy");
  for (int64_t layer = s.layers - 1; layer >= 0; --layer) {
    const float* const y = layer == s.layers - 1 ? In(c, "y") : reserve + s.Output(layer);
    std::vector<PackedFactor> factors;
    for (int64_t d = 0; d < s.directions; ++d) factors.emplace_back(In(c, "w", s.WeightOf(layer, d, 1)), false, H, H, G, packed[d]);
    ForUnits(s, [&](int64_t d, int64_t first, int64_t rows) {
      const float *const gates = reserve + s.Gates(layer, d) + first * G, *const extra = reserve + s.Extra(layer, d) + first * H;
      const int64_t state = ((layer * s.directions + d) * B + first) * H;
      float *const dh = dh0 + state, *const dc = dc0 != nullptr ? dc0 + state : nullptr;
      std::memcpy(dh, dhn + state, rows * H * sizeof(float));
      if (dc != nullptr) std::memcpy(dc, dcn + state, rows * H * sizeof(float));
      for (int64_t i = T - 1; i >= 0; --i) {
        const int64_t t = d == 1 ? T - 1 - i : i, previous = d == 1 ? t + 1 : t - 1;
        const float *const gate = gates + t * B * G, *const more = extra + t * B * H;
        const float *const out = dy + (t * B + first) * width + d * H, *const h_now = y + (t * B + first) * width + d * H;
        float *const dgate = dgates[d] + (t * B + first) * G, *const dpart = dhidden[d] + (t * B + first) * G;
        if (s.kind == kLstm) {
          g_maths->LstmStepGrad(gate, i == 0 ? c0 + state : extra + previous * B * H, more, dh, out, width, dc, dgate, rows, H);
        } else if (s.kind == kGru) {
          const float* const h = i == 0 ? h0 + state : y + (previous * B + first) * width + d * H;
          g_maths->GruStepGrad(gate, more, h, i == 0 ? H : width, dh, out, width, dgate, dpart, rows, H);
        } else {
          g_maths->RnnStepGrad(h_now, width, dh, out, width, dgate, s.kind == kRnnRelu, rows, H);
        }
        factors[d].Multiply(dpart, G, rows, s.kind == kGru, dh, H);
      }
    });
    const float* x = layer == 0 ? In(c, "x") : reserve + s.Output(layer - 1);
    const int64_t inputs = s.InputsOf(layer);
    float* const dx = layer == 0 ? dx_first : dys[layer % 2];
    if (dx != nullptr) {
      for (int64_t d = 0; d < s.directions; ++d) {  // the second direction's product is computed apart and added
        float* const to = d == 0 ? dx : RecurrentScratch2(s.Rows() * inputs);
        Product{false, false, 1.0f, nullptr, nullptr, s.Rows(), inputs, G}(dgates[d], In(c, "w", s.WeightOf(layer, d, 0)), to);
        if (d == 1) {
          ForRanges(s.Rows() * inputs, kLightGrain, [&](int64_t i, int64_t end) { g_maths->AddLine(dx + i, 1, to + i, 1, dx + i, end - i); });
        }
      }
    }
    if (layer > 0 && mask != nullptr) {
      ApplyMask(s, x, mask, layer - 1, dropped);
      ApplyMask(s, dx, mask, layer - 1, dx);
      x = dropped;
    }
    for (int64_t d = 0; d < s.directions; ++d) {
      const int64_t state = (layer * s.directions + d) * state_size;
      std::memcpy(before + (d == 1 ? (T - 1) * state_size : 0), h0 + state, state_size * sizeof(float));
      if (T > 1) g_maths->CopyRows(y + (d == 1 ? B * width : 0) + d * H, width, before + (d == 1 ? 0 : state_size), (T - 1) * B, H);
      Product{true, false, 1.0f, nullptr, nullptr, G, inputs, s.Rows()}(dgates[d], x, OutAt(c, "dw", s.WeightOf(layer, d, 0)));
      Product{true, false, 1.0f, nullptr, nullptr, G, H, s.Rows()}(dhidden[d], before, OutAt(c, "dw", s.WeightOf(layer, d, 1)));
      if (s.has_bias) {
        float *const db_in = OutAt(c, "dw", s.WeightOf(layer, d, 2)), *const db_hidden = OutAt(c, "dw", s.WeightOf(layer, d, 3));
        std::memset(db_in, 0, G * sizeof(float));
        g_maths->AddRows(dgates[d], db_in, s.Rows(), G);
        if (s.kind == kGru) {
          std::memset(db_hidden, 0, G * sizeof(float));
          g_maths->AddRows(dhidden[d], db_hidden, s.Rows(), G);
        } else {
          std::memcpy(db_hidden, db_in, G * sizeof(float));
        }
      }
    }
    dy = dx;
  }
}

inline void RegisterRecurrent() {
  Register("libai_recurrent", "x", &RunRecurrent, &HasSgemm);
  Register("libai_recurrent_grad", "x", &RunRecurrentGrad, &HasSgemm);
}

}  // namespace libai
