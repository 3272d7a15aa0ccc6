// Replaces a header that the wheel lacks, although one of its headers includes it. Only the name is needed.
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
