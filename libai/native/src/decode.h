// One step of text generation: passes the last token of every row through all blocks of a decoder. Keys and values lie
// in memory of fixed size. One call replaces about 60 operations per block, whose overhead takes most of their time.
#pragma once
#include <cmath>

#include "product_kernels.h"

namespace libai {

// libai/inference/native_decoder.py fills these structures.
struct Linear {
  const float *weight, *bias;  // (out, in), and (out,) or null; both (in,) for a norm
};
struct DecoderBlock {
  Linear attention_norm, q, k, v, out, mlp_norm, gate, up, down;  // gate.weight is null if there is no gate
};
struct DecoderStep {
  const DecoderBlock* blocks;
  Linear norm, head;
  const float *cos, *sin;  // (rows, head_size / 2), or null for no rotation
  const float* mask;       // (rows, length), added to the scores of attention
  float* x;                // (rows, hidden), the embedded tokens; overwritten
  float *keys, *values;    // (blocks, rows, kv_heads, capacity, head_size)
  float* scores;           // (rows, vocabulary), the result
  // `length` includes the new token
  int64_t num_blocks, rows, hidden, heads, kv_heads, head_size, inner, vocabulary, capacity, length;
  double epsilon;
  int64_t is_rms, activation;  // activation: 0 silu, 1 gelu, 2 gelu approximated by tanh, 3 relu
};

class Decoding {
 public:
  explicit Decoding(const DecoderStep& step) : s_(step) {
    const int64_t width = s_.heads * s_.head_size, kv_width = s_.kv_heads * s_.head_size;
    memory_.resize(s_.rows * (s_.hidden + 2 * width + 2 * kv_width + 2 * s_.inner));
    read_ = memory_.data();
    q_ = read_ + s_.rows * s_.hidden;
    heads_ = q_ + s_.rows * width;
    k_ = heads_ + s_.rows * width;
    v_ = k_ + s_.rows * kv_width;
    gate_ = v_ + s_.rows * kv_width;
    up_ = gate_ + s_.rows * s_.inner;
  }
  void Run() {
    for (int64_t i = 0; i < s_.num_blocks; ++i) {
      Attend(s_.blocks[i], i * s_.rows * s_.kv_heads);
      RunMlp(s_.blocks[i]);
    }
    Normalise(s_.norm, read_);
    Apply(s_.head, read_, s_.hidden, s_.vocabulary, s_.scores);
  }

