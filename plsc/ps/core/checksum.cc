// CRC-32 as zlib computes it: by tables, eight bytes a step, or folded by carry-less products where the processor has them.
#include <array>
#include <cstring>

#include "bits.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace plsc {
namespace {

using Tables = std::array<std::array<uint32_t, 256>, 8>;

Tables make_tables() {
  Tables tables{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = (c >> 1) ^ ((c & 1u) != 0 ? 0xEDB88320u : 0u);
    tables[0][i] = c;
  }
  for (size_t t = 1; t < 8; ++t) {
    for (size_t i = 0; i < 256; ++i) tables[t][i] = (tables[t - 1][i] >> 8) ^ tables[0][tables[t - 1][i] & 0xFFu];
  }
  return tables;
}

// The remainder itself, without the inversions at both ends.
uint32_t by_tables(uint32_t crc, const unsigned char* at, size_t size) {
  static const Tables t = make_tables();
  for (; size >= 8; size -= 8, at += 8) {
    uint32_t low, high;
    std::memcpy(&low, at, 4);
    std::memcpy(&high, at + 4, 4);
    low ^= crc;
    crc = t[7][low & 0xFFu] ^ t[6][(low >> 8) & 0xFFu] ^ t[5][(low >> 16) & 0xFFu] ^ t[4][low >> 24] ^
          t[3][high & 0xFFu] ^ t[2][(high >> 8) & 0xFFu] ^ t[1][(high >> 16) & 0xFFu] ^ t[0][high >> 24];
  }
  for (; size > 0; --size, ++at) crc = (crc >> 8) ^ t[0][(crc ^ *at) & 0xFFu];
  return crc;
}

#if defined(__x86_64__)
// x times a power of the polynomial's variable, plus what stands that much later in the message.
__attribute__((target("pclmul"))) inline __m128i fold(__m128i x, __m128i power, __m128i later) {
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, power, 0x00), _mm_clmulepi64_si128(x, power, 0x11)), later);
}

// Sixteen bytes with the remainder of `size` ones, a multiple of 64 (Gopal et al. 2009, with its constants for this
// polynomial in reflected order).
__attribute__((target("pclmul"))) void folded(uint32_t crc, const unsigned char* at, size_t size, unsigned char* out) {
  const auto load = [](const unsigned char* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); };
  const __m128i by_512 = _mm_set_epi64x(0x01C6E41596, 0x0154442BD4), by_128 = _mm_set_epi64x(0x00CCAA009E, 0x01751997D0);
  __m128i x[4];
  for (int i = 0; i < 4; ++i) x[i] = load(at + 16 * i);
  x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  for (size_t done = 64; done < size; done += 64) {
    for (int i = 0; i < 4; ++i) x[i] = fold(x[i], by_512, load(at + done + 16 * i));
  }
  for (int i = 1; i < 4; ++i) x[i] = fold(x[i - 1], by_128, x[i]);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), x[3]);
}
#endif

}  // namespace

uint32_t crc32(uint32_t crc, const void* data, size_t size) {
  const auto* at = static_cast<const unsigned char*>(data);
  crc = ~crc;
#if defined(__x86_64__)
  static const bool folds = __builtin_cpu_supports("pclmul");
  if (folds && size >= 64) {
    unsigned char rest[16];
    const size_t most = size / 64 * 64;
    folded(crc, at, most, rest);
    crc = by_tables(0, rest, sizeof rest);
    at += most;
    size -= most;
  }
#endif
  return ~by_tables(crc, at, size);
}

}  // namespace plsc
