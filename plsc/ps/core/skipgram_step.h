// One update of skip-gram, once: each instruction set includes this file inside a namespace of its own and gives
// PLSC_TARGET, PLSC_LANES and PLSC_FMA(a, b, c) for vectors of that many lanes.
typedef float Lanes __attribute__((vector_size(4 * PLSC_LANES), aligned(4), may_alias));
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

PLSC_TARGET static inline float total(const Lanes& lanes) {
  float sums[PLSC_LANES];
  std::memcpy(sums, &lanes, sizeof(sums));
  for (int half = PLSC_LANES / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

template <int M>
PLSC_TARGET static inline void dots(const float* x, float* const* rows, int dim, float* out) {
  Lanes sums[M] = {};
  int c = 0;
  for (; c + PLSC_LANES <= dim; c += PLSC_LANES) {
    const Lanes a = *reinterpret_cast<const Lanes*>(x + c);
    for (int m = 0; m < M; ++m) sums[m] = PLSC_FMA(a, *reinterpret_cast<const Lanes*>(rows[m] + c), sums[m]);
  }
  Four rest[M] = {};
  for (; c + 4 <= dim; c += 4) {
    const Four a = *reinterpret_cast<const Four*>(x + c);
    for (int m = 0; m < M; ++m) rest[m] += a * *reinterpret_cast<const Four*>(rows[m] + c);
  }
  for (int m = 0; m < M; ++m) {
    float sum = total(sums[m]) + ((rest[m][0] + rest[m][2]) + (rest[m][1] + rest[m][3]));
    for (int i = c; i < dim; ++i) sum += x[i] * rows[m][i];
    out[m] = sum;
  }
}

// moved += sum of g[m] * rows[m]; rows[m] += g[m] * x: row after row, so that one that comes twice moves twice. x may be
// `moved` itself.
template <int M>
PLSC_TARGET static inline void move(const float* x, float* const* rows, const float* g, int dim, float* moved) {
  int c = 0;
  for (; c + PLSC_LANES <= dim; c += PLSC_LANES) {
    const Lanes a = *reinterpret_cast<const Lanes*>(x + c);
    Lanes sum = *reinterpret_cast<const Lanes*>(moved + c);
    for (int m = 0; m < M; ++m) {
      const Lanes factor = g[m] - Lanes{};
      Lanes& at = *reinterpret_cast<Lanes*>(rows[m] + c);
      const Lanes row = at;
      sum = PLSC_FMA(factor, row, sum);
      at = PLSC_FMA(factor, a, row);
    }
    *reinterpret_cast<Lanes*>(moved + c) = sum;
  }
  for (; c + 4 <= dim; c += 4) {
    const Four a = *reinterpret_cast<const Four*>(x + c);
    Four sum = *reinterpret_cast<const Four*>(moved + c);
    for (int m = 0; m < M; ++m) {
      Four& at = *reinterpret_cast<Four*>(rows[m] + c);
      const Four row = at;
      sum += g[m] * row;
      at = row + g[m] * a;
    }
    *reinterpret_cast<Four*>(moved + c) = sum;
  }
  for (; c < dim; ++c) {
    const float a = x[c];
    float sum = moved[c];
    for (int m = 0; m < M; ++m) {
      const float row = rows[m][c];
      sum += g[m] * row;
      rows[m][c] = row + g[m] * a;
    }
    moved[c] = sum;
  }
}

// lr * (label - sigmoid(score)).
PLSC_TARGET static inline void slopes(const float* scores, int count, float lr, float* g) {
  typedef int32_t Whole __attribute__((vector_size(32)));
  typedef float Eight __attribute__((vector_size(32)));
  for (int start = 0; start < count; start += 8) {
    float in[8] = {};
    const int here = count - start < 8 ? count - start : 8;
    std::memcpy(in, scores + start, sizeof(float) * static_cast<size_t>(here));
    Eight x;
    std::memcpy(&x, in, sizeof(x));
    x = -x;
    x = x > 30.0f ? 30.0f - Eight{} : x;
    x = x < -30.0f ? -30.0f - Eight{} : x;
    // e^x = 2^n e^r with |r| <= ln(2) / 2, where seven terms of the series leave 5e-9.
    const Eight shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to a whole number
    const Eight n = shifted - 12582912.0f;
    const Eight r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Eight p = r * (1.0f / 5040.0f) + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    Whole bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    bits = (bits - 0x4B400000 + 127) << 23;
    Eight power;
    std::memcpy(&power, &bits, sizeof(power));
    const Eight falls = -lr / (1.0f + p * power);
    float out[8];
    std::memcpy(out, &falls, sizeof(out));
    for (int i = 0; i < here; ++i) g[start + i] = out[i];
  }
  g[0] += lr;
}

template <int M>
PLSC_TARGET static inline void one_group(float* x, float* const* rows, int dim, float lr, float* scores) {
  float g[8];
  dots<M>(x, rows, dim, scores);
  slopes(scores, M, lr, g);
  move<M>(x, rows, g, dim, x);
}

PLSC_TARGET static void step(float* x, float* const* rows, int count, int dim, float lr, float* scores, float* work) {
  switch (count) {
    case 1: return one_group<1>(x, rows, dim, lr, scores);
    case 2: return one_group<2>(x, rows, dim, lr, scores);
    case 3: return one_group<3>(x, rows, dim, lr, scores);
    case 4: return one_group<4>(x, rows, dim, lr, scores);
    case 5: return one_group<5>(x, rows, dim, lr, scores);
    case 6: return one_group<6>(x, rows, dim, lr, scores);
    default: break;
  }
  int m = 0;
  for (; m + 4 <= count; m += 4) dots<4>(x, rows + m, dim, scores + m);
  for (; m < count; ++m) dots<1>(x, rows + m, dim, scores + m);
  float* const g = work;           // [count]
  float* const old = work + count;  // [dim]
  slopes(scores, count, lr, g);
  std::memcpy(old, x, sizeof(float) * static_cast<size_t>(dim));
  for (m = 0; m + 4 <= count; m += 4) move<4>(old, rows + m, g + m, dim, x);
  for (; m < count; ++m) move<1>(old, rows + m, g + m, dim, x);
}
