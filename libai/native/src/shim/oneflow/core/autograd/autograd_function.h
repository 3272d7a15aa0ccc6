// As autograd_captured_tensor.h beside it: only the names are needed.
#pragma once
#include <functional>
#include <memory>

namespace oneflow {
namespace one {
class TensorTuple;
class FunctionAutoGradCaptureState;
struct AutogradFunctionBase {
  using FType = std::function<std::shared_ptr<TensorTuple>(const std::shared_ptr<FunctionAutoGradCaptureState>&,
                                                           const TensorTuple&)>;
};
}  // namespace one
}  // namespace oneflow
