// The `count` entries of a vector that are largest in magnitude, without sorting it: three histograms of its bits find
// the smallest magnitude that is kept, a count and a sum give every kept entry its place. NaN counts as largest, equal
// magnitudes are kept from the front. No number travels to the host.
#include "common.cuh"

constexpr int BINS = 2048;

template <class T>
DEVICE u32 magnitude(const T* x, i64 i) {
  u32 bits = __float_as_uint(widen(x[i])) & 0x7fffffffu;
  return bits > 0x7f800000u ? 0x7fffffffu : bits;
}

// state: [prefix, remaining]: bits known of the threshold, and how many entries with that prefix are to be kept.
// histogram: [BINS], zero before; counts bits [shift, shift + width) of the entries whose bits above are the prefix.
template <class T>
DEVICE void histogram_of(const T* x, const i64* state, u32* histogram, i64 n, int shift, int width) {
  SHARED_ARRAY(u32, local, BINS);
  u32 prefix = u32(state[0]);
  for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) local[bin] = 0u;
  __syncthreads();
  i64 stride = i64(gridDim.x) * blockDim.x;
  for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride) {
    u32 bits = magnitude(x, i);
    if (bits >> (shift + width) == prefix) atomicAdd(&local[bits >> shift & ((1u << width) - 1u)], 1u);
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x)
    if (local[bin]) atomicAdd(histogram + bin, local[bin]);
}

// One warp: the bin in which the remaining entries end, from the top. Empties the histogram for the next turn.
extern "C" __global__ void select_bin(i64* state, u32* histogram, int width) {
  constexpr int EACH = BINS / 32;
  int lane = threadIdx.x;
  u32* mine = histogram + (31 - lane) * EACH;  // lane 0 has the largest
  i64 sum = 0;
  for (int i = 0; i < EACH; ++i) sum += mine[i];
  i64 above = 0;  // entries in the bins of lower lanes
#pragma unroll
  for (int other = 0; other < 32; ++other) {
    i64 theirs = __shfl_sync(ALL_LANES, sum, other);
    if (other < lane) above += theirs;
  }
  i64 prefix = state[0], remaining = state[1];
  __syncwarp();
  if (above < remaining && above + sum >= remaining) {
    int i = EACH - 1;
    for (; above + mine[i] < remaining; --i) above += mine[i];
    state[0] = prefix << width | ((31 - lane) * EACH + i);
    state[1] = remaining - above;
  }
  for (int i = 0; i < EACH; ++i) mine[i] = 0u;
}
EXPORT_KERNEL(select_bin)

// counts: [2, chunks]: entries above the threshold and equal to it in each chunk of `chunk` entries, a block a chunk.
template <class T>
DEVICE void counts_of(const T* x, const i64* state, i64* counts, i64 n, i64 chunk) {
  u32 threshold = u32(state[0]);
  i64 first = blockIdx.x * chunk, last = first + chunk < n ? first + chunk : n;
  float above = 0.0f, equal = 0.0f;  // exact: a chunk has fewer than 2^24 entries
  for (i64 i = first + threadIdx.x; i < last; i += blockDim.x) {
    u32 bits = magnitude(x, i);
    above += bits > threshold ? 1.0f : 0.0f;
    equal += bits == threshold ? 1.0f : 0.0f;
  }
  above = block_sum(above);
  equal = block_sum(equal);
  if (threadIdx.x == 0) {
    counts[blockIdx.x] = i64(above);
    counts[gridDim.x + blockIdx.x] = i64(equal);
  }
}

// ends: [2, chunks] sums of counts up to and with each chunk. chosen: [count], rising.
template <class T>
DEVICE void write_chosen(const T* x, const i64* state, const i64* counts, const i64* ends, i64* chosen, i64 n,
                         i64 chunk) {
  SHARED_ARRAY(u32, warps_above, 32);
  SHARED_ARRAY(u32, warps_equal, 32);
  u32 threshold = u32(state[0]);
  i64 remaining = state[1];
  i64 above = ends[blockIdx.x] - counts[blockIdx.x];
  i64 equal = ends[gridDim.x + blockIdx.x] - counts[gridDim.x + blockIdx.x];
  i64 first = blockIdx.x * chunk, last = first + chunk < n ? first + chunk : n;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  u32 below = (1u << lane) - 1u;
  for (i64 base = first; base < last; base += blockDim.x) {
    i64 i = base + threadIdx.x;
    u32 bits = i < last ? magnitude(x, i) : 0u;
    bool is_above = i < last && bits > threshold, is_equal = i < last && bits == threshold;
    u32 lanes_above = __ballot_sync(ALL_LANES, is_above), lanes_equal = __ballot_sync(ALL_LANES, is_equal);
    __syncthreads();
    if (lane == 0) {
      warps_above[warp] = __popc(lanes_above);
      warps_equal[warp] = __popc(lanes_equal);
    }
    __syncthreads();
    i64 my_above = above + __popc(lanes_above & below), my_equal = equal + __popc(lanes_equal & below);
    for (int other = 0; other < warps; ++other) {
      if (other < warp) {
        my_above += warps_above[other];
        my_equal += warps_equal[other];
      }
      above += warps_above[other];
      equal += warps_equal[other];
    }
    if (is_above || (is_equal && my_equal < remaining))
      chosen[my_above + (my_equal < remaining ? my_equal : remaining)] = i;
  }
}

#define SELECT_KERNELS(T)                                                                                            \
  extern "C" __global__ void select_histogram_##T(const T* x, const i64* state, u32* histogram, i64 n, int shift,    \
                                                  int width) {                                                       \
    histogram_of<T>(x, state, histogram, n, shift, width);                                                           \
  }                                                                                                                  \
  EXPORT_KERNEL(select_histogram_##T)                                                                                \
  extern "C" __global__ void select_count_##T(const T* x, const i64* state, i64* counts, i64 n, i64 chunk) {         \
    counts_of<T>(x, state, counts, n, chunk);                                                                        \
  }                                                                                                                  \
  EXPORT_KERNEL(select_count_##T)                                                                                    \
  extern "C" __global__ void select_write_##T(const T* x, const i64* state, const i64* counts, const i64* ends,      \
                                              i64* chosen, i64 n, i64 chunk) {                                       \
    write_chosen<T>(x, state, counts, ends, chosen, n, chunk);                                                       \
  }                                                                                                                  \
  EXPORT_KERNEL(select_write_##T)

SELECT_KERNELS(float)
SELECT_KERNELS(bf16)
SELECT_KERNELS(fp16)
