/* The least that a table under hashed keys can do, as a bound: one flat array of 16-byte slots, half full or less, rows
 * of known width, each line asked for long before it is needed; one thread, no locks, no growth, no checks. */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { kDim = 16, kAhead = 24, kRing = 32 };

typedef struct {
  uint64_t key, row; /* row number + 1; 0: free */
} Slot;

static inline uint64_t home(uint64_t key, unsigned shift) { return ((key ^ (key >> 32)) * 0xD1342543DE82EF95ull) >> shift; }

void fill(Slot* slots, unsigned shift, const uint64_t* keys, uint64_t n) {
  const uint64_t mask = ~0ull >> shift;
  for (uint64_t i = 0; i < n; ++i) {
    uint64_t at = home(keys[i], shift);
    while (slots[at].row != 0) at = (at + 1) & mask;
    slots[at].key = keys[i];
    slots[at].row = i + 1;
  }
}

/* Calls USE(i, row or null) for every key, in order; LINES of the row are asked for. */
#define FOR_ROWS(LINES, USE)                                                         \
  const uint64_t mask = ~0ull >> shift;                                              \
  uint64_t homes[kRing];                                                             \
  float* found[kRing];                                                               \
  for (uint64_t i = 0; i < n + 2 * kAhead; ++i) {                                    \
    if (i >= 2 * kAhead) {                                                           \
      float* const row = found[(i - 2 * kAhead) % kRing];                            \
      USE(i - 2 * kAhead, row)                                                       \
    }                                                                                \
    if (i >= kAhead && i < n + kAhead) {                                             \
      const uint64_t key = keys[i - kAhead];                                         \
      uint64_t at = homes[(i - kAhead) % kRing];                                     \
      while (slots[at].row != 0 && slots[at].key != key) at = (at + 1) & mask;       \
      float* const row = slots[at].row == 0 ? 0 : rows + (slots[at].row - 1) * 2 * kDim; \
      found[(i - kAhead) % kRing] = row;                                             \
      for (int line = 0; line < LINES; ++line) __builtin_prefetch(row + 16 * line);  \
    }                                                                                \
    if (i < n) {                                                                     \
      homes[i % kRing] = home(keys[i], shift);                                       \
      __builtin_prefetch(slots + homes[i % kRing]);                                  \
    }                                                                                \
  }

void pull(const Slot* slots, unsigned shift, float* rows, const uint64_t* keys, uint64_t n, float* out) {
#define COPY(I, ROW)                                          \
  if (ROW != 0) memcpy(out + (I)*kDim, ROW, 4 * kDim);        \
  else memset(out + (I)*kDim, 0, 4 * kDim);
  FOR_ROWS(1, COPY)
}

void push(const Slot* slots, unsigned shift, float* rows, const uint64_t* keys, uint64_t n, const float* grads, float lr) {
#define STEP(I, ROW)                                          \
  if (ROW != 0) {                                             \
    const float* const g = grads + (I)*kDim;                  \
    for (int d = 0; d < kDim; ++d) {                          \
      const float sum = ROW[kDim + d] + g[d] * g[d];          \
      ROW[kDim + d] = sum;                                    \
      ROW[d] -= lr * g[d] / (sqrtf(sum) + 1e-10f);            \
    }                                                         \
  }
  FOR_ROWS(2, STEP)
}
