// The kernels for x86 processors with AVX2 and fused multiply-add.
#include "kernels.h"

#if defined(__x86_64__)
namespace plsc {
namespace avx2 {
#define PLSC_TARGET __attribute__((target("avx2,fma")))
#define PLSC_FMA
#include "rows.h"
}  // namespace avx2

const Kernels avx2_kernels = {"avx2", avx2::load_rows, avx2::exponentials, avx2::step_rows};
}  // namespace plsc
#endif