 private:
  void Attend(const DecoderBlock& block, int64_t first_unit) {
    const int64_t width = s_.heads * s_.head_size, kv_width = s_.kv_heads * s_.head_size, group = s_.heads / s_.kv_heads;
    Normalise(block.attention_norm, read_);
    Apply(block.q, read_, s_.hidden, width, q_);
    Apply(block.k, read_, s_.hidden, kv_width, k_);
    Apply(block.v, read_, s_.hidden, kv_width, v_);
    if (s_.cos != nullptr) {
      Rotate(q_, s_.heads);
      Rotate(k_, s_.kv_heads);
    }
    static Sharing sharing;
    SetCurrentSharing(&sharing);
    const int64_t size = s_.head_size, length = s_.length;
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
    const int64_t worth_a_part = kLightGrain / (2 * group * length * size) + 1;
    ForRanges(s_.rows * s_.kv_heads, worth_a_part, [&](int64_t unit, int64_t end) {
      for (; unit < end; ++unit) {  // the query heads of a row that share keys
        float* const keys = s_.keys + (first_unit + unit) * s_.capacity * size;
        float* const values = s_.values + (first_unit + unit) * s_.capacity * size;
        std::memcpy(keys + (length - 1) * size, k_ + unit * size, size * sizeof(float));
        std::memcpy(values + (length - 1) * size, v_ + unit * size, size * sizeof(float));
        float* const p = ScratchFor(0, group * length);
        const float* mask = s_.mask + unit / s_.kv_heads * length;
        g_maths->DotRows(q_ + unit * group * size, group, keys, length, size, scale, p, length);
        for (int64_t i = 0; i < group; ++i) g_maths->AddLine(p + i * length, 1, mask, 1, p + i * length, length);
        g_maths->Softmax(p, p, group, length);
        for (int64_t i = 0; i < group; ++i) g_maths->WeighRows(p + i * length, values, length, size, heads_ + (unit * group + i) * size);
      }
    }, static_cast<double>(s_.rows) * s_.heads * length * size);
    AddTo(block.out, heads_, width);
  }
  void RunMlp(const DecoderBlock& block) {
    const int64_t count = s_.rows * s_.inner;
    Normalise(block.mlp_norm, read_);
    Apply(block.up, read_, s_.hidden, s_.inner, up_);
    if (block.gate.weight == nullptr) {
      Activate(up_, count);
    } else {
      Apply(block.gate, read_, s_.hidden, s_.inner, gate_);
      Activate(gate_, count);
      g_maths->MulLine(gate_, 1, up_, 1, up_, count);
    }
    AddTo(block.down, up_, s_.inner);
  }
  void Normalise(const Linear& norm, float* y) const {
    const int64_t d = s_.hidden;
    for (int64_t row = 0; row < s_.rows; ++row, y += d) {
      const float* const x = s_.x + row * d;
      float mean, inv;
      if (!s_.is_rms) {
        g_maths->LayerNorm(x, norm.weight, norm.bias, y, &mean, &inv, 1, d, s_.epsilon);
        continue;
      }
      inv = static_cast<float>(1.0 / std::sqrt(g_maths->SumSquares(x, 0.0f, d) / static_cast<double>(d) + s_.epsilon));
      for (int64_t i = 0; i < d; ++i) y[i] = x[i] * inv * norm.weight[i];
    }
  }
  void Rotate(float* x, int64_t num_heads) const {
    const int64_t half = s_.head_size / 2;
    for (int64_t row = 0; row < s_.rows; ++row) {
      const float *cos = s_.cos + row * half, *sin = s_.sin + row * half;
      for (int64_t head = 0; head < num_heads; ++head, x += s_.head_size)
        for (int64_t i = 0; i < half; ++i) {
          const float first = x[i], second = x[half + i];
          x[i] = first * cos[i] - second * sin[i];
          x[half + i] = second * cos[i] + first * sin[i];
        }
    }
  }
  void Activate(float* x, int64_t count) const {
    if (s_.activation == 3) {
      for (int64_t i = 0; i < count; ++i) x[i] = std::max(x[i], 0.0f);
    } else {
      (s_.activation == 0 ? g_maths->Silu : s_.activation == 1 ? g_maths->Gelu : g_maths->FastGelu)(x, x, count, 0.0f, 0.0f);
    }
  }
  // y = weight x + bias for each row of x
  void Apply(const Linear& linear, const float* x, int64_t in, int64_t out, float* y) const {
    static Sharing sharing;
    SetCurrentSharing(&sharing);
    Product{false, true, 1.0f, linear.bias, nullptr, s_.rows, out, in}(x, linear.weight, y);
  }
  // Adds weight x + bias to the rows of the step.
  void AddTo(const Linear& linear, const float* x, int64_t in) const {
    Apply(linear, x, in, s_.hidden, read_);
    g_maths->AddLine(s_.x, 1, read_, 1, s_.x, s_.rows * s_.hidden);
  }

  const DecoderStep& s_;
  std::vector<float> memory_;
  float *read_, *q_, *heads_, *k_, *v_, *gate_, *up_;
};

inline bool Decode(const DecoderStep& step) {
  if (!g_is_enabled || g_sgemm == nullptr) return false;
  Decoding(step).Run();
  SetCurrentSharing(nullptr);
  return true;
}

}  // namespace libai
