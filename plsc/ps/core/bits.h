// Hashing, counter-based random numbers, half-precision conversion and CRC-32: small functions without state.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace plsc {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

// A bijection of 64-bit words whose output bits each depend on every input bit (Steele et al. 2014, splitmix64).
inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// The x that mix() turns into this.
inline uint64_t unmix(uint64_t x) {
  x = (x ^ (x >> 31) ^ (x >> 62)) * 0x319642B2D24D8EC3ull;
  x = (x ^ (x >> 27) ^ (x >> 54)) * 0x96DE1B173F119089ull;
  return x ^ (x >> 30) ^ (x >> 60);
}

// The high word of a * b: maps a hash onto [0, b) and keeps the order of hashes.
inline uint64_t scale_to(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>((static_cast<Wide>(a) * b) >> 64);
}

// Start of the random stream that belongs to one key of one seed.
inline uint64_t stream_of(uint64_t seed, uint64_t key) { return mix(mix(seed + kGolden) ^ (key * 0xD1342543DE82EF95ull + 1)); }

// Draw i of a stream, in [0, 1): 24 bits, exact in a float.
inline float uniform01(uint64_t stream, uint64_t i) {
  return static_cast<float>(mix(stream + (i + 1) * kGolden) >> 40) * 0x1p-24f;
}

// Draw i of a stream from the standard normal distribution (Box and Muller 1958).
inline float normal01(uint64_t stream, uint64_t i) {
  const double u = (static_cast<double>(uniform01(stream, 2 * i)) + 0x1p-24);
  const double v = uniform01(stream, 2 * i + 1);
  return static_cast<float>(std::sqrt(-2.0 * std::log(u < 1.0 ? u : 1.0)) * std::cos(6.283185307179586 * v));
}

inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

constexpr uint32_t kInfinity = 0x7F800000u;

// Whether none of n numbers is a NaN or of the magnitude `limit` (its bits) or above.
inline __attribute__((always_inline)) bool below(const float* x, size_t n, uint32_t limit) {
  int32_t bad = 0;
  for (size_t d = 0; d < n; ++d) bad |= static_cast<int32_t>(bits_of(x[d]) & 0x7FFFFFFFu) >= static_cast<int32_t>(limit);
  return bad == 0;
}

inline __attribute__((always_inline)) bool finite(const float* x, size_t n) { return below(x, n, kInfinity); }

// x, or the number of magnitude `most` nearest to it.
inline float bounded(float x, float most) { return x > most ? most : x < -most ? -most : x; }

// bfloat16 and IEEE half, rounding to nearest even. Values beyond the range of a half become infinite.
inline float from_bf16(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

inline uint16_t to_bf16(float x) {
  const uint32_t u = bits_of(x);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

inline float from_fp16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t rest = h & 0x7FFFu;
  if (rest >= 0x7C00u) return float_of(sign | 0x7F800000u | ((rest & 0x3FFu) << 13));
  // Multiplying by 2^112 moves the exponent from bias 15 to bias 127 and makes subnormals normal.
  return float_of(sign | bits_of(float_of(rest << 13) * 0x1p112f));
}

inline uint16_t to_fp16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t rest = u & 0x7FFFFFFFu;
  if (rest > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (rest >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);
  if (rest < 0x38800000u) {  // subnormal half: the float adder rounds it, at a fixed exponent
    return static_cast<uint16_t>(sign | (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f)));
  }
  return static_cast<uint16_t>(sign | ((rest - 0x38000000u + 0xFFFu + ((rest >> 13) & 1u)) >> 13));
}

// CRC-32 as zlib and PNG compute it.
uint32_t crc32(uint32_t crc, const void* data, size_t size);

}  // namespace plsc
