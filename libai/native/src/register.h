// Registers kernels with OneFlow 0.9.0, for eager operations and compiled graphs.
#pragma once
#include <atomic>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "maths.h"
#include "parallel.h"
#include "oneflow/core/framework/op_kernel.h"
#include "oneflow/core/framework/user_op_hob.h"
#include "oneflow/core/framework/user_op_kernel_registry.h"
#include "oneflow/core/framework/user_op_registry_manager.h"

namespace libai {

using oneflow::DataType;
using oneflow::user_op::KernelComputeContext;
using oneflow::user_op::KernelRegContext;
using oneflow::user_op::OpKernelRegistryResult;

// OneFlow uses the matching kernel with the highest priority. Its optimized kernels have priority 10. Priorities of 100
// or more are for experimental kernels, which need a switch.
constexpr int kPriority = 50;

inline const Maths* g_maths = nullptr;         // loops for the instruction set in use
inline std::atomic<bool> g_is_enabled{true};   // false selects OneFlow's own kernels, for comparisons in one process

// A function that computes an operation.
using Run = void (*)(KernelComputeContext*);
// A condition in addition to device and data type. It must not depend on shapes or attributes: an eager operation
// first tries the kernels that it has used before, so after one call with OneFlow's kernel it may never use ours again.
using Condition = bool (*)(const KernelRegContext&);

// One of our kernels, with the number of its calls.
struct Entry {
  std::string op, tensor;
  Run run;
  Condition fits;
  bool is_update;  // the kernel changes its inputs and has no outputs
  std::atomic<int64_t> calls{0};
  Sharing sharing;
};
inline std::vector<Entry*>& Entries() {
  static auto* entries = new std::vector<Entry*>;
  return *entries;
}

class Kernel final : public oneflow::user_op::OpKernel {
 public:
  explicit Kernel(Entry* entry) : entry_(entry) {}

 private:
  void Compute(KernelComputeContext* c) const override {
    entry_->calls.fetch_add(1, std::memory_order_relaxed);
    SetCurrentSharing(&entry_->sharing);
    entry_->run(c);
    SetCurrentSharing(nullptr);
  }
  bool AlwaysComputeWhenAllOutputsEmpty() const override { return entry_->is_update; }

  Entry* entry_;
};

// The registry's table is private, but an explicit template instantiation may name it. `Register` needs the table.
using Table = oneflow::HashMap<std::string, std::vector<OpKernelRegistryResult>>;
Table& TableOf(oneflow::user_op::UserOpRegistryMgr& registry);
template<Table oneflow::user_op::UserOpRegistryMgr::*member>
struct Opener {
  friend Table& TableOf(oneflow::user_op::UserOpRegistryMgr& registry) { return registry.*member; }
};
template struct Opener<&oneflow::user_op::UserOpRegistryMgr::op_kernel_reg_result_>;

// Makes `run` compute operation `op` on CPU if its argument `tensor` is float32 and `fits`, if given, returns true.
inline void Register(const char* op, const char* tensor, Run run, Condition fits = nullptr, bool is_update = false) {
  auto& list = TableOf(oneflow::user_op::UserOpRegistryMgr::Get())[op];
  for (const auto& entry : list) {
    if (entry.priority == kPriority) return;  // registered by another copy of this library
  }
  auto* entry = new Entry{op, tensor, run, fits, is_update};
  Entries().push_back(entry);
  oneflow::user_op::OpKernelRegistry registry;
  registry.Name(op).SetPriority(kPriority).SetCreateFn(
      [entry]() -> const oneflow::user_op::OpKernel* { return oneflow::user_op::NewOpKernel<Kernel>(entry); });
  const bool is_only = entry->op.rfind("libai_", 0) == 0;  // OneFlow has no such operation
  registry.SetIsMatchedHob(oneflow::hob::make_custom("libai CPU float32", [entry, is_only](const KernelRegContext& c) -> bool {
    if ((!g_is_enabled && !is_only) || c.device_type() != oneflow::DeviceType::kCPU) return false;
    const auto* t = c.TensorDesc4ArgNameAndIndex(entry->tensor, 0);
    return t != nullptr && t->data_type() == DataType::kFloat && (entry->fits == nullptr || entry->fits(c));
  }) == true);
  // Operations that have run hold pointers into the old vector, so it is never freed. The table gets a larger copy.
  auto* kept = new std::vector<OpKernelRegistryResult>(std::move(list));
  list = *kept;
  list.push_back(CHECK_JUST(registry.Finish()).GetResult());
}

inline bool Has(KernelComputeContext* c, const char* name) { return c->has_input(name, 0); }
inline const float* In(KernelComputeContext* c, const char* name, int index = 0) {
  return c->Tensor4ArgNameAndIndex(name, index)->dptr<float>();
}
// Returns null for an argument that was not given.
inline const float* MaybeIn(KernelComputeContext* c, const char* name) { return Has(c, name) ? In(c, name) : nullptr; }
inline float* Out(KernelComputeContext* c, const char* name) {
  return c->Tensor4ArgNameAndIndex(name, 0)->mut_dptr<float>();
}
inline int64_t Size(KernelComputeContext* c, const char* name) {
  return c->Tensor4ArgNameAndIndex(name, 0)->shape_view().elem_cnt();
}
// The length of the last axis, or 1 for a tensor without axes.
inline int64_t LastAxis(KernelComputeContext* c, const char* name) {
  const auto shape = c->Tensor4ArgNameAndIndex(name, 0)->shape_view();
  return shape.NumAxes() == 0 ? 1 : shape.At(shape.NumAxes() - 1);
}

constexpr int kMaxAxes = 32;  // OneFlow allows 20

}  // namespace libai
