// Optimizer updates. They give the same bits as OneFlow 0.9.0, except LAMB, whose norms are more exact
// (update_kernels.h). Included by level.cpp only.

INLINE float Sign(float x) { return (x >= 0.0f ? 1.0f : 0.0f) - (x <= 0.0f ? 1.0f : 0.0f); }

// `top`: the largest second moments so far (amsgrad), or null.
void Adam(const AdamArgs* args, const float* grad, float* w, float* m, float* v, float* top, int64_t n) {
  const AdamArgs p = *args;
  const float r1 = 1 - p.beta1, r2 = 1 - p.beta2, rate_decay = p.rate * p.decay;
  if (top != nullptr) {
    SIMD for (int64_t i = 0; i < n; ++i) {
      const float old = w[i];
      const float g = grad[i] * p.scale + p.l1 * Sign(old) + p.l2 * old;
      const float nm = p.beta1 * m[i] + r1 * g;
      const float nv = p.beta2 * v[i] + r2 * g * g;
      const float nt = nv > top[i] ? nv : top[i];
      m[i] = nm;
      v[i] = nv;
      top[i] = nt;
      w[i] = old - p.step * (nm / (Sqrt(nt) / p.root2 + p.epsilon)) - rate_decay * old;
    }
    return;
  }
  SIMD for (int64_t i = 0; i < n; ++i) {
    const float old = w[i];
    const float g = grad[i] * p.scale + p.l1 * Sign(old) + p.l2 * old;
    const float nm = p.beta1 * m[i] + r1 * g;
    const float nv = p.beta2 * v[i] + r2 * g * g;
    m[i] = nm;
    v[i] = nv;
    w[i] = old - p.step * (nm / (Sqrt(nv) / p.root2 + p.epsilon)) - rate_decay * old;
  }
}

// LAMB: sets `d` to the direction of Adam without weight decay. `step` of the arguments is the first bias correction.
void LambDirection(const AdamArgs* args, const float* grad, const float* w, float* m, float* v, float* d, int64_t n) {
  const AdamArgs p = *args;
  const float r1 = 1 - p.beta1, r2 = 1 - p.beta2;
  SIMD for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * p.scale + p.l1 * Sign(w[i]) + p.l2 * w[i];
    const float nm = p.beta1 * m[i] + r1 * g;
    const float nv = p.beta2 * v[i] + r2 * g * g;
    m[i] = nm;
    v[i] = nv;
    d[i] = (nm / p.step) / (Sqrt(nv) / p.root2 + p.epsilon);
  }
}

void LambStep(const float* d, float* w, float rate, float decay, int64_t n) {
  SIMD for (int64_t i = 0; i < n; ++i) w[i] = w[i] - rate * (d[i] + decay * w[i]);
}

void Sgd(const MomentumArgs* args, const float* grad, float* w, int64_t n) {
  const MomentumArgs p = *args;
  SIMD for (int64_t i = 0; i < n; ++i) {
    const float old = w[i];
    const float g = grad[i] * p.scale + p.l1 * Sign(old) + p.l2 * old;
    w[i] = old - p.rate * (g + p.decay * old);
  }
}

void Momentum(const MomentumArgs* args, const float* grad, float* w, float* m, int64_t n) {
  const MomentumArgs p = *args;
  const float rest = 1.0f - p.dampening, step = p.maximizes ? p.rate : -p.rate, rate_decay = p.rate * p.decay;
  SIMD for (int64_t i = 0; i < n; ++i) {
    const float old = w[i];
    const float g = grad[i] * p.scale + p.l1 * Sign(old) + p.l2 * old;
    const float next = p.beta * m[i] + rest * g;
    m[i] = next;
    const float d = p.is_nesterov ? g + p.beta * next : next;
    w[i] = old + step * d - rate_decay * old;
  }
}
