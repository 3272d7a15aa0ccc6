// Second-order gradients of layer norm. OneFlow 0.9.0 has them only for the norm that its Python code composes from
// simpler operations. Because these gradients consist of differentiable operations, third-order gradients work too.
//
// OneFlow looks them up in a table that is an inline static variable in a header. The variable must be liboneflow's, so
// it must not be hidden.
#pragma GCC visibility push(default)
#include "oneflow/core/common/scalar.h"
#include "oneflow/core/framework/op_expr.h"
#include "oneflow/core/framework/op_expr_grad_function.h"
#include "oneflow/core/framework/op_interpreter.h"

// Declarations from functional_api.yaml.h, which includes headers that the wheel lacks.
namespace oneflow {
namespace one {
namespace functional {
using T = std::shared_ptr<Tensor>;
Maybe<Tensor> Add(const T& input, const T& other, const Scalar& alpha, bool inplace);
Maybe<Tensor> Sub(const T& input, const T& other, const Scalar& alpha, bool inplace);
Maybe<Tensor> Mul(const T& input, const T& other);
Maybe<Tensor> Div(const T& input, const T& other);
Maybe<Tensor> ScalarMul(const T& input, const Scalar& other, bool inplace);
Maybe<Tensor> Square(const T& x);
Maybe<Tensor> Rsqrt(const T& x);
Maybe<Tensor> OnesLike(const T& x);
Maybe<Tensor> ZerosLike(const T& x);
Maybe<Tensor> Reshape(const T& x, const Shape& shape);
Maybe<Tensor> ReduceSum(const T& x, const std::vector<int32_t>& dim, bool keepdim);
Maybe<Tensor> ReduceMean(const T& x, const std::vector<int32_t>& dim, bool keepdim);
}  // namespace functional
}  // namespace one
}  // namespace oneflow
#pragma GCC visibility pop

namespace {

using namespace oneflow;            // NOLINT
using namespace oneflow::one;       // NOLINT
namespace F = oneflow::one::functional;
using F::T;

struct State : public AutoGradCaptureState {
  TensorTuple inputs;
  std::vector<bool> requires_grad;
  int64_t axis = 0;  // the first axis of a row
};

Maybe<Tensor> Plus(const T& a, const T& b) { return F::Add(a, b, Scalar(1), false); }
Maybe<Tensor> Minus(const T& a, const T& b) { return F::Sub(a, b, Scalar(1), false); }

// h = (x - mean(x)) k with k = 1 / sqrt(variance + epsilon). The gradient of x is P(gradient of h), with the symmetric
// operator P(v) = k (v - mean(v) - h mean(v h)).
class Norm {
 public:
  // `inv`: k as stored by the forward pass. Epsilon is computed from it.
  static Maybe<Norm> Make(const T& x, const T& inv, int64_t axis) {
    auto norm = std::make_shared<Norm>();
    for (int64_t i = axis; i < x->shape()->NumAxes(); ++i) norm->axes_.push_back(i);
    Shape column(*inv->shape());
    while (column.NumAxes() < x->shape()->NumAxes()) column.emplace_back(1);
    const T centred = JUST(Minus(x, JUST(norm->Mean(x))));
    const T variance = JUST(norm->Mean(JUST(F::Square(centred))));
    const T inverse = JUST(F::Square(JUST(F::Reshape(JUST(inv->detach()), column))));
    const T ones = JUST(F::OnesLike(inverse));
    const T epsilon = JUST(JUST(Minus(JUST(F::Div(ones, inverse)), variance))->detach());
    norm->k = JUST(F::Rsqrt(JUST(Plus(variance, epsilon))));
    norm->h = JUST(F::Mul(centred, norm->k));
    return norm;
  }
  Maybe<Tensor> Mean(const T& a) const { return F::ReduceMean(a, axes_, true); }
  Maybe<Tensor> MeanOfProduct(const T& a, const T& b) const { return Mean(JUST(F::Mul(a, b))); }
  Maybe<Tensor> P(const T& v) const {
    const T shifted = JUST(Minus(v, JUST(Mean(v))));
    return F::Mul(k, JUST(Minus(shifted, JUST(F::Mul(h, JUST(MeanOfProduct(v, h)))))));
  }
  T h, k;

