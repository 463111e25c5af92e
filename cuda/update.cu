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
      Four<bf16> upper = load_four(w + at);
      Four<u16> lower = load_four(low + at);
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
    Four<signed char> four = load_four(from);
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

constexpr int GROUPS = 4;           // of four elements that a thread holds at a time
constexpr int SPAN = GROUPS * 128;  // elements that a warp holds: a row of up to so many is read once

struct Line {
  float x[GROUPS][4];
};

// Calls each(k, d, left, packed) for the groups of this thread in [base, base + SPAN) that are in the row.
template <class Each>
DEVICE void groups(const Rows& all, i64 base, const Each& each) {
#pragma unroll
  for (int k = 0; k < GROUPS; ++k) {
    i64 d = base + k * 128 + (threadIdx.x % 32) * 4, left = all.dim - d;
    if (left > 0) each(k, d, left, all.aligned && left >= 4);
  }
}

// A warp's row: its place in the weight, and how its gradient goes through the normalisation.
struct Row {
  i64 at;  // of its first element in the weight
  i64 number;
  const float* grad;
  float radial, shrink;
  u32 key;
};

template <class Weight>
DEVICE void read_line(const Weight& weight, const Rows& all, const Row& row, i64 base, Line& w, Line& g) {
  groups(all, base, [&](int k, i64 d, i64 left, bool packed) {
    weight.load(row.at + d, w.x[k], left, packed);
    load4(row.grad + d, g.x[k], left, packed);
  });
}

DEVICE Row find_row(const Rows& all, i64 r) {
  Row row;
  row.number = all.rows ? all.rows[r] : all.start + r;
  row.at = row.number * all.dim;
  row.grad = all.grad + r * all.dim;
  row.key = row_key(all.key, all.first_class + row.number);
  row.radial = 0.0f;
  row.shrink = 1.0f;
  return row;
}

// How the gradient goes through the normalisation; w and g hold the first span.
template <class Weight>
DEVICE void normalize_row(const Weight& weight, const Rows& all, Row& row, const Line& w, const Line& g) {
  if (!all.normalize) return;
  float dot = 0.0f, squares = 0.0f;
  auto add = [&](const Line& a, const Line& b, i64 base) {
    groups(all, base, [&](int k, i64, i64 left, bool) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float seen = i < left ? weight.seen(a.x[k][i]) : 0.0f;
        dot += i < left ? seen * b.x[k][i] : 0.0f;
        squares += seen * seen;
      }
    });
  };
  add(w, g, 0);
  for (i64 base = SPAN; base < all.dim; base += SPAN) {
    Line a, b;
    read_line(weight, all, row, base, a, b);
    add(a, b, base);
  }
  dot = warp_sum(dot);
  squares = warp_sum(squares);
  row.radial = squares > 0.0f ? dot / squares : squares * 0.0f;
  if (all.normalize == 1) row.shrink = squares > 0.0f ? 1.0f / sqrtf(squares) : squares * 0.0f;
}

