// The k best classes of each sample: what was found before and a block of new scores, merged. Scores fall, equal ones
// by rising class, NaN first, as plsc.ops.topk orders them.
#include "common.cuh"

// (score, class) as one number: the larger, the better. Classes are below 2^32 - 1.
DEVICE u64 rank_of(float score, u32 class_id) {
  u32 bits = __float_as_uint(score == 0.0f ? 0.0f : score);  // -0 equals 0
  if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0x7fffffffu;
  u32 ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return u64(ordered) << 32 | (0xffffffffu - class_id);
}

DEVICE float score_of(u64 rank) {
  u32 ordered = u32(rank >> 32);
  return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

DEVICE i64 class_of(u64 rank) { return i64(0xffffffffu - u32(rank)); }

DEVICE u64 warp_best(u64 x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    u64 other = __shfl_xor_sync(ALL_LANES, x, step);
    x = other > x ? other : x;
  }
  return x;
}

DEVICE u64 block_best(u64 x) {
  SHARED_ARRAY(u64, scratch, 32);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  x = warp_best(x);
  __syncthreads();
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  return warp_best(lane < warps ? scratch[lane] : 0u);
}

// Candidates of a row: `before` of (scores, classes), but for those whose class is `filler`; then `count` of `found`,
// which are classes first, first + 1, ...
template <class T>
struct Candidates {
  const T* scores;
  const i64* classes;
  const T* found;
  i64 before, count, first, filler;

  // The best of this thread's candidates below `limit`, 0 if there is none.
  DEVICE u64 best_below(u64 limit) const {
    u64 best = 0u;
    for (i64 i = threadIdx.x; i < before; i += blockDim.x) {
      if (classes[i] == filler) continue;
      u64 rank = rank_of(widen(scores[i]), u32(classes[i]));
      if (rank < limit && rank > best) best = rank;
    }
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) {
      u64 rank = rank_of(widen(found[i]), u32(first + i));
      if (rank < limit && rank > best) best = rank;
    }
    return best;
  }
};

// A thread block a sample. scores, classes: [N, before]; found: [N, count]; best_scores, best_classes: [N, k]. Where
// candidates run out: -inf and `filler`.
template <class T>
DEVICE void merge(const T* scores, const i64* classes, const T* found, T* best_scores, i64* best_classes, i64 before,
                  i64 count, i64 first, i64 k, i64 filler) {
  i64 row = blockIdx.x;
  Candidates<T> mine = {scores + row * before, classes + row * before, found + row * count,
                        before,                count,                  first,
                        filler};
  u64 own = mine.best_below(~u64(0));
  for (i64 i = 0; i < k; ++i) {
    u64 best = block_best(own);
    if (threadIdx.x == 0) {
      narrow(best ? score_of(best) : __uint_as_float(0xff800000u), best_scores[row * k + i]);
      best_classes[row * k + i] = best ? class_of(best) : filler;
    }
    if (best && own == best) own = mine.best_below(best);  // the one whose candidate was taken looks again
  }
}

#define MERGE_KERNEL(T)                                                                                              \
  extern "C" __global__ void merge_##T(const T* scores, const i64* classes, const T* found, T* best_scores,          \
                                       i64* best_classes, i64 before, i64 count, i64 first, i64 k, i64 filler) {     \
    merge<T>(scores, classes, found, best_scores, best_classes, before, count, first, k, filler);                    \
  }                                                                                                                  \
  EXPORT_KERNEL(merge_##T)

MERGE_KERNEL(float)
MERGE_KERNEL(bf16)
MERGE_KERNEL(fp16)
