// Declarations for functions that call operations of OneFlow 0.9.0 from C++. Include it before other headers of OneFlow.
//
// As in second_order.cpp, OneFlow's declarations must not be hidden.
#pragma once
#pragma GCC visibility push(default)
#include "oneflow/core/common/scalar.h"
#include "oneflow/core/framework/device.h"
#include "oneflow/core/framework/op_builder.h"
#include "oneflow/core/framework/op_expr.h"
#include "oneflow/core/framework/op_expr_grad_function.h"
#include "oneflow/core/framework/op_interpreter.h"
#include "oneflow/core/framework/user_op_registry_manager.h"
#include "oneflow/core/framework/infer_util.h"
#include "oneflow/core/framework/sbp_context.h"

namespace oneflow {
namespace one {
// From op_interpreter_util.h, which includes headers that the wheel lacks.
class OpInterpUtil {
 public:
  template<typename T>
  static Maybe<T> Dispatch(const OpExpr& op_expr, const TensorTuple& inputs, const OpExprInterpContext& ctx);
};
namespace functional {
using T = std::shared_ptr<Tensor>;
Maybe<Tensor> Transpose(const T& input, const std::vector<int32_t>& perm);
Maybe<Tensor> MatMul(const T& a, const T& b, bool transposes_a, bool transposes_b, double alpha);
Maybe<Tensor> Add(const T& input, const T& other, const Scalar& alpha, bool inplace);
}  // namespace functional
}  // namespace one
}  // namespace oneflow
#pragma GCC visibility pop

namespace libai {

// True if OneFlow's operations use our matrix products.
bool AreProductsOn();

inline bool IsFloatOnCpu(const oneflow::one::functional::T& x) {
  if (x->dtype()->data_type() != oneflow::DataType::kFloat) return false;
  if (x->is_local()) return CHECK_JUST(x->device())->type() == "cpu";
  return CHECK_JUST(x->parallel_desc())->device_type() == oneflow::DeviceType::kCPU;
}

}  // namespace libai
