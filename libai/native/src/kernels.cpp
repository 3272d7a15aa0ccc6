// Registers the kernels when the library is loaded, and exports the functions that libai/native calls.
#include <strings.h>

#include <cstdlib>

#include "axis_kernels.h"
#include "channel_kernels.h"
#include "depthwise_kernels.h"
#include "decode.h"
#include "pointwise_kernels.h"
#include "pool_kernels.h"
#include "product_kernels.h"
#include "recurrent_kernels.h"
#include "resize_kernels.h"
#include "row_kernels.h"
#include "shape_kernels.h"
#include "update_kernels.h"

namespace libai {
namespace {

__attribute__((constructor)) void RegisterAll() {
  g_maths = &kMathsSse2;
  RegisterPointwise();
  RegisterAxes();
  RegisterRows();
  RegisterShapes();
  RegisterUpdates();
  RegisterChannels();
  RegisterConvolutions();
  RegisterPools();
  RegisterProducts();
  RegisterRecurrent();
  RegisterResize();
}

bool HasAvx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"); }
bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")
         && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}

}  // namespace

bool AreProductsOn() { return g_is_enabled && g_sgemm != nullptr; }

}  // namespace libai

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Selects the loops of an instruction set: 0 SSE2, 1 AVX2, 2 AVX-512. Returns false if the CPU or the system lacks it.
EXPORTED bool libai_native_use_level(int level) {
  using namespace libai;
  if ((level >= 1 && !HasAvx2()) || (level >= 2 && !HasAvx512())) return false;
  g_maths = level == 2 ? &kMathsAvx512 : level == 1 ? &kMathsAvx2 : &kMathsSse2;
  const char* core = std::getenv("OPENBLAS_CORETYPE");
  const auto is_core = [&](const char* name) { return core == nullptr || !strcasecmp(core, name); };
  g_sgemm_is_narrow = level == 2 && !is_core("SkylakeX") && !is_core("Cooperlake") && !is_core("SapphireRapids");
  return true;
}
// `slot` contains the address of the function that OneFlow calls to multiply matrices.
EXPORTED void libai_native_use_sgemm(void* slot) { libai::g_sgemm = static_cast<libai::Sgemm*>(slot); }
// If false, operations use OneFlow's own kernels again.
EXPORTED void libai_native_enable(bool is_enabled) { libai::g_is_enabled = is_enabled; }
// Computes one step of generation. Does nothing and returns false if the kernels are off or OneFlow keeps its own matmuls.
EXPORTED bool libai_native_decode(const libai::DecoderStep* step) { return libai::Decode(*step); }
EXPORTED int libai_native_count() { return static_cast<int>(libai::Entries().size()); }
EXPORTED const char* libai_native_op(int index) { return libai::Entries()[index]->op.c_str(); }
EXPORTED int64_t libai_native_calls(int index) { return libai::Entries()[index]->calls; }
