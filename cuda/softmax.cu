// Softmax over a block of classes: inner products of N samples and n class rows become exponentials and sums, logits'
// gradients, or the (maximum, sum) pairs of an online softmax. logit = scale * product * inverse norm.
#include "common.cuh"

constexpr int ROWS = 4;   // samples of a thread block: they share the inverse norms it has read
constexpr int PACKS = 4;  // groups of four classes of a thread

// One group of four classes of one sample, as logits; an own class (row `own` of the block) is told by `at`.
struct Group {
  float cos[4], logit[4];
  int at;  // 0..3: which of the four is the own class; else none is
};

template <class In>
DEVICE Group read_group(const In* product, const float* inv, i64 col, i64 classes, i64 own, float scale, bool packed) {
  Group group;
  load4(product + col, group.cos, classes - col, packed);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    group.cos[i] *= inv[i];
    group.logit[i] = group.cos[i] * scale;
  }
  group.at = (own >= col && own < col + 4) ? int(own - col) : -1;
  return group;
}

DEVICE void read_inverse(const float* inverse, float* inv, i64 col, i64 classes, bool packed) {
  if (inverse) {
    load4(inverse + col, inv, classes - col, packed);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) inv[i] = 1.0f;
}

// gradient: out = coefficient * exp(logit - shift), own entry = own_value, sums of out * cos. Else: out = exp(...), own
// entry 0, sums of out. weigh: what is stored (not what is summed) is multiplied by the inverse norm.
// partial: [N, gridDim.y], a column for each group of classes. out may be product itself.
template <class In, class Out, bool gradient>
DEVICE void exponentials(const In* product, const float* inverse, const float* shift, const i64* place,
                         const float* coefficient, const float* own_value, Out* out, float* partial, i64 samples,
                         i64 classes, i64 start, float scale, int weigh, int aligned) {
  i64 first = i64(blockIdx.x) * ROWS, begin = i64(blockIdx.y) * blockDim.x * 4 * PACKS;
  float sums[ROWS], minus[ROWS], factor[ROWS], value[ROWS];
  i64 own[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    i64 row = first + r < samples ? first + r : samples - 1;
    sums[r] = 0.0f;
    minus[r] = shift[row];
    own[r] = place[row] - start;
    factor[r] = gradient ? coefficient[row] : 1.0f;
    value[r] = gradient ? own_value[row] : 0.0f;
  }
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    i64 col = begin + (i64(pack) * blockDim.x + threadIdx.x) * 4;
    if (col >= classes) break;
    bool packed = aligned && classes - col >= 4;
    float inv[4];
    read_inverse(inverse, inv, col, classes, packed);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (first + r >= samples) break;
      i64 base = (first + r) * classes;
      Group group = read_group(product + base, inv, col, classes, own[r], scale, packed);
      float result[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bool is_own = group.at == i, there = i < classes - col;
        float e = is_own ? value[r] : factor[r] * expf(group.logit[i] - minus[r]);
        sums[r] += there ? (gradient ? e * group.cos[i] : e) : 0.0f;
        result[i] = weigh ? e * inv[i] : e;
      }
      store4(out + base + col, result, classes - col, packed);
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float total = block_sum(sums[r]);
    if (threadIdx.x == 0 && first + r < samples) partial[(first + r) * gridDim.y + blockIdx.y] = total;
  }
}

// maxima and sums [N, gridDim.y]: of each group of classes the largest logit m and sum of exp(logit - m), own class
// left out; a group without a logit above -inf has sum 0. Nothing else is written.
template <class In>
DEVICE void online(const In* product, const float* inverse, const i64* place, float* maxima, float* sums, i64 samples,
                   i64 classes, i64 start, float scale, int aligned) {
  const float infinity = __uint_as_float(0x7f800000u);
  i64 row = blockIdx.x, begin = i64(blockIdx.y) * blockDim.x * 4 * PACKS, own = place[row] - start;
  float logits[PACKS * 4];
  float top = -infinity;
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    i64 col = begin + (i64(pack) * blockDim.x + threadIdx.x) * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) logits[pack * 4 + i] = -infinity;
    if (col >= classes) continue;
    bool packed = aligned && classes - col >= 4;
    float inv[4];
    read_inverse(inverse, inv, col, classes, packed);
    Group group = read_group(product + row * classes, inv, col, classes, own, scale, packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (group.at != i && i < classes - col) logits[pack * 4 + i] = group.logit[i];
      top = larger(top, logits[pack * 4 + i]);
    }
  }
  top = block_max(top);
  float sum = 0.0f, shift = top == -infinity ? 0.0f : top;
#pragma unroll
  for (int i = 0; i < PACKS * 4; ++i) sum += expf(logits[i] - shift);
  sum = block_sum(sum);
  if (threadIdx.x == 0) {
    maxima[row * gridDim.y + blockIdx.y] = top;
    sums[row * gridDim.y + blockIdx.y] = sum;
  }
}

#define EXP_KERNEL(in, out)                                                                                          \
  extern "C" __global__ void exp_rows_##in##_##out(const in* product, const float* inverse, const float* shift,      \
                                                   const i64* place, out* result, float* partial, i64 samples,       \
                                                   i64 classes, i64 start, float scale, int weigh, int aligned) {    \
    exponentials<in, out, false>(product, inverse, shift, place, nullptr, nullptr, result, partial, samples,         \
                                 classes, start, scale, weigh, aligned);                                             \
  }                                                                                                                  \
  EXPORT_KERNEL(exp_rows_##in##_##out)                                                                               \
  extern "C" __global__ void grad_rows_##in##_##out(                                                                 \
      const in* product, const float* inverse, const float* shift, const i64* place, const float* coefficient,       \
      const float* own_value, out* result, float* partial, i64 samples, i64 classes, i64 start, float scale,         \
      int weigh, int aligned) {                                                                                      \
    exponentials<in, out, true>(product, inverse, shift, place, coefficient, own_value, result, partial, samples,    \
                                classes, start, scale, weigh, aligned);                                              \
  }                                                                                                                  \
  EXPORT_KERNEL(grad_rows_##in##_##out)

#define ONLINE_KERNEL(in)                                                                                            \
  extern "C" __global__ void online_##in(const in* product, const float* inverse, const i64* place, float* maxima,   \
                                         float* sums, i64 samples, i64 classes, i64 start, float scale,              \
                                         int aligned) {                                                              \
    online<in>(product, inverse, place, maxima, sums, samples, classes, start, scale, aligned);                      \
  }                                                                                                                  \
  EXPORT_KERNEL(online_##in)

EXP_KERNEL(float, float)
EXP_KERNEL(float, bf16)
EXP_KERNEL(float, fp16)
EXP_KERNEL(bf16, bf16)
EXP_KERNEL(fp16, fp16)
ONLINE_KERNEL(float)
ONLINE_KERNEL(bf16)
ONLINE_KERNEL(fp16)
