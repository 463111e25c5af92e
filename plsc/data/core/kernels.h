// The native parts of reading: plain pointers, no Python.
#pragma once

#include <cstdint>

namespace plsc {

// to = (from - 127.5) / 127.5, rounded once.
void normalise(const uint8_t* from, float* to, int64_t count);

// An image left-right mirrored. Rows lie `stride` bytes apart in the source and side by side in the target.
void mirror(const uint8_t* from, uint8_t* to, int64_t height, int64_t width, int64_t channels, int64_t stride);

// Lines `number TAB number` as pairs. How many; -1 where the text holds anything else, a number of more than 18 digits or
// more than `most` lines.
int64_t parse_pairs(const char* text, int64_t size, int64_t* pairs, int64_t most);

}  // namespace plsc
