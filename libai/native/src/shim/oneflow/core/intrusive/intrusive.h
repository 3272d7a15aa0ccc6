// Replaces a header that the wheel lacks. Only the name is needed.
#pragma once

namespace oneflow {
namespace intrusive {
template<typename T>
class shared_ptr;
}  // namespace intrusive
}  // namespace oneflow
