// Replaces a header that the wheel lacks. Only the names are needed.
#pragma once
#include <memory>

#include "oneflow/core/common/maybe.h"

namespace oneflow {
namespace one {
class Tensor;
Maybe<void> AddAccumulateFunctionNode(const std::shared_ptr<Tensor>& tensor);
}  // namespace one
}  // namespace oneflow
