// The rules' arithmetic; see rules.h. Loops are written for the compiler's vectoriser, dimensions 8 to 64 at fixed length.
#include "rules.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "bits.h"

namespace plsc {

namespace {

constexpr int kBiasSteps = 4096;
// Squares of larger gradients (2^50, as bits), summed over rows and pushes, would overflow and freeze a row for good.
constexpr uint32_t kTooLarge = uint32_t{127 + 50} << 23;
constexpr uint32_t kLargestBf16 = 0x7F7F0000u;  // as bits of a float

// torch.optim.SGD.
struct Sgd {
  static constexpr int state(int) { return 0; }
  static void step(const RowSpec&, float lr, float* __restrict w, float*, const float* __restrict g, int dim) {
    for (int d = 0; d < dim; ++d) w[d] -= lr * g[d];
  }
};

// torch.optim.SGD with momentum, no dampening; a buffer of zeros gives its first step too.
struct Momentum {
  static constexpr int state(int dim) { return dim; }
  static void step(const RowSpec& spec, float lr, float* __restrict w, float* __restrict s, const float* __restrict g,
                   int dim) {
    const float m = spec.rule.momentum;
    for (int d = 0; d < dim; ++d) {
      s[d] = m * s[d] + g[d];
      w[d] -= lr * s[d];
    }
  }
};

// torch.optim.Adagrad (Duchi et al. 2011).
struct Adagrad {
  static constexpr int state(int dim) { return dim; }
  static void step(const RowSpec& spec, float lr, float* __restrict w, float* __restrict s, const float* __restrict g,
                   int dim) {
    const float eps = spec.rule.eps;
    for (int d = 0; d < dim; ++d) {
      s[d] += g[d] * g[d];
      w[d] -= lr * g[d] / (std::sqrt(s[d]) + eps);
    }
  }
};

// One sum a row, of the mean square of the gradient (row-wise Adagrad, as FBGEMM defines it).
struct RowAdagrad {
  static constexpr int state(int) { return 1; }
  static void step(const RowSpec& spec, float lr, float* __restrict w, float* __restrict s, const float* __restrict g,
                   int dim) {
    float sum = 0.0f;
    for (int d = 0; d < dim; ++d) sum += g[d] * g[d];
    s[0] += sum / static_cast<float>(dim);
    const float rate = lr / (std::sqrt(s[0]) + spec.rule.eps);
    for (int d = 0; d < dim; ++d) w[d] -= rate * g[d];
  }
};

// torch.optim.Adam (Kingma and Ba 2015) with a step count of the row's own: rows without a gradient stand still.
struct Adam {
  static constexpr int state(int dim) { return 2 * dim + 1; }
  static void step(const RowSpec& spec, float lr, float* __restrict w, float* __restrict s, const float* __restrict g,
                   int dim) {
    float* const m = s;
    float* const v = s + dim;
    float* const count = s + 2 * dim;
    if (*count < 16777215.0f) *count += 1.0f;  // floats count no further; the corrections are 1 long before
    const float t = *count;
    float first, second;
    if (t < kBiasSteps) {
      first = spec.bias.first[static_cast<size_t>(t)];
      second = spec.bias.second[static_cast<size_t>(t)];
    } else {
      first = static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(spec.rule.beta1), t)));
      second = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(static_cast<double>(spec.rule.beta2), t)));
    }
    const float b1 = 1.0f - spec.rule.beta1, b2 = spec.rule.beta2, rest2 = 1.0f - spec.rule.beta2;
    const float rate = lr * first, eps = spec.rule.eps;
    for (int d = 0; d < dim; ++d) {
      m[d] += b1 * (g[d] - m[d]);
      v[d] = b2 * v[d] + rest2 * g[d] * g[d];
      w[d] -= rate * m[d] / (std::sqrt(v[d]) * second + eps);
    }
  }
};

