// The kernels for x86 processors with AVX-512 (the set that Skylake servers and Zen 4 have in common).
#include "kernels.h"

#if defined(__x86_64__)
namespace plsc {
namespace avx512 {
#if defined(__clang__)
#define PLSC_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#else
#define PLSC_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")))
#endif
#define PLSC_FMA
#include "rows.h"
}  // namespace avx512

const Kernels avx512_kernels = {"avx512", avx512::load_rows, avx512::exponentials, avx512::step_rows};
}  // namespace plsc
#endif
