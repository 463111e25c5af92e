// Indices in text: tens of millions of lines are read before a run can start.
#include "kernels.h"

namespace plsc {
namespace {

constexpr int kMostDigits = 18;  // what fits into 63 bits whatever the digits are

// Moves `at` behind a number; false if there is none, or too long a one.
bool parse_number(const char*& at, const char* end, int64_t& number) {
  const char* start = at;
  uint64_t value = 0;
  for (; at < end && *at >= '0' && *at <= '9'; ++at) value = 10 * value + static_cast<uint64_t>(*at - '0');
  number = static_cast<int64_t>(value);
  return at > start && at - start <= kMostDigits;
}

}  // namespace

int64_t parse_pairs(const char* text, int64_t size, int64_t* pairs, int64_t most) {
  const char *at = text, *end = text + size;
  int64_t count = 0;
  for (; at < end; ++count, pairs += 2) {
    if (count == most || !parse_number(at, end, pairs[0]) || at == end || *at++ != '\t') return -1;
    if (!parse_number(at, end, pairs[1]) || at == end || *at++ != '\n') return -1;
  }
  return count;
}

}  // namespace plsc
