// In the place of a header that the wheel lacks, and that one of its headers includes. Only the name is needed.
#pragma once
#include <memory>

#include "oneflow/core/common/maybe.h"

namespace oneflow {
namespace one {
class Tensor;
struct AutogradCapturedTensor {
  static Maybe<Tensor> MakeTensor(const std::shared_ptr<Tensor>& tensor);
};
}  // namespace one
}  // namespace oneflow
