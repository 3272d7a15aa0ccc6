// The operations libai_recurrent and libai_recurrent_grad, which compute whole sequences of an LSTM, GRU or plain recurrent network,
// and the functions of OneFlow that call them. OneFlow's own functions compose each time step from about ten operations.
#include "dispatch.h"

#include <map>
#include <mutex>

namespace {

using namespace oneflow;       // NOLINT
using namespace oneflow::one;  // NOLINT
namespace F = oneflow::one::functional;
using F::T;
using user_op::InferContext;
using user_op::SbpContext;
using libai::IsFloatOnCpu;

constexpr char kForward[] = "libai_recurrent", kBackward[] = "libai_recurrent_grad";

int64_t GatesOf(int kind) { return kind == 0 ? 4 : kind == 1 ? 3 : 1; }

Maybe<void> InferShapes(InferContext* c) {
  const Shape &x = c->InputShape("x", 0), &h = c->InputShape("h0", 0);
  const int kind = c->Attr<int32_t>("kind");
  const int64_t directions = c->Attr<bool>("bidirectional") ? 2 : 1, layers = h.At(0) / directions, hidden = h.At(2);
  const int64_t gates = GatesOf(kind) + (kind <= 1 ? 1 : 0);
  c->SetOutputShape("y", 0, Shape({x.At(0), x.At(1), directions * hidden}));
  c->SetOutputShape("hn", 0, h);
  if (c->has_output("cn", 0)) c->SetOutputShape("cn", 0, h);
  const int64_t kept = x.At(0) * directions * hidden * (layers * gates + layers - 1);
  c->SetOutputShape("reserve", 0, Shape({x.At(1), kept}));
  return Maybe<void>::Ok();
}
Maybe<void> InferTypes(InferContext* c) {
  const DataType type = c->InputDType("x", 0);
  c->SetOutputDType("y", 0, type);
  c->SetOutputDType("hn", 0, type);
  if (c->has_output("cn", 0)) c->SetOutputDType("cn", 0, type);
  c->SetOutputDType("reserve", 0, DataType::kInt32);  // integers need no gradient
  return Maybe<void>::Ok();
}
Maybe<void> InferGradShapes(InferContext* c) {
  if (c->has_output("dx", 0)) c->SetOutputShape("dx", 0, c->InputShape("x", 0));
  c->SetOutputShape("dh0", 0, c->InputShape("h0", 0));
  if (c->has_output("dc0", 0)) c->SetOutputShape("dc0", 0, c->InputShape("h0", 0));
  for (int i = 0; i < c->input_size("w"); ++i) c->SetOutputShape("dw", i, c->InputShape("w", i));
  return Maybe<void>::Ok();
}
Maybe<void> InferGradTypes(InferContext* c) {
  for (const auto& output : c->outputs()) c->SetOutputDType(output.first, output.second, c->InputDType("x", 0));
  return Maybe<void>::Ok();
}
// The batch may be split among ranks; weights are the same everywhere and their gradients are partial sums.
Maybe<void> GetSbp(SbpContext* c) {
  auto builder = c->NewBuilder();
  const auto add = [&](const std::pair<std::string, int32_t>& arg) {
    const user_op::OpArg op_arg(std::string(arg.first), arg.second);
    if (arg.first == "w") {
      builder.Broadcast(op_arg);
    } else if (arg.first == "dw") {
      builder.PartialSum(op_arg);
    } else {
      builder.Split(op_arg, arg.first == "reserve" || arg.first == "mask" ? 0 : 1);
    }
  };
  for (const auto& arg : c->inputs()) add(arg);
  for (const auto& arg : c->outputs()) add(arg);
  builder.Build();
  return Maybe<void>::Ok();
}

void RegisterOperation(user_op::OpRegistry&& registry) {
  registry.Attr<int32_t>("kind").Attr<bool>("has_bias").Attr<bool>("bidirectional").SetGetSbpFn(&GetSbp);
  CHECK_JUST(user_op::UserOpRegistryMgr::Get().Register(CHECK_JUST(registry.Finish()).GetResult()));
}

__attribute__((constructor)) void RegisterOperations() {
  auto& registry = user_op::UserOpRegistryMgr::Get();
  if (registry.GetOpRegistryResult(kForward) != nullptr) return;  // by another copy of this library
  auto forward = registry.CheckAndGetOpRegistry(kForward);
  forward.Input("x").Input("h0").OptionalInput("c0").Input("w").OptionalInput("mask");
  forward.Output("y").Output("hn").OptionalOutput("cn").Output("reserve");
  forward.SetLogicalTensorDescInferFn(&InferShapes).SetPhysicalTensorDescInferFn(&InferShapes).SetDataTypeInferFn(&InferTypes);
  RegisterOperation(std::move(forward));
  auto backward = registry.CheckAndGetOpRegistry(kBackward);
  backward.Input("x").Input("h0").OptionalInput("c0").Input("w").OptionalInput("mask");
  backward.Input("y").Input("reserve").Input("dy").Input("dhn").OptionalInput("dcn");
  backward.OptionalOutput("dx").Output("dh0").OptionalOutput("dc0").Output("dw");
  backward.SetLogicalTensorDescInferFn(&InferGradShapes).SetPhysicalTensorDescInferFn(&InferGradShapes).SetDataTypeInferFn(&InferGradTypes);
  RegisterOperation(std::move(backward));
}

// What distinguishes the operations; they are built once and kept.
struct Form {
  int kind;
  bool has_bias, is_bidirectional, has_mask, needs_dx;
  int num_weights;
  bool operator<(const Form& o) const {
    return std::tie(kind, has_bias, is_bidirectional, has_mask, needs_dx, num_weights)
           < std::tie(o.kind, o.has_bias, o.is_bidirectional, o.has_mask, o.needs_dx, o.num_weights);
  }
};

void SetAttributes(OpBuilder* builder, const Form& form) {
  builder->Attr<int32_t>("kind", form.kind).Attr<bool>("has_bias", form.has_bias).Attr<bool>("bidirectional", form.is_bidirectional);
}
Maybe<UserOpExpr> Forward(const Form& form) {
  OpBuilder builder(kForward, kForward);
  builder.Input("x").Input("h0");
  if (form.kind == 0) builder.Input("c0");
  builder.Input("w", form.num_weights);
  if (form.has_mask) builder.Input("mask");
  builder.Output("y").Output("hn");
  if (form.kind == 0) builder.Output("cn");
  builder.Output("reserve");
  SetAttributes(&builder, form);
  return builder.Build();
}
Maybe<UserOpExpr> Backward(const Form& form) {
  OpBuilder builder(kBackward, kBackward);
  builder.Input("x").Input("h0");
  if (form.kind == 0) builder.Input("c0");
  builder.Input("w", form.num_weights);
  if (form.has_mask) builder.Input("mask");
  builder.Input("y").Input("reserve").Input("dy").Input("dhn");
  if (form.kind == 0) builder.Input("dcn");
  if (form.needs_dx) builder.Output("dx");
  builder.Output("dh0");
  if (form.kind == 0) builder.Output("dc0");
  builder.Output("dw", form.num_weights);
  SetAttributes(&builder, form);
  return builder.Build();
}
Maybe<UserOpExpr> Kept(const Form& form, bool is_forward) {
  static std::mutex mutex;
  static auto* operations = new std::map<std::pair<bool, Form>, std::shared_ptr<UserOpExpr>>;
  std::lock_guard<std::mutex> lock(mutex);
  auto& operation = (*operations)[{is_forward, form}];
  if (operation == nullptr) operation = is_forward ? JUST(Forward(form)) : JUST(Backward(form));
  return operation;
}

struct State : public AutoGradCaptureState {
  std::vector<bool> requires_grad;  // of the inputs
  Form form;
};

class RecurrentGradient : public OpExprGradFunctionIf {
 public:
  std::shared_ptr<AutoGradCaptureState> MakeCustomState() const override { return std::make_shared<State>(); }
  Maybe<void> Init(const OpExpr& op) override {
    const auto& proto = dynamic_cast<const UserOpExpr&>(op).proto();
    form_.kind = proto.attr().at("kind").at_int32();
    form_.has_bias = proto.attr().at("has_bias").at_bool();
    form_.is_bidirectional = proto.attr().at("bidirectional").at_bool();
    form_.has_mask = proto.input().count("mask") > 0;
    form_.num_weights = proto.input().at("w").s_size();
    return Maybe<void>::Ok();
  }
  Maybe<void> CaptureIf(AutoGradCaptureState* ctx, const TensorTuple& inputs, const TensorTuple& outputs,
                        const OpExprInterpContext& context) const override {
    auto* state = static_cast<State*>(ctx);
    for (const auto& input : inputs) {
      state->requires_grad.push_back(input->requires_grad());
      state->SaveTensorForBackward(input);
    }
    // detached, because a tensor that holds its own gradient function is never freed
    state->SaveTensorForBackward(JUST(outputs.at(0)->detach()));
    state->SaveTensorForBackward(JUST(outputs.back()->detach()));
    state->form = form_;
    state->form.needs_dx = state->requires_grad.at(0);
    return Maybe<void>::Ok();
  }
  Maybe<void> ApplyIf(const AutoGradCaptureState* ctx, const TensorTuple& out_grads, TensorTuple* in_grads) const override {
    const auto* state = static_cast<const State*>(ctx);
    TensorTuple inputs = state->SavedTensors();
    const int num_states = form_.kind == 0 ? 2 : 1;
    for (int i = 0; i <= num_states; ++i) inputs.push_back(out_grads.at(i));
    const auto grads = JUST(OpInterpUtil::Dispatch<TensorTuple>(*JUST(Kept(state->form, false)), inputs, OpExprInterpContext(AttrMap{})));
    in_grads->resize(state->requires_grad.size());
    const int first = state->form.needs_dx ? 0 : 1;
    for (int i = first; i < 1 + num_states + form_.num_weights; ++i) {
      if (state->requires_grad[i]) in_grads->at(i) = grads->at(i - first);
    }
    return Maybe<void>::Ok();
  }

