// One table of loops, for the instruction set that the compiler is told and LIBAI_LEVEL names. Without functions of
// other headers: a copy of one that was compiled for AVX-512 must not be linked for a machine without.
// Products and sums are joined (fma) only where `Fma` says so: -ffp-contract=off.
#include <immintrin.h>

#include "maths.h"

#define INLINE static inline __attribute__((always_inline))
#define SIMD _Pragma("omp simd")

namespace libai {
namespace {
#include "vector.h"
#include "batch_norm.h"
#include "tiles.h"
#include "pointwise.h"
#include "rows.h"
#include "sums.h"
#include "updates.h"
}  // namespace

#define LIBAI_NAME(name) &name,
#define LIBAI_ENTRY(result, name, args) &name,
extern const Maths LIBAI_LEVEL = {LIBAI_UNARY(LIBAI_NAME) LIBAI_UNARY_GRAD(LIBAI_NAME) LIBAI_BINARY(LIBAI_NAME)
                                      LIBAI_COMPARISON(LIBAI_NAME) LIBAI_MATHS(LIBAI_ENTRY)};
}  // namespace libai
