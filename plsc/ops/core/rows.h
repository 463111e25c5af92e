// The kernels once, in plain loops; each instruction set includes this file inside a namespace of its own and gives
// PLSC_TARGET, the attribute that lets the compiler use it (not a flag: what the standard headers leave behind must run
// everywhere). Sums run over lanes, so their order differs between sets.
// kernels.h and the standard headers stand before it.
#define PLSC_INLINE static inline __attribute__((always_inline))

PLSC_INLINE float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

PLSC_INLINE uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

PLSC_INLINE float multiply_add(float a, float b, float c) {
#ifdef PLSC_FMA
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// e^x, off by less than 1.1 units in the last place (with fused multiply-adds; 1.5 without); NaN and infinities pass,
// and what is too small for a normal number becomes a denormal one or 0.
PLSC_INLINE float exponential(float x) {
  const float clamped = x > 89.0f ? 89.0f : (x < -104.0f ? -104.0f : x);  // a NaN stays
  const float shifted = multiply_add(clamped, 1.44269504f, 12582912.0f);  // 1.5 * 2^23: rounds to a whole number
  const float n = shifted - 12582912.0f;
  float r = multiply_add(n, -0.693145752f, clamped);
  r = multiply_add(n, -1.42860677e-6f, r);
  float p = 1.9875691500e-4f;
  p = multiply_add(p, r, 1.3981999507e-3f);
  p = multiply_add(p, r, 8.3334519073e-3f);
  p = multiply_add(p, r, 4.1665795894e-2f);
  p = multiply_add(p, r, 1.6666665459e-1f);
  p = multiply_add(p, r, 5.0000001201e-1f);
  p = multiply_add(p, r * r, r) + 1.0f;
  const int32_t whole = static_cast<int32_t>(to_bits(shifted)) - 0x4B400000;
  const int32_t half = whole >> 1;  // 2^n in two steps: one factor alone leaves the range of floats
  return p * from_bits(static_cast<uint32_t>(half + 127) << 23) * from_bits(static_cast<uint32_t>(whole - half + 127) << 23);
}

// Hash of 32 bits; plsc.ops.sampling.mix and cuda/ have the same one.
PLSC_INLINE uint32_t mix(uint32_t h) {
  h = (h ^ (h >> 16)) * 0x7FEB352Du;
  h = (h ^ (h >> 15)) * 0x846CA68Bu;
  return h ^ (h >> 16);
}

PLSC_INLINE uint32_t row_key(uint32_t key, int64_t id) {
  const uint64_t bits = static_cast<uint64_t>(id);
  return mix(mix(key ^ static_cast<uint32_t>(bits)) ^ static_cast<uint32_t>(bits >> 32));
}

PLSC_INLINE uint32_t random_bits(uint32_t row, int64_t column) {
  return mix(row + static_cast<uint32_t>(column) * 0x9E3779B9u);
}

// To bfloat16: up with the probability of what is cut off. Infinities and NaN are only cut.
PLSC_INLINE uint16_t round_randomly(float value, uint32_t bits16) {
  const uint32_t bits = to_bits(value);
  const uint32_t add = (bits & 0x7F800000u) == 0x7F800000u ? 0u : bits16;
  const uint32_t kept = (bits + add) >> 16;
  const bool lost = (bits & 0x7FFFFFFFu) > 0x7F800000u;  // a NaN whose upper half would say infinity
  return static_cast<uint16_t>(lost ? kept | 0x40u : kept);
}

PLSC_TARGET static float sum_of_squares(const float* a, int64_t n) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * a[i];
  return sum;
}

PLSC_TARGET static float dot(const float* a, const float* b, int64_t n) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

PLSC_TARGET static void widen(const uint16_t* high, float* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = from_bits(static_cast<uint32_t>(high[i]) << 16);
}

PLSC_TARGET static void join(const uint16_t* high, const uint16_t* low, float* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = from_bits(static_cast<uint32_t>(high[i]) << 16 | low[i]);
}

PLSC_TARGET static void split(const float* in, uint16_t* high, uint16_t* low, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = to_bits(in[i]);
    high[i] = static_cast<uint16_t>(bits >> 16);
    low[i] = static_cast<uint16_t>(bits);
  }
}

