// One optimizer step on rows of a class weight: the gradient of unit rows goes through the normalisation, then SGD with
// momentum or AdamW, and the row's new inverse norm comes out. A warp a row; nothing is read or written twice in memory.
//
// Weights: float; bf16 rounded by chance; split, the upper and lower 16 bits of a float apart (the upper ones are the
// operand of products, so inverse norms are theirs). Momenta: float, bf16 rounded by chance, int8 with a scale a row.
#include "common.cuh"

typedef unsigned short u16;

// Random bits of an element, from (key, row, place in the row): the low 16 for the weight, the high 16 for the state.
DEVICE u32 row_key(u32 key, i64 row) { return mix(mix(u32(row) ^ key) ^ u32(u64(row) >> 32)); }
DEVICE u32 random_bits(u32 row_key, i64 d) { return mix(row_key + u32(d) * 0x9E3779B9u); }

// ---- formats of the weight; load: four elements; store: four elements, giving back what a product will see; seen: what
// a product sees of an element

struct Plain {
  float* w;
  DEVICE float seen(float x) const { return x; }
  DEVICE void load(i64 at, float* x, i64 left, bool packed) const { load4(w + at, x, left, packed); }
  DEVICE void store(i64 at, float* x, const u32*, i64 left, bool packed) const { store4(w + at, x, left, packed); }
};

struct Rounded {
  bf16* w;
  DEVICE float seen(float x) const { return x; }
  DEVICE void load(i64 at, float* x, i64 left, bool packed) const { load4(w + at, x, left, packed); }
  DEVICE void store(i64 at, float* x, const u32* random, i64 left, bool packed) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = widen(round_by_chance(x[i], random[i] & 0xffffu));
    store4(w + at, x, left, packed);  // exact: x has only the upper bits
  }
};

struct Split {
  bf16* w;
  u16* low;
  DEVICE float seen(float x) const { return __uint_as_float(__float_as_uint(x) & 0xffff0000u); }
  DEVICE void load(i64 at, float* x, i64 left, bool packed) const {
    if (packed) {
      Four<bf16> upper = *reinterpret_cast<const Four<bf16>*>(w + at);
      Four<u16> lower = *reinterpret_cast<const Four<u16>*>(low + at);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(u32(upper.v[i].bits) << 16 | lower.v[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = i < left ? __uint_as_float(u32(w[at + i].bits) << 16 | low[at + i]) : 0.0f;
    }
  }
  DEVICE void store(i64 at, float* x, const u32*, i64 left, bool packed) const {
    Four<bf16> upper;
    Four<u16> lower;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 bits = __float_as_uint(x[i]);
      upper.v[i].bits = u16(bits >> 16);
      lower.v[i] = u16(bits);
      x[i] = __uint_as_float(bits & 0xffff0000u);
    }
    if (packed) {
      store_four(w + at, upper);
      store_four(low + at, lower);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (i < left) {
          w[at + i] = upper.v[i];
          low[at + i] = lower.v[i];
        }
    }
  }
};

// ---- formats of the optimizer's state

DEVICE void store_state(float* to, const float* x, const u32*, i64 left, bool packed) { store4(to, x, left, packed); }
DEVICE void store_state(bf16* to, const float* x, const u32* random, i64 left, bool packed) {
  float rounded[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) rounded[i] = widen(round_by_chance(x[i], random[i] >> 16));
  store4(to, rounded, left, packed);
}

DEVICE void load_bytes(const signed char* from, float scale, float* x, i64 left, bool packed) {
  if (packed) {
    Four<signed char> four = *reinterpret_cast<const Four<signed char>*>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = float(four.v[i]) * scale;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = i < left ? float(from[i]) * scale : 0.0f;
  }
}

// x in steps of `scale`, up or down by chance; 1 where the scale is not finite, which then says so.
DEVICE void store_bytes(signed char* to, const float* x, float scale, const u32* random, i64 left, bool packed) {
  Four<signed char> four;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float steps = floorf(x[i] / scale + float(random[i] >> 16) * (1.0f / 65536.0f));
    steps = steps > 127.0f ? 127.0f : steps < -127.0f ? -127.0f : steps;
    bool finite = scale - scale == 0.0f;
    four.v[i] = !finite ? (signed char)1 : scale == 0.0f ? (signed char)0 : (signed char)(int)steps;
  }
  if (packed) {
    store_four(to, four);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < left) to[i] = four.v[i];
  }
}

// ---- what both optimizers share

struct Rows {
  const float* grad;  // [num_rows, dim]: gradient of unit rows; of the rows themselves where they are not normalised
  float* inverse;     // [num_rows] 1 / norm of the new rows, out; null: not wanted
  const i64* rows;    // [num_rows] row numbers, or null: start, start + 1, ...
  i64 num_rows, dim, start, first_class;
  int normalize;  // 0: no; 1: yes; 2: yes, and grad is multiplied by the inverse norm already
  int aligned;
  u32 key;
};

