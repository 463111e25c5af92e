// What the kernels of the class-parallel head are given: plain pointers to rows and blocks. No torch, no Python.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace plsc {

// How the numbers of a row are kept. split: the upper 16 bits of each float in one array, the lower in another.
enum class Format : int { none = 0, fp32 = 1, bf16 = 2, split = 3, int8 = 4 };

// The rows that a call works on: row r of the block is row index[r] of the weight, or start + r where index is null.
struct Rows {
  const int64_t* index;
  int64_t start, count;
  int64_t at(int64_t r) const { return index != nullptr ? index[r] : start + r; }
};

struct Weight {
  Format format;
  void* data;
  uint16_t* low;  // of split
  int64_t dim, centers;  // a row is `centers` vectors of `dim`, normalised one by one
  int64_t length() const { return dim * centers; }
};

struct Block {  // [samples, classes], the columns contiguous
  float* data;
  int64_t samples, classes, stride;
};

enum class Rule : int { gradient = 0, sgd = 1, adamw = 2 };

struct Step {
  Rule rule;
  bool normalize, nesterov;
  float lr, weight_decay, momentum, beta1, beta2, eps;
  Format momentum_format;
  void* momentum_data;      // of sgd, or exp_avg of adamw
  float* momentum_scale;    // of int8, one a row
  float* second;            // exp_avg_sq
  float* steps;             // one a row
  uint32_t key;             // of the random bits of this step
  int64_t first_class;      // global id of the weight's row 0
};

struct Kernels {
  const char* name;
  // out [count, length] as floats (may be null where rows are wanted as they lie), inverse [count * centers] = 1 / |w|,
  // 0 for a zero vector (may be null).
  void (*load)(const Weight&, const Rows&, int64_t begin, int64_t end, float* out, float* inverse);
  // For samples [begin, end): block[i, j] = exp(block[i, j] * inverse[j] - shift) * inverse[j], and the sum of the
  // exponentials added to total[i]. The entry with place[i] == start + j is left out: 0 in both.
  void (*exponentials)(const Block&, const float* inverse, const int64_t* place, int64_t start, float shift, float* total,
                       int64_t begin, int64_t end);
  // One optimizer step for rows [begin, end) with the gradients grad [count, length], which are overwritten.
  void (*step)(const Weight&, const Rows&, const Step&, float* grad, int64_t begin, int64_t end);
};

extern const Kernels scalar_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels, avx512_kernels;
#endif

}  // namespace plsc