// `shift`: 0 takes the lower half of an element's random bits (weight), 16 the upper (momentum).
PLSC_TARGET static void narrow(const float* in, uint16_t* out, int64_t n, uint32_t row, int shift) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = round_randomly(in[i], (random_bits(row, i) >> shift) & 0xFFFFu);
}

PLSC_TARGET static void widen_int8(const int8_t* in, float scale, float* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(in[i]) * scale;
}

// A row as whole multiples of (largest magnitude) / 127, rounded up with the probability of the fraction.
PLSC_TARGET static float narrow_int8(const float* in, int8_t* out, int64_t n, uint32_t row) {
  uint32_t top = 0;  // magnitudes order as their bits do, NaN above all
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = to_bits(in[i]) & 0x7FFFFFFFu;
    top = bits > top ? bits : top;
  }
  const float largest = from_bits(top), scale = largest / 127.0f;
  if (top >= 0x7F800000u || scale == 0.0f) {  // no longer finite, which its scale then says; or zeros
    std::memset(out, scale == 0.0f ? 0 : 1, static_cast<size_t>(n));
    return scale;
  }
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float u = static_cast<float>(static_cast<int32_t>(random_bits(row, i) >> 16)) * (1.0f / 65536.0f);
    const float scaled = in[i] / scale;
    float q = std::floor(scaled + u);
    q = q > 127.0f ? 127.0f : (q < -127.0f ? -127.0f : q);
    out[i] = static_cast<int8_t>(static_cast<int32_t>(q));
  }
  return scale;
}

// Asks for a row that lies somewhere else than behind this one.
PLSC_INLINE void fetch(const void* row, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(static_cast<const char*>(row) + byte);
}

PLSC_INLINE int64_t width_of(Format format) { return format == Format::fp32 ? 4 : format == Format::int8 ? 1 : 2; }

PLSC_TARGET static void load_rows(const Weight& w, const Rows& rows, int64_t begin, int64_t end, float* out, float* inverse) {
  const int64_t length = w.length();
  std::vector<float> scratch(out == nullptr && w.format != Format::fp32 ? length : 0);
  for (int64_t r = begin; r < end; ++r) {
    const int64_t at = rows.at(r) * length;
    if (rows.index != nullptr && r + 2 < end) {
      const int64_t bytes = length * width_of(w.format);
      fetch(static_cast<const char*>(w.data) + rows.at(r + 2) * bytes, bytes);
    }
    float* to = out != nullptr ? out + r * length : scratch.data();
    const float* values = to;
    if (w.format != Format::fp32) {
      widen(static_cast<const uint16_t*>(w.data) + at, to, length);
    } else if (out == nullptr) {
      values = static_cast<const float*>(w.data) + at;
    } else {
      std::memcpy(to, static_cast<const float*>(w.data) + at, static_cast<size_t>(length) * 4);
    }
    for (int64_t k = 0; inverse != nullptr && k < w.centers; ++k) {
      const float norm = std::sqrt(sum_of_squares(values + k * w.dim, w.dim));
      inverse[r * w.centers + k] = norm == 0.0f ? 0.0f : 1.0f / norm;
    }
  }
}

PLSC_TARGET static float exponential_run(float* data, const float* inverse, float shift, int64_t n) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < n; ++j) {
    const float e = exponential(multiply_add(data[j], inverse[j], -shift));
    sum += e;
    data[j] = e * inverse[j];
  }
  return sum;
}

PLSC_TARGET static void exponentials(const Block& block, const float* inverse, const int64_t* place, int64_t start,
                                     float shift, float* total, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    float* data = block.data + i * block.stride;
    const int64_t own = place[i] - start, n = block.classes;
    if (place[i] < 0 || own < 0 || own >= n) {
      total[i] += exponential_run(data, inverse, shift, n);
      continue;
    }
    total[i] += exponential_run(data, inverse, shift, own);
    data[own] = 0.0f;
    total[i] += exponential_run(data + own + 1, inverse + own + 1, shift, n - own - 1);
  }
}

// From the gradient of w / |w|, already divided by |w|, to that of w: without its part along w.
PLSC_TARGET static void take_radial_out(const float* w, float* g, int64_t n) {
  const float square = sum_of_squares(w, n);
  const float part = square > 0.0f ? dot(w, g, n) / square : 0.0f;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) g[i] -= w[i] * part;
}