// Adam whose weight decay shrinks the value instead of adding to the gradient (Loshchilov and Hutter 2019).
struct AdamW {
  static constexpr int state(int dim) { return Adam::state(dim); }
  static void step(const RowSpec& spec, float lr, float* __restrict w, float* __restrict s, const float* __restrict g,
                   int dim) {
    const float kept = 1.0f - lr * spec.rule.weight_decay;
    for (int d = 0; d < dim; ++d) w[d] *= kept;
    Adam::step(spec, lr, w, s, g, dim);
  }
};

struct User {
  static constexpr int state(int) { return 0; }  // known when it runs: its dimension is never fixed
  static void step(const RowSpec& spec, float lr, float* w, float* s, const float* g, int dim) {
    spec.rule.step(w, s, g, dim, lr, spec.rule.args.data());
  }
};

// FTRL-proximal, per coordinate (McMahan et al. 2013, algorithm 1): alpha is the learning rate. Where that changes,
// sigma is the difference of the new 1 / eta and the old one, as the paper defines it for any rates.
struct Ftrl {
  static constexpr int state(int dim) { return 2 * dim + 1; }
  // Brings z to another learning rate, at which the value stays what it is. `last` 0: the value was set from outside,
  // and z is the one that gives it, or the nearest that gives 0.
  static void follow(const RuleOptions& rule, float lr, float last, const float* w, float* z, const float* n, int dim) {
    for (int d = 0; d < dim; ++d) {
      const float root = rule.beta + std::sqrt(n[d]);
      if (last != 0.0f) {
        z[d] -= (root / lr - root / last) * w[d];
      } else if (w[d] != 0.0f) {
        z[d] = -std::copysign(std::fabs(w[d]) * (root / lr + rule.l2) + rule.l1, w[d]);
      } else {
        z[d] = std::fmin(std::fmax(z[d], -rule.l1), rule.l1);
      }
    }
  }

  static void step(const RowSpec& spec, float lr, float* __restrict w, float* __restrict s, const float* __restrict g,
                   int dim) {
    float* const z = s;
    float* const n = s + dim;
    const float l1 = spec.rule.l1, l2 = spec.rule.l2, beta = spec.rule.beta;
    float& last = s[2 * dim];  // learning rate
    if (last != lr) follow(spec.rule, lr, last, w, z, n, dim);
    last = lr;
    for (int d = 0; d < dim; ++d) {
      const float next = n[d] + g[d] * g[d];
      const float root = std::sqrt(next);
      z[d] += g[d] - (root - std::sqrt(n[d])) / lr * w[d];
      n[d] = next;
      const float shrunk = std::fabs(z[d]) - l1, slope = (beta + root) / lr + l2;
      const float moved = shrunk > 0.0f ? -std::copysign(shrunk, z[d]) / slope : 0.0f;
      w[d] = slope > 0.0f ? moved : w[d];  // 0: nothing has been learnt, nothing pulls
    }
  }
};

bool clips(const RuleOptions& rule) { return rule.clip_norm > 0.0f || rule.clip_value > 0.0f; }

// Weight decay, then clipping by norm, then by value; into `out`.
void prepare(const RuleOptions& rule, float decay, const float* w, const float* g, float* out, int dim) {
  for (int d = 0; d < dim; ++d) out[d] = g[d] + decay * w[d];
  if (rule.clip_norm > 0.0f) {
    double sum = 0.0;
    for (int d = 0; d < dim; ++d) sum += static_cast<double>(out[d]) * out[d];
    const double norm = std::sqrt(sum);
    if (norm > rule.clip_norm) {
      const float factor = static_cast<float>(rule.clip_norm / norm);
      for (int d = 0; d < dim; ++d) out[d] *= factor;
    }
  }
  if (rule.clip_value > 0.0f) {
    for (int d = 0; d < dim; ++d) out[d] = std::fmin(std::fmax(out[d], -rule.clip_value), rule.clip_value);
  }
}