// A warp's row: its place in the weight, and how its gradient goes through the normalisation.
struct Row {
  i64 at;  // of its first element in the weight
  i64 number;
  const float* grad;
  float radial, shrink;
  u32 key;
};

template <class Weight>
DEVICE Row open_row(const Weight& weight, const Rows& all, i64 r) {
  int lane = threadIdx.x % 32;
  Row row;
  row.number = all.rows ? all.rows[r] : all.start + r;
  row.at = row.number * all.dim;
  row.grad = all.grad + r * all.dim;
  row.key = row_key(all.key, all.first_class + row.number);
  row.radial = 0.0f;
  row.shrink = 1.0f;
  if (all.normalize) {
    float dot = 0.0f, squares = 0.0f;
    for (i64 d = lane * 4; d < all.dim; d += 128) {
      bool packed = all.aligned && all.dim - d >= 4;
      float w[4], g[4];
      weight.load(row.at + d, w, all.dim - d, packed);
      load4(row.grad + d, g, all.dim - d, packed);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float seen = weight.seen(w[i]);
        dot += seen * g[i];
        squares += seen * seen;
      }
    }
    dot = warp_sum(dot);
    squares = warp_sum(squares);
    row.radial = squares > 0.0f ? dot / squares : squares * 0.0f;
    if (all.normalize == 1) row.shrink = squares > 0.0f ? 1.0f / sqrtf(squares) : squares * 0.0f;
  }
  return row;
}

// Elements [d, d + 4) of the row: the weight and its gradient.
template <class Weight>
DEVICE void read_row(const Weight& weight, const Rows& all, const Row& row, i64 d, float* w, float* g, bool packed) {
  weight.load(row.at + d, w, all.dim - d, packed);
  load4(row.grad + d, g, all.dim - d, packed);
#pragma unroll
  for (int i = 0; i < 4; ++i) g[i] = (g[i] - weight.seen(w[i]) * row.radial) * row.shrink;
}

DEVICE void close_row(const Rows& all, i64 r, float squares) {
  if (!all.inverse) return;
  float total = warp_sum(squares);
  if (threadIdx.x % 32 == 0) all.inverse[r] = total > 0.0f ? 1.0f / sqrtf(total) : total * 0.0f;
}

// ---- SGD with momentum

struct Sgd {
  float lr, momentum, decay;
  int nesterov;
};

DEVICE float sgd_velocity(float& g, float w, float v, const Sgd& sgd) {
  if (sgd.decay != 0.0f) g += w * sgd.decay;
  return g + v * sgd.momentum;
}

DEVICE float sgd_weight(float w, float g, float v, const Sgd& sgd) {
  return w - (sgd.nesterov ? g + v * sgd.momentum : v) * sgd.lr;
}

// State float or bf16; velocity null: no momentum.
template <class Weight, class State>
DEVICE void sgd_rows(const Weight& weight, State* velocity, const float*, const Rows& all, const Sgd& sgd) {
  i64 r = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (r >= all.num_rows) return;
  Row row = open_row(weight, all, r);
  float squares = 0.0f;
  for (i64 d = (threadIdx.x % 32) * 4; d < all.dim; d += 128) {
    i64 left = all.dim - d;
    bool packed = all.aligned && left >= 4;
    float w[4], g[4], v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    u32 random[4];
    read_row(weight, all, row, d, w, g, packed);
    if (velocity) load4(velocity + row.at + d, v, left, packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      random[i] = random_bits(row.key, d + i);
      v[i] = sgd_velocity(g[i], w[i], v[i], sgd);
      w[i] = sgd_weight(w[i], g[i], v[i], sgd);
    }
    if (velocity) store_state(velocity + row.at + d, v, random, left, packed);
    weight.store(row.at + d, w, random, left, packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) squares += i < left ? w[i] * w[i] : 0.0f;
  }
  close_row(all, r, squares);
}

// State int8 with `scales` [rows of the weight]: the largest momentum of the row is 127 steps.
template <class Weight>
DEVICE void sgd_rows(const Weight& weight, signed char* velocity, float* scales, const Rows& all, const Sgd& sgd) {
  i64 r = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (r >= all.num_rows) return;
  Row row = open_row(weight, all, r);
  float before = scales[row.number], top = 0.0f, squares = 0.0f;
  for (i64 d = (threadIdx.x % 32) * 4; d < all.dim; d += 128) {
    bool packed = all.aligned && all.dim - d >= 4;
    float w[4], g[4], v[4];
    read_row(weight, all, row, d, w, g, packed);
    load_bytes(velocity + row.at + d, before, v, all.dim - d, packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) top = larger(top, fabsf(sgd_velocity(g[i], w[i], v[i], sgd)));
  }
  float after = warp_max(top) / 127.0f;
  for (i64 d = (threadIdx.x % 32) * 4; d < all.dim; d += 128) {
    i64 left = all.dim - d;
    bool packed = all.aligned && left >= 4;
    float w[4], g[4], v[4];
    u32 random[4];
    read_row(weight, all, row, d, w, g, packed);
    load_bytes(velocity + row.at + d, before, v, left, packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      random[i] = random_bits(row.key, d + i);
      v[i] = sgd_velocity(g[i], w[i], v[i], sgd);
      w[i] = sgd_weight(w[i], g[i], v[i], sgd);
    }
    store_bytes(velocity + row.at + d, v, after, random, left, packed);
    weight.store(row.at + d, w, random, left, packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) squares += i < left ? w[i] * w[i] : 0.0f;
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) scales[row.number] = after;
  close_row(all, r, squares);
}

