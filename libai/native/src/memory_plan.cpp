// Makes the results of a compiled CPU step share memory, and frees data that only compilation reads. OneFlow 0.9.0
// plans memory only on CUDA. On CPU, every result keeps its own memory. The measurements are in
// docs/dev/decisions/0024-memory-plan.md.
//
// This code changes the `Plan` before OneFlow's own planner runs. Registers of the same rank and rate share a block.
// Their offsets are such that registers that can be alive at the same time do not overlap. Two registers may share a
// place only if dependencies in the plan ensure that every user of the first one runs before the producer of the second
// one, whatever threads compute them. If one thread computes all operations, control edges first fix their order, so
// that more registers may share a place.
#include <malloc.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "oneflow/core/job/job_build_and_infer_ctx_mgr.h"
#include "oneflow/core/job/plan.pb.h"
#include "oneflow/core/kernel/kernel.pb.h"

namespace oneflow {
class KernelContext;
RegstDescProto* FindOrCreateProducedCtrlRegstDesc(TaskProto* task_proto, const std::string& name);
RegstDescIdSet* FindOrCreateConsumedCtrlRegstDescIdSet(TaskProto* task_proto, const std::string& name);
}  // namespace oneflow

namespace libai {
namespace {

using namespace oneflow;
using CanReach = std::function<bool(const std::string&, const std::string&)>;
using OwnPlanner = void (*)(Plan*, const CanReach&);

OwnPlanner g_own_planner = nullptr;
Plan* g_plan = nullptr;  // the plan of the graph that is being compiled
int64_t g_bytes_before = 0, g_bytes_after = 0;

constexpr int64_t kAlignment = 512;  // as in OneFlow's blocks
constexpr int64_t kFirstBlock = 1ll << 40;  // OneFlow counts its own blocks from 0

int64_t BytesOfElement(DataType type) {
  switch (type) {
    case kChar: case kInt8: case kUInt8: case kBool: return 1;
    case kFloat16: case kBFloat16: case kInt16: case kUInt16: return 2;
    case kFloat: case kInt32: case kUInt32: return 4;
    case kDouble: case kInt64: case kUInt64: return 8;
    default: return 0;  // types that are constructed once, such as TensorBuffer, need their own memory
  }
}

const DataRegstDesc& DataOf(const RegstDescProto& regst) { return regst.regst_desc_type().data_regst_desc(); }
bool HasData(const RegstDescProto& regst) { return regst.regst_desc_type().has_data_regst_desc(); }

// Returns the size of a register, or 0 if it cannot share memory.
int64_t BytesOf(const RegstDescProto& regst) {
  if (DataOf(regst).lbi2blob_desc_size() != 1) return 0;
  const BlobDescProto& blob = DataOf(regst).lbi2blob_desc(0).blob_desc();
  if (blob.is_dynamic()) return 0;
  int64_t bytes = BytesOfElement(blob.data_type());
  for (int64_t size : blob.shape().dim()) bytes *= size;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// How often a register is written in an iteration: micro-batches and updates have different time shapes.
std::string RateOf(const RegstDescProto& regst) {
  std::string rate;
  for (int64_t size : DataOf(regst).time_shape().dim()) rate += std::to_string(size) + ",";
  return rate;
}

class TaskSet {  // a set of bits, one for each task
 public:
  explicit TaskSet(int count) : words_((count + 63) / 64) {}
  void Add(int task) { words_[task >> 6] |= uint64_t{1} << (task & 63); }
  void AddAll(const TaskSet& other) {
    for (size_t i = 0; i < words_.size(); ++i) words_[i] |= other.words_[i];
  }
  bool Has(int task) const { return words_[task >> 6] >> (task & 63) & 1; }

 private:
  std::vector<uint64_t> words_;
};

struct Register {
  std::vector<RegstDescProto*> protos;  // several if they are the same elements in different shapes
  int64_t bytes;
  int producer;
  std::vector<int> users;  // including the producer
  int64_t offset;
};

class MemoryPlanner {
 public:
  explicit MemoryPlanner(Plan* plan) : plan_(plan), next_(plan->task_size()), previous_(plan->task_size()) {
    for (int i = 0; i < plan->task_size(); ++i) index_[plan->task(i).task_id()] = i;
    for (int i = 0; i < plan->task_size(); ++i) {
      for (const auto& produced : plan->task(i).produced_regst_desc()) {
        for (int64_t id : produced.second.consumer_task_id()) {
          const auto consumer = index_.find(id);
          if (consumer != index_.end()) AddEdge(i, consumer->second);
        }
      }
    }
  }

  void Run() {
    std::map<std::pair<int64_t, std::string>, std::vector<int>> groups;
    std::unordered_set<int64_t> threads;
    for (int i = 0; i < plan_->task_size(); ++i) {
      // a pipeline: edges from its backward to its forward pass would make stages wait for each other
      const OperatorConf* op = OpOf(plan_->task(i));
      if (op != nullptr && op->user_conf().op_type_name() == "identity_buffer") return;
      const std::string rate = RateOfHostOperation(i);
      if (rate.empty()) continue;
      groups[{plan_->task(i).machine_id(), rate}].push_back(i);
      threads.insert(plan_->task(i).thrd_id());
    }
    for (const auto& group : groups) PlanGroup(group.second, threads.size() == 1);
  }

 private:
  void AddEdge(int from, int to) {
    if (std::find(next_[from].begin(), next_[from].end(), to) != next_[from].end()) return;
    next_[from].push_back(to);
    previous_[to].push_back(from);
  }

  // Returns the operation of a task that computes one user operation, or nullptr for other tasks.
  const OperatorConf* OpOf(const TaskProto& task) const {
    if (task.task_type() != kNormalForward || task.exec_sequence().exec_node_size() != 1) return nullptr;
    const KernelConf& kernel = task.exec_sequence().exec_node(0).kernel_conf();
    const OperatorConf* op = nullptr;
    if (kernel.has_op_attribute()) {
      op = &kernel.op_attribute().op_conf();
    } else {
      const auto job = plan_->job_id2op_attribute_ref_table().find(task.job_id());
      if (job == plan_->job_id2op_attribute_ref_table().end()) return nullptr;
      const auto found = job->second.op_name2op_attribute().find(kernel.op_attribute_ref());
      if (found == job->second.op_name2op_attribute().end()) return nullptr;
      op = &found->second.op_conf();
    }
    return op->has_user_conf() ? op : nullptr;
  }

  // Returns the rate of a CPU operation, or an empty string if its registers keep their own memory.
  std::string RateOfHostOperation(int task) const {
    if (OpOf(plan_->task(task)) == nullptr) return "";
    std::string rate;
    for (const auto& produced : plan_->task(task).produced_regst_desc()) {
      if (!HasData(produced.second)) continue;
      if (produced.second.mem_case().device_type() != kCPU) return "";
      rate = RateOf(produced.second);
    }
    return rate;
  }

  bool FindUsers(const RegstDescProto& regst, int producer, std::vector<int>* users) const {
    users->push_back(producer);
    for (int64_t id : regst.consumer_task_id()) {
      const auto found = index_.find(id);
      if (found == index_.end()) return false;
      const TaskProto& user = plan_->task(found->second);
      // other tasks send a register with its header, or read it at another rate
      if (user.task_type() != kNormalForward || user.machine_id() != plan_->task(producer).machine_id()) return false;
      users->push_back(found->second);
    }
    return true;
  }

  std::vector<Register> RegistersOf(const std::vector<int>& tasks) {
    std::vector<Register> registers;
    std::unordered_map<int64_t, size_t> places;  // register id -> index in the list
    for (int task : tasks) {
      for (auto& produced : *plan_->mutable_task(task)->mutable_produced_regst_desc()) {
        RegstDescProto* regst = &produced.second;
        if (!HasData(*regst) || !regst->enable_reuse_mem() || regst->register_num() != 1) continue;
        if (regst->mem_block_id() != -1 || regst->mem_block_offset() != -1) continue;
        if (regst->has_inplace_consumed_regst_desc_id() || regst->inplace_info_type_case() != 0) continue;
        Register found{{regst}, BytesOf(*regst), task, {}, 0};
        if (found.bytes == 0 || !FindUsers(*regst, task, &found.users)) continue;
        const auto source = places.find(SourceOf(plan_->task(task)));
        if (source == places.end()) {
          places[regst->regst_desc_id()] = registers.size();
          registers.push_back(found);
        } else {
          Register& same = registers[source->second];
          same.protos.push_back(regst);
          same.users.insert(same.users.end(), found.users.begin(), found.users.end());
          places[regst->regst_desc_id()] = source->second;
        }
      }
    }
    return registers;
  }

  // Returns the register that a task only reshapes, or -1 for tasks that compute. If the result has the same memory,
  // the kernel of a reshaping task has nothing to do.
  int64_t SourceOf(const TaskProto& task) const {
    static const std::unordered_set<std::string> kinds{"reshape", "flatten", "expand_dims", "squeeze", "identity"};
    const auto read = task.consumed_regst_desc_id().find("in");
    if (kinds.count(OpOf(task)->user_conf().op_type_name()) == 0 || read == task.consumed_regst_desc_id().end()) return -1;
    return read->second.regst_desc_id_size() == 1 ? read->second.regst_desc_id(0) : -1;
  }

  // Returns all tasks, each after the tasks that it waits for, or an empty list if there is a cycle.
  std::vector<int> InOrder() const {
    using Entry = std::pair<int64_t, int>;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> ready;
    std::vector<int> order, missing;
    for (const auto& tasks : previous_) missing.push_back(static_cast<int>(tasks.size()));
    const auto push = [&](int task) { ready.push({plan_->task(task).task_set_info().order_in_graph(), task}); };
    for (size_t i = 0; i < missing.size(); ++i) {
      if (missing[i] == 0) push(static_cast<int>(i));
    }
    while (!ready.empty()) {
      const int task = ready.top().second;
      ready.pop();
      order.push_back(task);
      for (int later : next_[task]) {
        if (--missing[later] == 0) push(later);
      }
    }
    if (order.size() != missing.size()) order.clear();
    return order;
  }

  // Returns, for each task, the tasks that certainly run after it in the same iteration, provided that each entry of
  // `chain` waits for the entry before it.
  std::vector<TaskSet> SuccessorsOf(const std::vector<int>& order, const std::vector<int>& chain) const {
    std::unordered_map<int, int> following;
    for (size_t i = 1; i < chain.size(); ++i) following[chain[i - 1]] = chain[i];
    std::vector<TaskSet> successors(order.size(), TaskSet(static_cast<int>(order.size())));
    for (auto task = order.rbegin(); task != order.rend(); ++task) {
      const TaskType type = plan_->task(*task).task_type();
      // these tasks write at a different rate than they read, so they do not order the tasks of one iteration
      if (type == kRepeat || type == kAcc || type == kPack || type == kUnpack || type == kAccTick) continue;
      const auto add = [&](int later) {
        successors[*task].Add(later);
        successors[*task].AddAll(successors[later]);
      };
      for (int later : next_[*task]) add(later);
      if (following.count(*task) > 0) add(following[*task]);
    }
    return successors;
  }

  void PlanGroup(std::vector<int> tasks, bool is_on_one_thread) {
    const std::vector<int> order = InOrder();
    std::vector<int> position(order.size());
    for (size_t i = 0; i < order.size(); ++i) position[order[i]] = static_cast<int>(i);
    if (order.empty()) return;
    std::sort(tasks.begin(), tasks.end(), [&](int a, int b) { return position[a] < position[b]; });
    std::vector<Register> registers = RegistersOf(tasks);
    if (registers.size() < 2) return;
    const std::vector<int> chain = is_on_one_thread ? tasks : std::vector<int>{};
    const std::vector<TaskSet> successors = SuccessorsOf(order, chain);
    const auto is_over_before = [&](const Register& earlier, const Register& later) {
      return std::all_of(earlier.users.begin(), earlier.users.end(),
                         [&](int user) { return successors[user].Has(later.producer); });
    };
    const auto may_share = [&](const Register& a, const Register& b) { return is_over_before(a, b) || is_over_before(b, a); };

    // place the largest register first, each at the lowest offset that is free while the register is alive
    std::sort(registers.begin(), registers.end(), [&](const Register& a, const Register& b) {
      return a.bytes != b.bytes ? a.bytes > b.bytes : position[a.producer] < position[b.producer];
    });
    int64_t sum = 0, end = 0;
    for (size_t i = 0; i < registers.size(); ++i) {
      std::vector<std::pair<int64_t, int64_t>> taken;
      for (size_t j = 0; j < i; ++j) {
        const Register& placed = registers[j];
        if (!may_share(placed, registers[i])) taken.push_back({placed.offset, placed.offset + placed.bytes});
      }
      std::sort(taken.begin(), taken.end());
      int64_t offset = 0;
      for (const auto& range : taken) {
        if (range.first >= offset + registers[i].bytes) break;
        offset = std::max(offset, range.second);
      }
      registers[i].offset = offset;
      sum += registers[i].bytes;
      end = std::max(end, offset + registers[i].bytes);
    }

    // The first task of the group must not run again before all users of the registers have run. So it produces a
    // control register that the last users consume. It must also run first, so tasks that wait for no other task of the
    // group wait for it.
    const int first = tasks.front();
    std::unordered_set<int> users;
    for (const Register& found : registers) users.insert(found.users.begin(), found.users.end());
    std::vector<int> waiting;
    const std::unordered_set<int> members(tasks.begin(), tasks.end());
    for (int task : order) {
      if (task == first) continue;
      const bool is_last = users.count(task) > 0
          && std::none_of(users.begin(), users.end(), [&](int other) { return successors[task].Has(other); });
      const bool is_start = members.count(task) > 0
          && std::none_of(tasks.begin(), tasks.end(), [&](int other) { return successors[other].Has(task); });
      if (!is_last && !is_start) continue;
      if (position[task] < position[first]) return;  // would close a cycle
      waiting.push_back(task);
    }

    for (size_t i = 0; i < registers.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        const Register &a = registers[i], &b = registers[j];
        const bool overlaps = a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
        if (overlaps && !may_share(a, b)) return;  // impossible unless the code above is wrong
      }
    }
    const int64_t block = kFirstBlock + registers[0].protos[0]->regst_desc_id();
    for (const Register& found : registers) {
      for (RegstDescProto* proto : found.protos) Place(proto, block, found.offset);
    }
    for (int task : waiting) Connect(first, task);
    for (size_t i = 1; i < chain.size(); ++i) {
      const std::vector<int>& next = next_[chain[i - 1]];
      if (std::find(next.begin(), next.end(), chain[i]) == next.end()) Connect(chain[i - 1], chain[i]);
    }
    g_bytes_before += sum;
    g_bytes_after += end;
  }

  static void Place(RegstDescProto* regst, int64_t block, int64_t offset) {
    regst->set_mem_block_id(block);
    regst->set_mem_block_offset(offset);
    // OneFlow writes the shape of a register once, in front of its data, where the next register of this place would
    // overwrite it. It treats a register with a variable's name as a variable, whose shape it stores elsewhere.
    regst->set_variable_op_name("libai_memory_plan");
  }

  void Connect(int from, int to) {
    TaskProto *producer = plan_->mutable_task(from), *consumer = plan_->mutable_task(to);
    RegstDescProto* regst = FindOrCreateProducedCtrlRegstDesc(producer, "out_ctrl_libai_memory_plan");
    const auto& ids = regst->consumer_task_id();
    if (std::find(ids.begin(), ids.end(), consumer->task_id()) != ids.end()) return;
    regst->add_consumer_task_id(consumer->task_id());
    FindOrCreateConsumedCtrlRegstDescIdSet(consumer, "in_ctrl")->add_regst_desc_id(regst->regst_desc_id());
    AddEdge(from, to);
  }

  Plan* plan_;
  std::unordered_map<int64_t, int> index_;  // task id -> index in the plan
  std::vector<std::vector<int>> next_, previous_;
};

// OneFlow never frees the data that it infers about a traced job, although it reads them only while it traces the job.
struct Traces : JobBuildAndInferCtxMgr {
  static void Forget() {
    const auto manager = GlobalJobBuildAndInferCtxMgr();
    if (manager.IsOk()) (CHECK_JUST(manager)->*&Traces::clear_job_name2infer_ctx)();
  }
};

void PlanMemory(Plan* plan, const CanReach& can_reach) {
  Traces::Forget();
  g_plan = plan;
  g_bytes_before = g_bytes_after = 0;
  MemoryPlanner(plan).Run();
  g_own_planner(plan, can_reach);
}

// The members of OneFlow's `UserKernel`, up to the last one used here. The wheel lacks its header.
struct UserKernel {
  struct Context {
    virtual ~Context() = default;
  };
  virtual ~UserKernel() = default;
  std::shared_ptr<void>* shape_helper;  // the first member of the helper is a pointer to an `Operator`
  KernelConf conf;
  std::shared_ptr<void> cache, state;
  void *kernel, *compute_context, *cache_context;
  std::unique_ptr<Context> shape_context;
};

// Replaces `std::unique_ptr<const Kernel>`. Both have a destructor, so both are returned in the same way.
struct MadeKernel {
  UserKernel* kernel;
  ~MadeKernel() {}
};
using MakeKernel = MadeKernel (*)(const KernelConf&, KernelContext*);
MakeKernel g_make_kernel = nullptr;

// A kernel of a graph and its actor keep descriptions of the operation, about 25 KB in total. Once the kernel exists,
// and if the shapes of its results are fixed, only a few names in the descriptions are still read.
MadeKernel MakeLeanKernel(const KernelConf& conf, KernelContext* context) {
  const bool is_fixed = conf.has_user_conf() && conf.all_blobs_are_static();
  const bool is_lean = is_fixed && conf.op_attribute().op_conf().device_tag() == "cpu";
  MadeKernel made = g_make_kernel(conf, context);
  if (!is_lean) return made;
  made.kernel->shape_helper->reset();
  made.kernel->shape_context.reset();
  delete made.kernel->conf.release_op_attribute();
  delete made.kernel->conf.release_user_conf();
  KernelConf& of_actor = const_cast<KernelConf&>(conf);
  delete of_actor.release_user_conf();
  OpAttribute* attribute = of_actor.mutable_op_attribute();
  delete attribute->release_logical_blob_desc_signature();
  delete attribute->release_sbp_signature();
  delete attribute->release_nd_sbp_signature();
  delete attribute->release_parallel_conf_signature();
  return made;
}

using AddTask = void (*)(void*, const TaskProto&);
AddTask g_add_task = nullptr;

// OneFlow copies each task to its thread. It keeps the plan as long as the graph, but reads only numbers in it.
void MoveTask(void* thread, const TaskProto& task) {
  if (g_plan != nullptr) {  // this is the first task of a plan that this rank made
    g_plan->clear_job_id2op_attribute_ref_table();
    delete g_plan->release_block_chunk_list();
    g_plan = nullptr;
    malloc_trim(0);  // other threads allocate kernels and actors, and would not reuse this memory
  }
  g_add_task(thread, task);
  delete const_cast<TaskProto&>(task).release_exec_sequence();
}

}  // namespace
}  // namespace libai

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Returns the address of a function that replaces OneFlow's `InferMemBlockId4MemReusedRegst` and calls it.
EXPORTED void* libai_memory_plan(void* own_planner) {
  libai::g_own_planner = reinterpret_cast<libai::OwnPlanner>(own_planner);
  return reinterpret_cast<void*>(&libai::PlanMemory);
}
// Returns the bytes of the registers that share memory in the last plan: the size of their blocks if `is_shared`, or
// the sum of the registers' own sizes.
EXPORTED int64_t libai_memory_plan_bytes(bool is_shared) { return is_shared ? libai::g_bytes_after : libai::g_bytes_before; }
// The next two functions do the same for `ConstructKernel` and `Thread::AddTask`.
EXPORTED void* libai_lean_kernels(void* make_kernel) {
  libai::g_make_kernel = reinterpret_cast<libai::MakeKernel>(make_kernel);
  return reinterpret_cast<void*>(&libai::MakeLeanKernel);
}
EXPORTED void* libai_lean_plans(void* add_task) {
  libai::g_add_task = reinterpret_cast<libai::AddTask>(add_task);
  return reinterpret_cast<void*>(&libai::MoveTask);
}