template <class Rule, int kDim>
inline __attribute__((always_inline)) bool update_row(const RowSpec& spec, float lr, char* row, const float* grad,
                                                      float* scratch) {
  const Layout& layout = spec.layout;
  const int dim = kDim > 0 ? kDim : layout.dim;
  int width = layout.state;
  if constexpr (kDim > 0) width = Rule::state(kDim);  // known to the compiler
  const RuleOptions& rule = spec.rule;
  // Worked on apart, in registers where the width is known, and put back if it is sound.
  float own[kDim > 0 ? Rule::state(kDim) + kDim : 1];
  float* const value = kDim > 0 ? own : scratch;
  float* const state = value + dim;
  const size_t state_bytes = sizeof(float) * static_cast<size_t>(width);
  if (layout.dtype == Dtype::fp32) {
    std::memcpy(value, row, sizeof(float) * static_cast<size_t>(dim) + state_bytes);  // in one piece
  } else {
    read_value(layout, row, value);
    std::memcpy(state, row + layout.state_at, state_bytes);
  }
  const float decay = std::is_same_v<Rule, AdamW> ? 0.0f : rule.weight_decay;
  if (decay != 0.0f || clips(rule)) {
    float* const prepared = kDim > 0 ? scratch : scratch + dim + width;
    prepare(rule, decay, value, grad, prepared, dim);
    grad = prepared;
  }
  Rule::step(spec, lr, value, state, grad, dim);
  if (!finite(value, static_cast<size_t>(dim + width))) return false;
  if (layout.dtype == Dtype::fp32) {
    std::memcpy(row, value, sizeof(float) * static_cast<size_t>(dim) + state_bytes);
  } else {
    write_value(layout, row, value);
    std::memcpy(row + layout.state_at, state, state_bytes);
  }
  return true;
}

template <class Rule, int kDim>
bool update(const RowSpec& spec, float lr, char* row, const float* grad, float* scratch) {
  return update_row<Rule, kDim>(spec, lr, row, grad, scratch);
}

#if defined(__x86_64__)
// The same with wider registers. Compiled without contraction nothing is fused, so the bits are the same.
template <class Rule, int kDim>
__attribute__((target("avx2"))) bool update_avx2(const RowSpec& spec, float lr, char* row, const float* grad,
                                                 float* scratch) {
  return update_row<Rule, kDim>(spec, lr, row, grad, scratch);
}

template <class Rule, int kDim>
__attribute__((target("avx512f,avx512dq,avx512vl,prefer-vector-width=512"))) bool update_avx512(
    const RowSpec& spec, float lr, char* row, const float* grad, float* scratch) {
  return update_row<Rule, kDim>(spec, lr, row, grad, scratch);
}

template <class Rule, int kDim>
Update widest() {
  if constexpr (kDim % 16 == 0 && kDim > 0) {
    if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) return update_avx512<Rule, kDim>;
  }
  return __builtin_cpu_supports("avx2") ? update_avx2<Rule, kDim> : update<Rule, kDim>;
}
#else
template <class Rule, int kDim>
Update widest() {
  return update<Rule, kDim>;
}
#endif

template <class Rule>
Update by_dim(int dim) {
  switch (dim) {
    case 8:
      return widest<Rule, 8>();
    case 16:
      return widest<Rule, 16>();
    case 32:
      return widest<Rule, 32>();
    case 64:
      return widest<Rule, 64>();
    default:
      return widest<Rule, 0>();
  }
}

inline __attribute__((always_inline)) void uniform_row(uint64_t stream, float scale, float* __restrict out, int dim) {
  for (int d = 0; d < dim; ++d) out[d] = (2.0f * uniform01(stream, static_cast<uint64_t>(d)) - 1.0f) * scale;
}

bool below_plain(const float* x, size_t n, uint32_t limit) { return below(x, n, limit); }

#if defined(__x86_64__)
__attribute__((target("avx2"))) bool below_avx2(const float* x, size_t n, uint32_t limit) { return below(x, n, limit); }
const auto below_widest = __builtin_cpu_supports("avx2") ? below_avx2 : below_plain;
#else
const auto below_widest = below_plain;
#endif