 private:
  std::vector<int32_t> axes_;
};

// The common part of both gradients. It keeps the inputs: dy, x, mean, inv_variance and, if given, gamma.
class Gradient : public OpExprGradFunctionIf {
 public:
  explicit Gradient(const char* axis) : axis_(axis) {}
  std::shared_ptr<AutoGradCaptureState> MakeCustomState() const override { return std::make_shared<State>(); }
  Maybe<void> Init(const OpExpr&) override { return Maybe<void>::Ok(); }
  Maybe<void> CaptureIf(AutoGradCaptureState* ctx, const TensorTuple& inputs, const TensorTuple&,
                        const OpExprInterpContext& context) const override {
    auto* state = static_cast<State*>(ctx);
    state->inputs = inputs;
    for (const auto& input : inputs) state->requires_grad.push_back(input->requires_grad());
    state->axis = JUST(context.attrs.GetAttr<int64_t>(axis_));
    return Maybe<void>::Ok();
  }

 protected:
  // Makes room for one gradient per input. It is zero for mean and inv_variance, because x's gradient includes theirs.
  static Maybe<void> Begin(const State* s, TensorTuple* in_grads) {
    in_grads->resize(s->inputs.size());
    for (int i : {2, 3}) {
      if (s->requires_grad[i]) in_grads->at(i) = JUST(F::ZerosLike(s->inputs.at(i)));
    }
    return Maybe<void>::Ok();
  }

 private:
  const char* axis_;
};

// dx = P(dy gamma). Given the gradient G of dx, the gradient of dy is gamma P(G), of gamma it is sum(dy P(G)), and of x
// it is -k (h mean(G dx) + mean(dy gamma h) P(G) + mean(G h) dx).
class LayerNormGradGrad final : public Gradient {
 public:
  LayerNormGradGrad() : Gradient("begin_norm_axis") {}
  Maybe<void> ApplyIf(const AutoGradCaptureState* ctx, const TensorTuple& out_grads,
                      TensorTuple* in_grads) const override {
    const auto* s = static_cast<const State*>(ctx);
    const T &dy = s->inputs.at(0), &x = s->inputs.at(1), &G = out_grads.at(0);
    const T gamma = s->inputs.size() > 4 ? s->inputs.at(4) : nullptr;
    const auto norm = JUST(Norm::Make(x, s->inputs.at(3), s->axis));
    const T p = JUST(norm->P(G));
    JUST(Begin(s, in_grads));
    if (s->requires_grad[0]) in_grads->at(0) = gamma != nullptr ? T(JUST(F::Mul(p, gamma))) : p;
    if (s->requires_grad[1]) {
      const T g = gamma != nullptr ? T(JUST(F::Mul(dy, gamma))) : dy;
      const T dx = JUST(norm->P(g));
      T sum = JUST(F::Mul(norm->h, JUST(norm->MeanOfProduct(G, dx))));
      sum = JUST(Plus(sum, JUST(F::Mul(p, JUST(norm->MeanOfProduct(g, norm->h))))));
      sum = JUST(Plus(sum, JUST(F::Mul(dx, JUST(norm->MeanOfProduct(G, norm->h))))));
      in_grads->at(1) = JUST(F::ScalarMul(JUST(F::Mul(sum, norm->k)), Scalar(-1.0), false));
    }
    if (gamma != nullptr && s->requires_grad[4]) {
      std::vector<int32_t> axes;
      for (int64_t i = 0; i < s->axis; ++i) axes.push_back(i);
      in_grads->at(4) = JUST(F::ReduceSum(JUST(F::Mul(dy, p)), axes, false));
    }
    return Maybe<void>::Ok();
  }
};

// dgamma = sum(dy h) and dbeta = sum(dy). Given their gradients A and B, the gradient of dy is A h + B, and of x it is
// P(A dy).
class LayerNormParamGradGrad final : public Gradient {
 public:
  LayerNormParamGradGrad() : Gradient("begin_params_axis") {}
  Maybe<void> ApplyIf(const AutoGradCaptureState* ctx, const TensorTuple& out_grads,
                      TensorTuple* in_grads) const override {
    const auto* s = static_cast<const State*>(ctx);
    const T &dy = s->inputs.at(0), &x = s->inputs.at(1), &A = out_grads.at(0), &B = out_grads.at(1);
    const auto norm = JUST(Norm::Make(x, s->inputs.at(3), s->axis));
    JUST(Begin(s, in_grads));
    if (s->requires_grad[0]) in_grads->at(0) = JUST(Plus(JUST(F::Mul(norm->h, A)), B));
    if (s->requires_grad[1]) in_grads->at(1) = JUST(norm->P(JUST(F::Mul(dy, A))));
    return Maybe<void>::Ok();
  }
};

}  // namespace

namespace oneflow {
namespace one {
REGISTER_OP_EXPR_GRAD_FUNCTION("layer_norm_grad", LayerNormGradGrad);
REGISTER_OP_EXPR_GRAD_FUNCTION("layer_norm_param_grad", LayerNormParamGradGrad);
}  // namespace one
}  // namespace oneflow
