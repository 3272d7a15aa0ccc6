// Replaces a header that the wheel lacks. Only the names are needed.
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