using Draw = void (*)(uint64_t stream, float scale, float* out, int dim);

void uniform_plain(uint64_t stream, float scale, float* out, int dim) { uniform_row(stream, scale, out, dim); }

#if defined(__x86_64__)
// AVX-512 multiplies 64-bit words eight at a time.
__attribute__((target("avx512f,avx512dq,avx512vl,prefer-vector-width=512"))) void uniform_avx512(uint64_t stream, float scale, float* out,
                                                                                               int dim) {
  uniform_row(stream, scale, out, dim);
}

const Draw draw_uniform =
    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") ? uniform_avx512 : uniform_plain;
#else
const Draw draw_uniform = uniform_plain;
#endif

float largest(Dtype dtype) {
  return dtype == Dtype::fp16 ? 65504.0f : dtype == Dtype::bf16 ? float_of(kLargestBf16) : std::numeric_limits<float>::max();
}

int state_floats(const RuleOptions& rule, int dim) {
  switch (rule.kind) {
    case RuleKind::sgd:
      return Sgd::state(dim);
    case RuleKind::momentum:
      return Momentum::state(dim);
    case RuleKind::adagrad:
      return Adagrad::state(dim);
    case RuleKind::row_adagrad:
      return RowAdagrad::state(dim);
    case RuleKind::adam:
    case RuleKind::adamw:
      return Adam::state(dim);
    case RuleKind::ftrl:
      return Ftrl::state(dim);
    case RuleKind::user:
    case RuleKind::custom:
      return rule.custom_state;
  }
  throw std::invalid_argument("unknown rule");
}

}  // namespace

void BiasCorrection::fill(double beta1, double beta2) {
  first.assign(kBiasSteps, 1.0f);
  second.assign(kBiasSteps, 1.0f);
  for (int t = 1; t < kBiasSteps; ++t) {
    first[static_cast<size_t>(t)] = static_cast<float>(1.0 / (1.0 - std::pow(beta1, t)));
    second[static_cast<size_t>(t)] = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, t)));
  }
}

RowSpec make_spec(int dim, Dtype dtype, const RuleOptions& rule, Init init, float init_scale, uint64_t seed,
                  bool counters) {
  RowSpec spec;
  spec.rule = rule;
  if (rule.kind == RuleKind::adam || rule.kind == RuleKind::adamw) spec.bias.fill(rule.beta1, rule.beta2);
  spec.init = init;
  spec.init_scale = init_scale;
  spec.seed = seed;
  Layout& layout = spec.layout;
  layout.dim = dim;
  layout.dtype = dtype;
  layout.state = state_floats(rule, dim);
  layout.counters = counters;
  const size_t value_bytes = static_cast<size_t>(dim) * (dtype == Dtype::fp32 ? 4 : 2);
  layout.state_at = (value_bytes + 3) / 4 * 4;
  layout.counters_at = layout.state_at + 4 * static_cast<size_t>(layout.state);
  layout.stride = layout.counters_at + (counters ? 8 : 0);
  return spec;
}

Update update_of(const RowSpec& spec) {
  const int dim = spec.layout.dim;
  switch (spec.rule.kind) {
    case RuleKind::sgd:
      return by_dim<Sgd>(dim);
    case RuleKind::momentum:
      return by_dim<Momentum>(dim);
    case RuleKind::adagrad:
      return by_dim<Adagrad>(dim);
    case RuleKind::row_adagrad:
      return by_dim<RowAdagrad>(dim);
    case RuleKind::adam:
      return by_dim<Adam>(dim);
    case RuleKind::adamw:
      return by_dim<AdamW>(dim);
    case RuleKind::ftrl:
      return by_dim<Ftrl>(dim);
    case RuleKind::user:
      return update<User, 0>;
    case RuleKind::custom:
      return nullptr;
  }
  return nullptr;
}

