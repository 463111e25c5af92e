// What every kernel here shares: half types as bits, four elements at a time, sums over a block, the hash.
//
// The files compile with nvcc, with NVRTC (no header of CUDA's is needed) and, behind a shim, as C++ for a CPU. Blocks
// are one-dimensional and a multiple of 32 threads. Kernels take raw pointers, long long, int, unsigned, float, double.
#pragma once

#ifndef PLSC_SHIM
#define DEVICE __device__ __forceinline__
#define SHARED_ARRAY(type, name, count) __shared__ type name[count]
#define EXPORT_KERNEL(name)
#define CHECK_ALIGNED(address, bytes)
#endif

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned u32;

constexpr u32 ALL_LANES = 0xffffffffu;

struct bf16 {
  unsigned short bits;
};
struct fp16 {
  unsigned short bits;
};

// ---- one element

DEVICE float widen(float x) { return x; }
DEVICE float widen(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
DEVICE float widen(fp16 x) {
#ifdef PLSC_SHIM
  return shim::half_to_float(x.bits);
#else
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#endif
}

// To the nearest, ties to even; NaN stays NaN.
DEVICE void narrow(float x, float& out) { out = x; }
DEVICE void narrow(float x, bf16& out) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
#else
  u32 bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0x7fc00000u;
  else bits += 0x7fffu + ((bits >> 16) & 1u);
  out.bits = (unsigned short)(bits >> 16);
#endif
}
DEVICE void narrow(float x, fp16& out) {
#ifdef PLSC_SHIM
  out.bits = shim::float_to_half(x);
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
#endif
}

// Up or down with the chance that makes the mean exact; random: 16 bits. Infinities and NaN stay what they are.
DEVICE bf16 round_by_chance(float x, u32 random) {
  u32 bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) bits |= 0x400000u;
  else if ((bits & 0x7f800000u) != 0x7f800000u) bits += random;
  bf16 out;
  out.bits = (unsigned short)(bits >> 16);
  return out;
}

// max and min that keep NaN, as torch's do.
DEVICE float larger(float a, float b) { return (a > b || a != a) ? a : b; }

// ---- four elements at a time

template <class T>
struct alignas(4 * sizeof(T)) Four {
  T v[4];
};

template <class T>
DEVICE Four<T> load_four(const T* from) {
  CHECK_ALIGNED(from, sizeof(Four<T>));
  return *reinterpret_cast<const Four<T>*>(from);
}

// As one access. A compiler that finds the same stores one by one beside it would otherwise merge the two ways.
template <class T>
DEVICE void store_four(T* to, const Four<T>& four) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 2 || sizeof(T) == 1, "of 4, 2 or 1 bytes");
  CHECK_ALIGNED(to, sizeof(Four<T>));
  if constexpr (sizeof(T) == 4) {
#ifdef PLSC_SHIM
    *reinterpret_cast<Four<T>*>(to) = four;
#else
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "f"(four.v[0]),
                 "f"(four.v[1]), "f"(four.v[2]), "f"(four.v[3])
                 : "memory");
#endif
  } else if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<u64*>(to) = __builtin_bit_cast(u64, four);
  } else {
    *reinterpret_cast<u32*>(to) = __builtin_bit_cast(u32, four);
  }
}

// packed: every address is a multiple of four elements and all four are there; else one by one, `left` of them.
template <class T>
DEVICE void load4(const T* from, float* to, i64 left, bool packed) {
  if (packed) {
    Four<T> four = load_four(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = widen(four.v[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = i < left ? widen(from[i]) : 0.0f;
  }
}

template <class T>
DEVICE void store4(T* to, const float* from, i64 left, bool packed) {
  if (packed) {
    Four<T> four;
#pragma unroll
    for (int i = 0; i < 4; ++i) narrow(from[i], four.v[i]);
    store_four(to, four);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < left) narrow(from[i], to[i]);
  }
}

// ---- a warp, a block

DEVICE float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
  return x;
}

DEVICE float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = larger(x, __shfl_xor_sync(ALL_LANES, x, step));
  return x;
}

// The sum of x over the block, the same bits in every thread.
DEVICE float block_sum(float x) {
  SHARED_ARRAY(float, scratch, 32);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  x = warp_sum(x);
  __syncthreads();  // BARRIER: a slower warp may still read what the last call left
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}

DEVICE float block_max(float x) {
  SHARED_ARRAY(float, scratch, 32);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  x = warp_max(x);
  __syncthreads();
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  return warp_max(lane < warps ? scratch[lane] : scratch[0]);
}

// ---- numbers without state

// The hash of plsc.ops.sampling.mix.
DEVICE u32 mix(u32 h) {
  h = (h ^ (h >> 16)) * 0x7FEB352Du;
  h = (h ^ (h >> 15)) * 0x846CA68Bu;
  return h ^ (h >> 16);
}
