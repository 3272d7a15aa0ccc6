// As autograd/autograd_captured_tensor.h: only the names are needed.
#pragma once

namespace oneflow {
namespace intrusive {
template<typename T>
class shared_ptr;
}  // namespace intrusive
}  // namespace oneflow