// ---- AdamW, with a count of steps for each row

struct Adam {
  float lr, beta1, beta2, log_beta1, log_beta2, eps, decay;
};

template <class Weight, class State>
DEVICE void adam_rows(const Weight& weight, State* average, State* square, float* steps, const Rows& all,
                      const Adam& adam) {
  i64 r = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (r >= all.num_rows) return;
  Row row = open_row(weight, all, r);
  float step = steps[row.number] + 1.0f;
  float size = adam.lr / -expm1f(step * adam.log_beta1);  // 1 - beta^step without cancellation
  float root = sqrtf(-expm1f(step * adam.log_beta2));
  float squares = 0.0f;
  for (i64 d = (threadIdx.x % 32) * 4; d < all.dim; d += 128) {
    i64 left = all.dim - d;
    bool packed = all.aligned && left >= 4;
    float w[4], g[4], m[4], s[4];
    u32 random[4];
    read_row(weight, all, row, d, w, g, packed);
    load4(average + row.at + d, m, left, packed);
    load4(square + row.at + d, s, left, packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      random[i] = random_bits(row.key, d + i);
      m[i] += (g[i] - m[i]) * (1.0f - adam.beta1);
      s[i] = s[i] * adam.beta2 + g[i] * g[i] * (1.0f - adam.beta2);
      w[i] = w[i] * (1.0f - adam.lr * adam.decay) - size * m[i] / (sqrtf(s[i]) / root + adam.eps);
    }
    store_state(average + row.at + d, m, random, left, packed);
    store_state(square + row.at + d, s, random, left, packed);
    weight.store(row.at + d, w, random, left, packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) squares += i < left ? w[i] * w[i] : 0.0f;
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) steps[row.number] = step;
  close_row(all, r, squares);
}

// ---- the kernels: sgd_WEIGHT_STATE and adam_WEIGHT_STATE

#define WEIGHT_float(w, low) (Plain{(float*)w})
#define WEIGHT_bf16(w, low) (Rounded{(bf16*)w})
#define WEIGHT_split(w, low) (Split{(bf16*)w, (u16*)low})
typedef signed char int8;

#define SGD_KERNEL(kind, state)                                                                                      \
  extern "C" __global__ void sgd_##kind##_##state(                                                                   \
      void* weight, void* low, state* velocity, float* scales, const float* grad, float* inverse, const i64* rows,   \
      i64 num_rows, i64 dim, i64 start, i64 first_class, int normalize, int aligned, u32 key, float lr,                \
      float momentum, float decay, int nesterov) {                                                                   \
    Rows all = {grad, inverse, rows, num_rows, dim, start, first_class, normalize, aligned, key};                      \
    sgd_rows(WEIGHT_##kind(weight, low), velocity, scales, all, Sgd{lr, momentum, decay, nesterov});                 \
  }                                                                                                                  \
  EXPORT_KERNEL(sgd_##kind##_##state)

#define ADAM_KERNEL(kind, state)                                                                                     \
  extern "C" __global__ void adam_##kind##_##state(                                                                  \
      void* weight, void* low, state* average, state* square, float* steps, const float* grad, float* inverse,       \
      const i64* rows, i64 num_rows, i64 dim, i64 start, i64 first_class, int normalize, int aligned, u32 key,         \
      float lr, float beta1, float beta2, float log_beta1, float log_beta2, float eps, float decay) {                \
    Rows all = {grad, inverse, rows, num_rows, dim, start, first_class, normalize, aligned, key};                      \
    Adam adam = {lr, beta1, beta2, log_beta1, log_beta2, eps, decay};                                                \
    adam_rows(WEIGHT_##kind(weight, low), average, square, steps, all, adam);                                        \
  }                                                                                                                  \
  EXPORT_KERNEL(adam_##kind##_##state)

SGD_KERNEL(float, float)
SGD_KERNEL(float, bf16)
SGD_KERNEL(float, int8)
SGD_KERNEL(bf16, float)
SGD_KERNEL(bf16, bf16)
SGD_KERNEL(bf16, int8)
SGD_KERNEL(split, float)
SGD_KERNEL(split, bf16)
SGD_KERNEL(split, int8)
ADAM_KERNEL(float, float)
ADAM_KERNEL(float, bf16)
ADAM_KERNEL(bf16, float)
ADAM_KERNEL(bf16, bf16)
ADAM_KERNEL(split, float)
ADAM_KERNEL(split, bf16)
