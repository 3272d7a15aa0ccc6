// One table of loops, for the instruction set in the compiler's flags. LIBAI_LEVEL is the name of the table. This file
// uses no functions of other headers: the linker keeps one copy of each, which might be compiled for AVX-512.
// Because of -ffp-contract=off, a product and a sum are fused (fma) only where the code calls `Fma` or `AddProduct`.
#include <immintrin.h>

#include "maths.h"

#define INLINE static inline __attribute__((always_inline))
#define SIMD _Pragma("omp simd")

namespace libai {
namespace {
#include "vector.h"
#include "batch_norm.h"
#include "tiles.h"
#include "depthwise.h"
#include "pointwise.h"
#include "rows.h"
#include "sums.h"
#include "updates.h"
#include "recurrent.h"
}  // namespace

#define LIBAI_NAME(name) &name,
#define LIBAI_CURVE_NAMES(name) &name, &name##Grad,
#define LIBAI_ENTRY(result, name, args) &name,
extern const Maths LIBAI_LEVEL = {LIBAI_CURVE(LIBAI_CURVE_NAMES) LIBAI_BINARY(LIBAI_NAME)
                                      LIBAI_COMPARISON(LIBAI_NAME) LIBAI_MATHS(LIBAI_ENTRY)};
}  // namespace libai
