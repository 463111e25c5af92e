// Softmax over a block of classes: inner products of N samples and n class rows become exponentials and sums, logits'
// gradients, or the (maximum, sum) pairs of an online softmax. logit = scale * product * inverse norm.
#include "common.cuh"

constexpr int ROWS = 4;   // samples of a thread block: they share the inverse norms it has read
constexpr int PACKS = 4;  // groups of four classes of a thread

// A grid is one number, samples first: blocks in y are at most 65535, which 300 million classes would exceed.
struct Tile {
  i64 group, chunk, chunks, first_class;  // which group of samples, which of how many chunks of classes

  DEVICE Tile(i64 groups, i64 classes) {
    i64 width = i64(blockDim.x) * 4 * PACKS;
    group = blockIdx.x % u32(groups);
    chunk = blockIdx.x / u32(groups);
    chunks = (classes + width - 1) / width;
    first_class = chunk * width;
  }
};

// Four products of one sample to cosines and logits; gives which of the four is the own class, or -1.
DEVICE int to_logits(float* cos, float* logit, const float* inv, i64 col, i64 own, float scale) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    cos[i] *= inv[i];
    logit[i] = cos[i] * scale;
  }
  return (own >= col && own < col + 4) ? int(own - col) : -1;
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
// partial: [N, chunks], a column for each group of classes. out may be product itself.
template <class In, class Out, bool gradient>
DEVICE void exponentials(const In* product, const float* inverse, const float* shift, const i64* place,
                         const float* coefficient, const float* own_value, Out* out, float* partial, i64 samples,
                         i64 classes, i64 start, float scale, int weigh, int aligned) {
  Tile tile((samples + ROWS - 1) / ROWS, classes);
  i64 first = tile.group * ROWS;
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
    i64 col = tile.first_class + (i64(pack) * blockDim.x + threadIdx.x) * 4;
    if (col >= classes) break;
    bool packed = aligned && classes - col >= 4;
    float inv[4];
    read_inverse(inverse, inv, col, classes, packed);
    float cos[ROWS][4];  // all loads before the first store: the compiler cannot know that they do not touch
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      if (first + r < samples) load4(product + (first + r) * classes + col, cos[r], classes - col, packed);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (first + r >= samples) break;
      float result[4], logit[4];
      int at = to_logits(cos[r], logit, inv, col, own[r], scale);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bool there = i < classes - col;
        float e = at == i ? value[r] : factor[r] * expf(logit[i] - minus[r]);
        sums[r] += there ? (gradient ? e * cos[r][i] : e) : 0.0f;
        result[i] = weigh ? e * inv[i] : e;
      }
      store4(out + (first + r) * classes + col, result, classes - col, packed);
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float total = block_sum(sums[r]);
    if (threadIdx.x == 0 && first + r < samples) partial[(first + r) * tile.chunks + tile.chunk] = total;
  }
}

// maxima and sums [N, chunks]: of each group of classes the largest logit m and sum of exp(logit - m), own class
// left out; a group without a logit above -inf has sum 0. Nothing else is written.
template <class In>
DEVICE void online(const In* product, const float* inverse, const i64* place, float* maxima, float* sums, i64 samples,
                   i64 classes, i64 start, float scale, int aligned) {
  const float infinity = __uint_as_float(0x7f800000u);
  Tile tile(samples, classes);
  i64 row = tile.group, own = place[row] - start;
  float logits[PACKS * 4];
  float top = -infinity;
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    i64 col = tile.first_class + (i64(pack) * blockDim.x + threadIdx.x) * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) logits[pack * 4 + i] = -infinity;
    if (col >= classes) continue;
    bool packed = aligned && classes - col >= 4;
    float inv[4];
    read_inverse(inverse, inv, col, classes, packed);
    float cos[4], logit[4];
    load4(product + row * classes + col, cos, classes - col, packed);
    int at = to_logits(cos, logit, inv, col, own, scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (at != i && i < classes - col) logits[pack * 4 + i] = logit[i];
      top = larger(top, logits[pack * 4 + i]);
    }
  }
  top = block_max(top);
  float sum = 0.0f, shift = top == -infinity ? 0.0f : top;
#pragma unroll
  for (int i = 0; i < PACKS * 4; ++i) sum += expf(logits[i] - shift);
  sum = block_sum(sum);
  if (threadIdx.x == 0) {
    maxima[row * tile.chunks + tile.chunk] = top;
    sums[row * tile.chunks + tile.chunk] = sum;
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
