// Repeated keys of a batch, brought together: what a push of one step a key is made of.
#pragma once

#include <cstddef>
#include <cstdint>

namespace plsc {

// The different ones of n keys, in the order in which they first come, and at[i]: which of them keys[i] is. Returns how
// many; `unique` has room for n.
size_t unique_keys(const uint64_t* keys, size_t n, uint64_t* unique, int64_t* at);

// sums[at[i]] += rows[i] for n rows of `dim` numbers, in order; at as unique_keys gives it, sums [most of at + 1, dim] not
// initialised.
void sum_rows(const int64_t* at, const float* rows, size_t n, size_t dim, float* sums);

}  // namespace plsc