uint32_t gradient_limit(const RuleOptions& rule) { return clips(rule) ? kInfinity : kTooLarge; }

bool all_below(const float* x, size_t n, uint32_t limit) { return below_widest(x, n, limit); }

void read_value(const Layout& layout, const char* row, float* out) {
  const int dim = layout.dim;
  const auto* half = reinterpret_cast<const uint16_t*>(row);
  switch (layout.dtype) {
    case Dtype::fp32:
      std::memcpy(out, row, 4 * static_cast<size_t>(dim));
      return;
    case Dtype::fp16:
      for (int d = 0; d < dim; ++d) out[d] = from_fp16(half[d]);
      return;
    case Dtype::bf16:
      for (int d = 0; d < dim; ++d) out[d] = from_bf16(half[d]);
      return;
  }
}

void write_value(const Layout& layout, char* row, const float* value) {
  const int dim = layout.dim;
  auto* half = reinterpret_cast<uint16_t*>(row);
  switch (layout.dtype) {
    case Dtype::fp32:
      std::memcpy(row, value, 4 * static_cast<size_t>(dim));
      return;
    case Dtype::fp16:
      // What is beyond a half stays at the largest one: an infinity would never come back.
      for (int d = 0; d < dim; ++d) half[d] = to_fp16(bounded(value[d], largest(layout.dtype)));
      return;
    case Dtype::bf16:
      for (int d = 0; d < dim; ++d) half[d] = to_bf16(bounded(value[d], largest(layout.dtype)));
      return;
  }
}

void initial_value(const RowSpec& spec, uint64_t key, float* out) {
  const int dim = spec.layout.dim;
  const uint64_t stream = stream_of(spec.seed, key);
  switch (spec.init) {
    case Init::zeros:
    case Init::constant:
      for (int d = 0; d < dim; ++d) out[d] = spec.init == Init::zeros ? 0.0f : spec.init_scale;
      break;
    case Init::uniform:
      draw_uniform(stream, spec.init_scale, out, dim);
      break;
    case Init::normal:
      for (int d = 0; d < dim; ++d) out[d] = bounded(normal01(stream, static_cast<uint64_t>(d)) * spec.init_scale, largest(spec.layout.dtype));
      break;
  }
  // A reader who does not create the row must see what it would hold.
  if (spec.layout.dtype == Dtype::fp16) {
    for (int d = 0; d < dim; ++d) out[d] = from_fp16(to_fp16(out[d]));
  } else if (spec.layout.dtype == Dtype::bf16) {
    for (int d = 0; d < dim; ++d) out[d] = from_bf16(to_bf16(out[d]));
  }
}

bool add_value(const RowSpec& spec, char* row, const float* delta, float* scratch) {
  const Layout& layout = spec.layout;
  const int dim = layout.dim;
  read_value(layout, row, scratch);
  for (int d = 0; d < dim; ++d) scratch[d] += delta[d];
  if (!finite(scratch, static_cast<size_t>(dim))) return false;
  write_value(layout, row, scratch);
  if (spec.rule.kind == RuleKind::ftrl) {
    std::memset(row + layout.state_at + 8 * static_cast<size_t>(dim), 0, 4);  // its z is to follow: Ftrl::follow
  }
  return true;
}

void give_birth(const RowSpec& spec, uint64_t key, char* row, float* scratch) {
  initial_value(spec, key, scratch);
  write_value(spec.layout, row, scratch);
  initial_state(spec, row);
}

void initial_state(const RowSpec& spec, char* row) {
  const Layout& layout = spec.layout;
  auto* const state = reinterpret_cast<float*>(row + layout.state_at);
  std::memset(state, 0, layout.stride - layout.state_at);
  const RuleKind kind = spec.rule.kind;
  if (kind == RuleKind::adagrad || kind == RuleKind::row_adagrad) {
    for (int d = 0; d < layout.state; ++d) state[d] = spec.rule.initial;
  }
}

}  // namespace plsc