template <class Weight>
DEVICE float through(const Weight& weight, const Row& row, float w, float g) {
  return (g - weight.seen(w) * row.radial) * row.shrink;
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

DEVICE void load_state(const float* from, float, float* x, i64 left, bool packed) { load4(from, x, left, packed); }
DEVICE void load_state(const bf16* from, float, float* x, i64 left, bool packed) { load4(from, x, left, packed); }
DEVICE void load_state(const signed char* from, float scale, float* x, i64 left, bool packed) {
  load_bytes(from, scale, x, left, packed);
}
DEVICE void save_state(float* to, const float* x, float, const u32* random, i64 left, bool packed) {
  store_state(to, x, random, left, packed);
}
DEVICE void save_state(bf16* to, const float* x, float, const u32* random, i64 left, bool packed) {
  store_state(to, x, random, left, packed);
}
DEVICE void save_state(signed char* to, const float* x, float scale, const u32* random, i64 left, bool packed) {
  store_bytes(to, x, scale, random, left, packed);
}

// velocity null: no momentum. State int8 has `scales` [rows of the weight]: a row's largest momentum is 127 steps.
template <class Weight, class State>
DEVICE void sgd_rows(const Weight& weight, State* velocity, float* scales, const Rows& all, const Sgd& sgd) {
  constexpr bool bytes = sizeof(State) == 1;
  i64 r = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (r >= all.num_rows) return;
  Row row = find_row(all, r);
  float before = bytes ? scales[row.number] : 0.0f, after = 0.0f, squares = 0.0f;
  Line w, g, v;
  auto read = [&](i64 base) {
    read_line(weight, all, row, base, w, g);
    groups(all, base, [&](int k, i64 d, i64 left, bool packed) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v.x[k][i] = 0.0f;
      if (velocity) load_state(velocity + row.at + d, before, v.x[k], left, packed);
    });
  };
  read(0);
  normalize_row(weight, all, row, w, g);
  bool whole = all.dim <= SPAN;
  if (bytes) {
    float top = 0.0f;
    for (i64 base = 0; base < all.dim; base += SPAN) {
      if (!whole) read(base);
      groups(all, base, [&](int k, i64, i64 left, bool) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float grad = through(weight, row, w.x[k][i], g.x[k][i]);
          if (i < left) top = larger(top, fabsf(sgd_velocity(grad, w.x[k][i], v.x[k][i], sgd)));
        }
      });
    }
    after = warp_max(top) / 127.0f;
  }
  for (i64 base = 0; base < all.dim; base += SPAN) {
    if (!whole) read(base);
    groups(all, base, [&](int k, i64 d, i64 left, bool packed) {
      u32 random[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        random[i] = random_bits(row.key, d + i);
        float grad = through(weight, row, w.x[k][i], g.x[k][i]);
        v.x[k][i] = sgd_velocity(grad, w.x[k][i], v.x[k][i], sgd);
        w.x[k][i] = sgd_weight(w.x[k][i], grad, v.x[k][i], sgd);
      }
      if (velocity) save_state(velocity + row.at + d, v.x[k], after, random, left, packed);
      weight.store(row.at + d, w.x[k], random, left, packed);
#pragma unroll
      for (int i = 0; i < 4; ++i) squares += i < left ? w.x[k][i] * w.x[k][i] : 0.0f;
    });
  }
  if (bytes) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) scales[row.number] = after;
  }
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
  Row row = find_row(all, r);
  float step = steps[row.number] + 1.0f, squares = 0.0f;
  float size = adam.lr / -expm1f(step * adam.log_beta1);  // 1 - beta^step without cancellation
  float root = sqrtf(-expm1f(step * adam.log_beta2));
  Line w, g, m, s;
  auto read = [&](i64 base) {
    read_line(weight, all, row, base, w, g);
    groups(all, base, [&](int k, i64 d, i64 left, bool packed) {
      load4(average + row.at + d, m.x[k], left, packed);
      load4(square + row.at + d, s.x[k], left, packed);
    });
  };
  read(0);
  normalize_row(weight, all, row, w, g);
  for (i64 base = 0; base < all.dim; base += SPAN) {
    if (all.dim > SPAN) read(base);
    groups(all, base, [&](int k, i64 d, i64 left, bool packed) {
      u32 random[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        random[i] = random_bits(row.key, d + i);
        float grad = through(weight, row, w.x[k][i], g.x[k][i]);
        m.x[k][i] += (grad - m.x[k][i]) * (1.0f - adam.beta1);
        s.x[k][i] = s.x[k][i] * adam.beta2 + grad * grad * (1.0f - adam.beta2);
        w.x[k][i] = w.x[k][i] * (1.0f - adam.lr * adam.decay) -
                    size * m.x[k][i] / (sqrtf(s.x[k][i]) / root + adam.eps);
      }
      store_state(average + row.at + d, m.x[k], random, left, packed);
      store_state(square + row.at + d, s.x[k], random, left, packed);
      weight.store(row.at + d, w.x[k], random, left, packed);
#pragma unroll
      for (int i = 0; i < 4; ++i) squares += i < left ? w.x[k][i] * w.x[k][i] : 0.0f;
    });
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