 private:
  Form form_{};
};

using OneState = Maybe<TensorTuple> (*)(const T&, const T&, const TensorTuple&, bool, int32_t, float, bool, bool, bool);
using TwoStates = Maybe<TensorTuple> (*)(const T&, const TensorTuple&, const TensorTuple&, bool, int32_t, float, bool, bool, bool);
OneState g_own[4];
TwoStates g_own_lstm;

// Returns true if the operation can compute this network. Anything else, including wrong shapes, is left to OneFlow. One more
// tensor than there are weights is a mask (batch, layers - 1, steps, width) that multiplies the inputs of all layers but the first.
bool Fits(int kind, const T& x, const TensorTuple& states, const TensorTuple& weights, bool has_bias, int32_t layers, float dropout,
          bool is_training, bool is_bidirectional, bool is_batch_first) {
  if (!libai::AreProductsOn() || (is_training && dropout > 0.0f && layers > 1)) return false;
  const int64_t directions = is_bidirectional ? 2 : 1;
  const size_t num_weights = layers * directions * (has_bias ? 4 : 2);
  const bool has_mask = weights.size() == num_weights + 1;
  if (layers < 1 || weights.size() != num_weights + has_mask || states.size() != (kind == 0 ? 2 : 1)) return false;
  const auto is_fit = [](const T& t, int axes) { return t != nullptr && IsFloatOnCpu(t) && t->shape()->NumAxes() == axes; };
  if (!is_fit(x, 3)) return false;
  const int64_t batch = x->shape()->At(is_batch_first ? 0 : 1), steps = x->shape()->At(is_batch_first ? 1 : 0);
  if (!is_fit(states.at(0), 3)) return false;
  const int64_t hidden = states.at(0)->shape()->At(2);
  for (const auto& state : states) {
    if (!is_fit(state, 3) || *state->shape() != Shape({layers * directions, batch, hidden})) return false;
  }
  const int64_t gates = GatesOf(kind) * hidden;
  for (size_t i = 0; i < num_weights; ++i) {
    const size_t part = i % (has_bias ? 4 : 2), layer = i / (has_bias ? 4 : 2) / directions;
    if (!is_fit(weights.at(i), part < 2 ? 2 : 1) || weights.at(i)->shape()->At(0) != gates) return false;
    const int64_t columns = part == 1 ? hidden : layer == 0 ? x->shape()->At(2) : directions * hidden;
    if (part < 2 && weights.at(i)->shape()->At(1) != columns) return false;
  }
  return !has_mask || (is_fit(weights.back(), 4) && *weights.back()->shape() == Shape({batch, layers - 1, steps, directions * hidden}));
}

Maybe<TensorTuple> Run(int kind, const T& input, const TensorTuple& states, const TensorTuple& weights, bool has_bias, int32_t layers,
                       bool is_bidirectional, bool is_batch_first) {
  const int num_weights = layers * (is_bidirectional ? 2 : 1) * (has_bias ? 4 : 2);
  TensorTuple inputs;
  inputs.push_back(is_batch_first ? T(JUST(F::Transpose(input, {1, 0, 2}))) : input);
  for (const auto& state : states) inputs.push_back(state);
  for (const auto& weight : weights) inputs.push_back(weight);
  const Form form{kind, has_bias, is_bidirectional, weights.size() > static_cast<size_t>(num_weights), false, num_weights};
  const auto found = JUST(OpInterpUtil::Dispatch<TensorTuple>(*JUST(Kept(form, true)), inputs, OpExprInterpContext(AttrMap{})));
  auto result = std::make_shared<TensorTuple>();
  result->push_back(is_batch_first ? T(JUST(F::Transpose(found->at(0), {1, 0, 2}))) : found->at(0));
  for (size_t i = 0; i < states.size(); ++i) result->push_back(found->at(1 + i));
  return result;
}

Maybe<TensorTuple> Lstm(const T& x, const TensorTuple& hx, const TensorTuple& weights, bool has_bias, int32_t layers, float dropout,
                        bool is_training, bool is_bidirectional, bool is_batch_first) {
  if (!Fits(0, x, hx, weights, has_bias, layers, dropout, is_training, is_bidirectional, is_batch_first)) {
    return g_own_lstm(x, hx, weights, has_bias, layers, dropout, is_training, is_bidirectional, is_batch_first);
  }
  return Run(0, x, hx, weights, has_bias, layers, is_bidirectional, is_batch_first);
}
template<int kind>
Maybe<TensorTuple> Other(const T& x, const T& hx, const TensorTuple& weights, bool has_bias, int32_t layers, float dropout,
                         bool is_training, bool is_bidirectional, bool is_batch_first) {
  TensorTuple states;
  states.push_back(hx);
  if (!Fits(kind, x, states, weights, has_bias, layers, dropout, is_training, is_bidirectional, is_batch_first)) {
    return g_own[kind](x, hx, weights, has_bias, layers, dropout, is_training, is_bidirectional, is_batch_first);
  }
  return Run(kind, x, states, weights, has_bias, layers, is_bidirectional, is_batch_first);
}

}  // namespace

namespace oneflow {
namespace one {
REGISTER_OP_EXPR_GRAD_FUNCTION("libai_recurrent", RecurrentGradient);
}  // namespace one
}  // namespace oneflow

// Returns the function that replaces OneFlow's function `own` for networks of this kind: 0 LSTM, 1 GRU, 2 tanh, 3 relu.
extern "C" __attribute__((visibility("default"))) void* libai_recurrent(int kind, void* own) {
  if (kind == 0) {
    g_own_lstm = reinterpret_cast<TwoStates>(own);
    return reinterpret_cast<void*>(&Lstm);
  }
  g_own[kind] = reinterpret_cast<OneState>(own);
  constexpr OneState ours[] = {nullptr, &Other<1>, &Other<2>, &Other<3>};
  return reinterpret_cast<void*>(ours[kind]);
}
