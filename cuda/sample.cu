// Which classes take part in a step: bit for bit what plsc.ops.sampling draws, as a bitmap of the shard's blocks of
// 1,024 classes. In turn: sample_labels sets the positives, sample_mark adds what is drawn and counts, and after a sum
// over the counts sample_rows lists the rows and sample_place finds the labels among them.
#include "common.cuh"

constexpr int BLOCK = 1024;  // classes that share one permutation
constexpr int WORDS = BLOCK / 32;

// Where the permutation of a key sends a position: a Feistel network on halves of 5 bits.
DEVICE u32 permute(u32 key, u32 position) {
  u32 left = position >> 5, right = position & 31u;
#pragma unroll
  for (u32 turn = 0; turn < 6; ++turn) {
    u32 next = left ^ (mix(key + (turn * 0x9E3779B9u + right * 0x85EBCA6Bu)) & 31u);
    left = right;
    right = next;
  }
  return left << 5 | right;
}

DEVICE bool in_shard(i64 id, i64 start, i64 stop) { return id >= start && id < stop; }

// Set bits of words[0 .. bit), words of 32 bits.
DEVICE int bits_before(const u32* words, int bit) {
  int count = __popc(words[bit / 32] & ((1u << (bit % 32)) - 1u));
  for (int word = 0; word < bit / 32; ++word) count += __popc(words[word]);
  return count;
}

// bitmap: [blocks * 32], zero before. first_block: the block of class `start`.
extern "C" __global__ void sample_labels(const i64* labels, u32* bitmap, i64 num_labels, i64 start, i64 stop,
                                         i64 first_block) {
  i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= num_labels || !in_shard(labels[i], start, stop)) return;
  i64 at = labels[i] - first_block * BLOCK;
  atomicOr(bitmap + at / 32, 1u << (at % 32));
}
EXPORT_KERNEL(sample_labels)

// One thread block for each block of classes. exact, exact_last: how many to draw of a full block and of the last one
// of all classes, as a fraction; the fraction's part below one is a lottery by key. counts: [blocks].
extern "C" __global__ void sample_mark(u32* bitmap, i64* counts, i64 start, i64 stop, i64 total, i64 first_block,
                                       u32 seed_low, u32 seed_high, u32 step, double exact, double exact_last) {
  SHARED_ARRAY(u32, inside, WORDS);
  SHARED_ARRAY(u32, drawn, WORDS);
  i64 block = first_block + blockIdx.x, first = block * BLOCK;
  int size = total - first < BLOCK ? int(total - first) : BLOCK;
  u32 key = mix(u32(block) ^ mix(mix(mix(seed_low) ^ seed_high) ^ step));
  double lottery = double(mix(key ^ 0x5BD1E995u)) / 4294967296.0;
  int count = int(floor((size == BLOCK ? exact : exact_last) + lottery));
  for (int word = threadIdx.x; word < WORDS; word += blockDim.x) inside[word] = drawn[word] = 0u;
  __syncthreads();
  for (int at = threadIdx.x; at < BLOCK; at += blockDim.x)
    if (int(permute(key, at)) < size) atomicOr(&inside[at / 32], 1u << (at % 32));
  __syncthreads();
  for (int at = threadIdx.x; at < BLOCK; at += blockDim.x) {
    u32 id = permute(key, at);
    int before = size == BLOCK ? at : bits_before(inside, at);
    if (int(id) < size && before < count && in_shard(first + id, start, stop))
      atomicOr(&drawn[id / 32], 1u << (id % 32));
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  u32 word = drawn[threadIdx.x] | bitmap[i64(blockIdx.x) * WORDS + threadIdx.x];
  bitmap[i64(blockIdx.x) * WORDS + threadIdx.x] = word;
  int set = __popc(word);
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) set += __shfl_xor_sync(ALL_LANES, set, lane);
  if (threadIdx.x == 0) counts[blockIdx.x] = set;
}
EXPORT_KERNEL(sample_mark)

// ends: [blocks] sums of counts up to and with each block. rows: [ends of the last block] sorted.
extern "C" __global__ void sample_rows(const u32* bitmap, const i64* ends, const i64* counts, i64* rows, i64 start,
                                       i64 first_block) {
  const u32* words = bitmap + i64(blockIdx.x) * WORDS;
  i64 base = ends[blockIdx.x] - counts[blockIdx.x], first = (first_block + blockIdx.x) * BLOCK - start;
  for (int at = threadIdx.x; at < BLOCK; at += blockDim.x)
    if (words[at / 32] >> (at % 32) & 1u) rows[base + bits_before(words, at)] = first + at;
}
EXPORT_KERNEL(sample_rows)

// place: [num_labels] where each label stands in rows, or -1.
extern "C" __global__ void sample_place(const i64* labels, const u32* bitmap, const i64* ends, const i64* counts,
                                        i64* place, i64 num_labels, i64 start, i64 stop, i64 first_block) {
  i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= num_labels) return;
  i64 at = labels[i] - first_block * BLOCK;
  if (!in_shard(labels[i], start, stop)) {
    place[i] = -1;
    return;
  }
  i64 block = at / BLOCK;
  place[i] = ends[block] - counts[block] + bits_before(bitmap + block * WORDS, int(at % BLOCK));
}
EXPORT_KERNEL(sample_place)