PLSC_TARGET static void sgd_row(const Step& s, float* w, float* g, float* m, int64_t n) {
  const float decay = s.weight_decay, mu = s.momentum, lr = s.lr;
  if (m == nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) w[i] -= lr * (g[i] + decay * w[i]);
  } else if (s.nesterov) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const float grad = g[i] + decay * w[i];
      m[i] = grad + mu * m[i];
      w[i] -= lr * (grad + mu * m[i]);
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      m[i] = g[i] + decay * w[i] + mu * m[i];
      w[i] -= lr * m[i];
    }
  }
}

PLSC_TARGET static void adamw_row(const Step& s, float count, float* w, const float* g, float* m, float* v, int64_t n) {
  const float size = s.lr / (1.0f - std::pow(s.beta1, count)), root = std::sqrt(1.0f - std::pow(s.beta2, count));
  const float shrink = 1.0f - s.lr * s.weight_decay, a = 1.0f - s.beta1, b = 1.0f - s.beta2, beta2 = s.beta2, eps = s.eps;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    m[i] += a * (g[i] - m[i]);
    v[i] = beta2 * v[i] + b * g[i] * g[i];
    w[i] = shrink * w[i] - size * m[i] / (std::sqrt(v[i]) / root + eps);
  }
}

PLSC_TARGET static void step_rows(const Weight& weight, const Rows& rows, const Step& s, float* grad, int64_t begin, int64_t end) {
  const int64_t length = weight.length();
  std::vector<float> buffer(static_cast<size_t>(3 * length));
  float *full = buffer.data(), *operand = full + length, *kept = operand + length;
  for (int64_t r = begin; r < end; ++r) {
    const int64_t row = rows.at(r), at = row * length;
    if (rows.index != nullptr && r + 1 < end) {
      const int64_t next = rows.at(r + 1), bytes = length * width_of(weight.format);
      fetch(static_cast<const char*>(weight.data) + next * bytes, bytes);
      if (weight.format == Format::split) fetch(weight.low + next * length, bytes);
      const int64_t momentum_bytes = s.momentum_format == Format::none ? 0 : length * width_of(s.momentum_format);
      fetch(static_cast<const char*>(s.momentum_data) + next * momentum_bytes, momentum_bytes);
    }
    float* g = grad + r * length;
    // full: the row that is stepped; seen: the row that the products were made with
    float *w = full, *seen = full;
    uint16_t* high = static_cast<uint16_t*>(weight.data) + at;
    if (weight.format == Format::fp32) {
      w = seen = static_cast<float*>(weight.data) + at;
    } else {
      widen(high, operand, length);
      seen = operand;
      if (weight.format == Format::split) join(high, weight.low + at, full, length);
      else w = operand;
    }
    for (int64_t k = 0; s.normalize && k < weight.centers; ++k) take_radial_out(seen + k * weight.dim, g + k * weight.dim, weight.dim);
    if (s.rule == Rule::gradient) continue;
    const uint32_t key = row_key(s.key, s.first_class + row);
    float* m = nullptr;
    if (s.momentum_format == Format::fp32) {
      m = static_cast<float*>(s.momentum_data) + at;
    } else if (s.momentum_format == Format::bf16) {
      widen(static_cast<uint16_t*>(s.momentum_data) + at, m = kept, length);
    } else if (s.momentum_format == Format::int8) {
      widen_int8(static_cast<int8_t*>(s.momentum_data) + at, s.momentum_scale[row], m = kept, length);
    }
    if (s.rule == Rule::sgd) {
      sgd_row(s, w, g, m, length);
    } else {
      const float count = s.steps[row] += 1.0f;
      adamw_row(s, count, w, g, m, s.second + at, length);
    }
    if (weight.format == Format::split) split(w, high, weight.low + at, length);
    if (weight.format == Format::bf16) narrow(w, high, length, key, 0);
    if (s.momentum_format == Format::bf16) narrow(m, static_cast<uint16_t*>(s.momentum_data) + at, length, key, 16);
    if (s.momentum_format == Format::int8) s.momentum_scale[row] = narrow_int8(m, static_cast<int8_t*>(s.momentum_data) + at, length, key);
  }
}
