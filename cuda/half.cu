// What a reduction in a half type needs: the largest magnitude, and the cast there and back with the power of two that
// brings it to just below 2^15. The factor is found from that magnitude's bits on the device.
#include "common.cuh"

// largest: [1] bits of a float, zero before; not-a-number is larger than all.
template <class T>
DEVICE void largest_of(const T* x, u32* largest, i64 n, int aligned) {
  u32 top = 0u;
  i64 stride = i64(gridDim.x) * blockDim.x * 4;
  for (i64 i = (i64(blockIdx.x) * blockDim.x + threadIdx.x) * 4; i < n; i += stride) {
    float v[4];
    load4(x + i, v, n - i, aligned && n - i >= 4);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      u32 bits = __float_as_uint(v[k]) & 0x7fffffffu;
      top = bits > top ? bits : top;
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    u32 other = __shfl_xor_sync(ALL_LANES, top, step);
    top = other > top ? other : top;
  }
  if (threadIdx.x % 32 == 0) atomicMax(largest, top);
}

// 2^e with largest * 2^e in [2^14, 2^15), and 2^-e; 1 where largest is not finite or zero's exponent is asked for.
DEVICE float power_of_two(const float* largest, bool down) {
  if (!largest) return 1.0f;
  float value = *largest;
  u32 bits = __float_as_uint(value) & 0x7fffffffu;
  int exponent = !bits ? 15 : bits >= 0x7f800000u ? 0 : 15 - (int(bits >> 23) - 126);
  exponent = exponent < -126 ? -126 : exponent > 126 ? 126 : exponent;  // so of subnormal numbers 126
  return __uint_as_float(u32(127 + (down ? -exponent : exponent)) << 23);
}

// out = x / divisor * 2^e, rounded to the nearest; largest null: no scale.
template <class In, class Out>
DEVICE void cast_of(const In* x, Out* out, const float* largest, i64 n, float divisor, int down, int aligned) {
  i64 i = (i64(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
  if (i >= n) return;
  float factor = power_of_two(largest, down != 0), v[4];
  bool packed = aligned && n - i >= 4;
  load4(x + i, v, n - i, packed);
#pragma unroll
  for (int k = 0; k < 4; ++k) v[k] = (divisor == 1.0f ? v[k] : v[k] / divisor) * factor;
  store4(out + i, v, n - i, packed);
}

#define LARGEST_KERNEL(T)                                                                                            \
  extern "C" __global__ void largest_##T(const T* x, u32* largest, i64 n, int aligned) {                             \
    largest_of<T>(x, largest, n, aligned);                                                                           \
  }                                                                                                                  \
  EXPORT_KERNEL(largest_##T)

#define CAST_KERNEL(In, Out)                                                                                         \
  extern "C" __global__ void cast_##In##_##Out(const In* x, Out* out, const float* largest, i64 n, float divisor,    \
                                               int down, int aligned) {                                              \
    cast_of<In, Out>(x, out, largest, n, divisor, down, aligned);                                                    \
  }                                                                                                                  \
  EXPORT_KERNEL(cast_##In##_##Out)

LARGEST_KERNEL(float)
LARGEST_KERNEL(bf16)
LARGEST_KERNEL(fp16)
CAST_KERNEL(float, fp16)
CAST_KERNEL(float, bf16)
CAST_KERNEL(float, float)
CAST_KERNEL(bf16, fp16)
CAST_KERNEL(bf16, bf16)
CAST_KERNEL(fp16, fp16)
CAST_KERNEL(fp16, bf16)
CAST_KERNEL(fp16, float)
CAST_KERNEL(bf16, float)
