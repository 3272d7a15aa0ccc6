// Copies of strided tensors without a node of their own in the autograd graph.
//
// In eager mode, most operations first copy an input that is not contiguous, and the copy gets a
// node. A traced graph has no such copies. Nodes run in the order in which they become ready, so an
// extra node may change the order in which the gradients of a tensor with three or more readers are
// added, and the last bits of their sum.
#include "oneflow/core/autograd/autograd_meta.h"
#include "oneflow/core/framework/device.h"
#include "oneflow/core/framework/op_expr.h"
#include "oneflow/core/framework/tensor.h"

namespace oneflow {
namespace autograd {
struct GradMode {
  static bool is_enabled();
  static void set_enabled(bool enabled);
};
}  // namespace autograd
}  // namespace oneflow

namespace {

using namespace oneflow;       // NOLINT
using namespace oneflow::one;  // NOLINT
using T = std::shared_ptr<Tensor>;
using Copy = Maybe<Tensor> (*)(const T&);
Copy g_own_copy = nullptr;
// true while this thread makes a copy for the user, who may register hooks on it
thread_local bool t_keeps_node = false;

// Switches gradients off while it exists, also if the copy throws.
struct NoGradients {
  NoGradients() { autograd::GradMode::set_enabled(false); }
  ~NoGradients() { autograd::GradMode::set_enabled(true); }
};

Maybe<Tensor> CopyOf(const T& input) {
  NoGradients guard;
  return g_own_copy(input);
}

Maybe<Tensor> CopyWithoutNode(const T& input) {
  const bool has_node =
      autograd::GradMode::is_enabled() && input->requires_grad() && !input->is_leaf();
  if (t_keeps_node || !has_node || !input->is_local() || input->mut_grad_fn_node() == nullptr) {
    return g_own_copy(input);
  }
  const T copy = JUST(CopyOf(input));
  // the readers of the copy give their gradients to the input, as in a traced graph
  copy->set_autograd_meta(input->mut_autograd_meta());
  copy->set_grad_fn_node(input->mut_grad_fn_node());
  copy->set_grad_fn_output_index(input->get_grad_fn_output_index());
  return copy;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void libai_contiguous_keeps_node(bool keeps) {
  t_keeps_node = keeps;
}

extern "C" __attribute__((visibility("default"))) void* libai_contiguous(void* own_copy) {
  g_own_copy = reinterpret_cast<Copy>(own_copy);
  return reinterpret_cast<void*>(&CopyWithoutNode);
}
