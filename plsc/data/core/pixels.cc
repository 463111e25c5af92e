// What happens to every pixel on its way to a model: mirroring, and bytes to floats.
#include "kernels.h"

#include <cstring>

namespace plsc {
namespace {

constexpr float kMiddle = 127.5f;

#if defined(__x86_64__)
#define PLSC_AVX2 __attribute__((target("avx2,fma")))
const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");

// The quotient by a multiplication and one step of Newton's, which is the correctly rounded one for all 256 bytes (a
// test divides them all): vector divisions would take as long as the memory.
PLSC_AVX2 void normalise_avx2(const uint8_t* from, float* to, int64_t count) {
  constexpr float inverse = 1.0f / kMiddle;
  for (int64_t i = 0; i < count; ++i) {
    const float x = static_cast<float>(from[i]) - kMiddle;
    const float q = x * inverse;
    to[i] = __builtin_fmaf(__builtin_fmaf(-q, kMiddle, x), inverse, q);
  }
}

typedef uint8_t Bytes __attribute__((vector_size(16)));

// Five pixels of three bytes at a time. The 16th byte of a load may be the first behind the row, that of a store is
// written over by what follows.
PLSC_AVX2 void mirror_rgb_avx2(const uint8_t* from, uint8_t* to, int64_t width) {
  const Bytes order = {12, 13, 14, 9, 10, 11, 6, 7, 8, 3, 4, 5, 0, 1, 2, 15};
  int64_t x = 0;
  for (; x + 6 <= width; x += 5) {
    Bytes pixels;
    std::memcpy(&pixels, from + 3 * (width - 5 - x), 16);
    pixels = __builtin_shuffle(pixels, order);
    std::memcpy(to + 3 * x, &pixels, 16);
  }
  for (; x < width; ++x) std::memcpy(to + 3 * x, from + 3 * (width - 1 - x), 3);
}
#endif

void mirror_row(const uint8_t* from, uint8_t* to, int64_t width, int64_t channels) {
  for (int64_t x = 0; x < width; ++x) std::memcpy(to + channels * x, from + channels * (width - 1 - x), channels);
}

}  // namespace

void normalise(const uint8_t* from, float* to, int64_t count) {
#if defined(__x86_64__)
  if (has_avx2) return normalise_avx2(from, to, count);
#endif
  for (int64_t i = 0; i < count; ++i) to[i] = (static_cast<float>(from[i]) - kMiddle) / kMiddle;
}

void mirror(const uint8_t* from, uint8_t* to, int64_t height, int64_t width, int64_t channels, int64_t stride) {
  for (int64_t y = 0; y < height; ++y) {
    const uint8_t* row = from + y * stride;
    uint8_t* out = to + y * width * channels;
#if defined(__x86_64__)
    if (channels == 3 && has_avx2 && width > 6 && y + 1 < height && stride > 0) {  // a load passes the row's end by a byte
      mirror_rgb_avx2(row, out, width);
      continue;
    }
#endif
    mirror_row(row, out, width, channels);
  }
}

}  // namespace plsc
