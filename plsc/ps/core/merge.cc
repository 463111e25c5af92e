#include "merge.h"

#include <cstring>
#include <random>
#include <vector>

#include "bits.h"

namespace plsc {

namespace {

// Odd, and another in every process: who sends keys cannot choose them to meet. The answer does not depend on it.
uint64_t salt() {
  static const uint64_t drawn = [] {
    std::random_device random;
    return mix(random() ^ (static_cast<uint64_t>(random()) << 32)) | 1;
  }();
  return drawn;
}

// Place: an unsigned type for 1 + n.
template <class Place>
size_t unique_of(const uint64_t* keys, size_t n, uint64_t* unique, int64_t* at) {
  size_t size = 16;
  int shift = 60;  // 64 - log2(size)
  for (; size < 2 * n; size *= 2) --shift;
  const uint64_t salted = salt();
  std::vector<Place> places(size, 0);  // 1 + the key's place in `unique`, at the first free one from its hash on
  size_t count = 0;
  for (size_t i = 0; i < n; ++i) {
    size_t slot = (mix(keys[i] + kGolden) * salted) >> shift;
    while (places[slot] != 0 && unique[places[slot] - 1] != keys[i]) slot = (slot + 1) & (size - 1);
    if (places[slot] == 0) {
      unique[count++] = keys[i];
      places[slot] = static_cast<Place>(count);
    }
    at[i] = static_cast<int64_t>(places[slot]) - 1;
  }
  return count;
}

}  // namespace

size_t unique_keys(const uint64_t* keys, size_t n, uint64_t* unique, int64_t* at) {
  return n < 0xFFFFFFFFu ? unique_of<uint32_t>(keys, n, unique, at) : unique_of<uint64_t>(keys, n, unique, at);
}

void sum_rows(const int64_t* at, const float* rows, size_t n, size_t dim, float* sums) {
  int64_t next = 0;  // a key's first row is copied
  for (size_t i = 0; i < n; ++i) {
    float* const sum = sums + at[i] * dim;
    const float* const row = rows + i * dim;
    if (at[i] == next) {
      std::memcpy(sum, row, dim * sizeof(float));
      ++next;
    } else {
      for (size_t d = 0; d < dim; ++d) sum[d] += row[d];
    }
  }
}

}  // namespace plsc
