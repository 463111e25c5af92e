// The walk of skip-gram over sentences: what is kept, who stands beside whom, which negatives; one step a pair.
#include "skipgram.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "bits.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed to inlined functions only
#endif

namespace plsc {

namespace plain {
#define PLSC_TARGET
#define PLSC_LANES 4
#define PLSC_FMA(a, b, c) ((a) * (b) + (c))
#include "skipgram_step.h"
#undef PLSC_TARGET
#undef PLSC_LANES
#undef PLSC_FMA
}  // namespace plain

#if defined(__x86_64__)
namespace avx2 {
#define PLSC_TARGET __attribute__((target("avx2,fma")))
#define PLSC_LANES 8
#define PLSC_FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#include "skipgram_step.h"
#undef PLSC_TARGET
#undef PLSC_LANES
#undef PLSC_FMA
}  // namespace avx2

namespace avx512 {
#define PLSC_TARGET __attribute__((target("avx512f,avx2,fma")))
#define PLSC_LANES 16
#define PLSC_FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#include "skipgram_step.h"
#undef PLSC_TARGET
#undef PLSC_LANES
#undef PLSC_FMA
}  // namespace avx512
#endif

PairStep pair_step(const std::string& instructions) {
  const auto asked = [&](const char* name) { return instructions.empty() || instructions == name; };
#if defined(__x86_64__)
  if (asked("avx512") && __builtin_cpu_supports("avx512f")) return avx512::step;
  if (asked("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::step;
#endif
  return asked("plain") ? plain::step : nullptr;
}

namespace {

constexpr size_t kLossEvery = 16;  // the loss is taken at every so many-th kept word

uint64_t draw(uint64_t& random) { return mix(random += kGolden); }

uint32_t below(uint32_t high, uint64_t count) { return static_cast<uint32_t>((high * count) >> 32); }

void prefetch(const float* row, int dim) {
  for (int c = 0; c < dim; c += 16) __builtin_prefetch(row + c, 1, 3);
}

}  // namespace

// A predicted word with its surroundings: kept[begin .. end) but for kept[at] itself.
struct SkipGram::Centre {
  int32_t word = 0;
  size_t at = 0, begin = 0, end = 0;
  // The words drawn against it, without itself: for pair p negatives[ends[p - 1] .. ends[p]); shared: all for each.
  std::vector<int32_t> negatives;
  std::vector<uint32_t> ends;
};

SkipGram::SkipGram(const uint32_t* keep, const double* weights, size_t words, const SkipGramOptions& options)
    : options_(options), step_(pair_step(options.instructions)), keep_(keep, keep + words), thresholds_(words), aliases_(words) {
  if (step_ == nullptr) throw std::invalid_argument("this processor has no " + options.instructions);
  double sum = 0.0;
  for (size_t w = 0; w < words; ++w) sum += weights[w];
  if (words == 0 || words > 0x7FFFFFFF || !(sum > 0.0) || !std::isfinite(sum)) throw std::invalid_argument("weights");
  std::vector<double> share(words);
  std::vector<uint32_t> small, large;
  for (size_t w = 0; w < words; ++w) {
    share[w] = weights[w] / sum * static_cast<double>(words);
    aliases_[w] = static_cast<uint32_t>(w);
    (share[w] < 1.0 ? small : large).push_back(static_cast<uint32_t>(w));
  }
  while (!small.empty() && !large.empty()) {
    const uint32_t poor = small.back(), rich = large.back();
    small.pop_back();
    aliases_[poor] = rich;
    share[rich] -= 1.0 - share[poor];
    if (share[rich] < 1.0) {
      large.pop_back();
      small.push_back(rich);
    }
  }
  // What is left over is 1 but for rounding, and its own alias.
  for (size_t w = 0; w < words; ++w) {
    thresholds_[w] = static_cast<uint32_t>(std::min(std::max(share[w], 0.0) * 0x1p32, 4294967295.0));
  }
}

void SkipGram::plan(const std::vector<int32_t>& kept, size_t at, uint64_t& random, Centre& centre) const {
  const size_t reach = 1 + below(static_cast<uint32_t>(draw(random) >> 32), static_cast<uint64_t>(options_.window));
  centre.word = kept[at];
  centre.at = at;
  centre.begin = at > reach ? at - reach : 0;
  centre.end = std::min(kept.size(), at + reach + 1);
  centre.negatives.clear();
  centre.ends.clear();
  const size_t pairs = centre.end - centre.begin - 1;
  const size_t draws = options_.shared ? std::min<size_t>(pairs, 1) : pairs;
  for (size_t p = 0; p < draws; ++p) {
    for (int k = 0; k < options_.negatives; ++k) {
      const uint64_t x = draw(random);
      const uint32_t slot = below(static_cast<uint32_t>(x >> 32), keep_.size());
      const auto word = static_cast<int32_t>(static_cast<uint32_t>(x) < thresholds_[slot] ? slot : aliases_[slot]);
      if (word != centre.word) centre.negatives.push_back(word);
    }
    centre.ends.push_back(static_cast<uint32_t>(centre.negatives.size()));
  }
}

// Calls visit(kept words of a sentence, a centre, the centre after it or null) in order.
template <class Visit>
void SkipGram::walk(const Sentences& text, Visit visit) const {
  std::vector<int32_t> kept;
  Centre now, next;
  for (size_t s = 0; s < text.count; ++s) {
    uint64_t random = stream_of(options_.seed, (text.epoch << 40) + text.first + s);
    kept.clear();
    for (int64_t i = text.starts[s]; i < text.starts[s + 1]; ++i) {
      const int32_t word = text.tokens[i];
      if (word < 0 || static_cast<size_t>(word) >= keep_.size()) throw std::invalid_argument("a token is not in the vocabulary");
      const uint32_t chance = keep_[static_cast<size_t>(word)];
      if (chance == 0xFFFFFFFFu || static_cast<uint32_t>(draw(random) >> 32) < chance) kept.push_back(word);
    }
    if (kept.empty()) continue;
    plan(kept, 0, random, now);
    for (size_t at = 0; at < kept.size(); ++at) {
      const bool last = at + 1 == kept.size();
      if (!last) plan(kept, at + 1, random, next);
      visit(kept, now, last ? nullptr : &next);
      std::swap(now, next);
    }
  }
}

Trained SkipGram::train(const Sentences& text, float* const* inputs, float* const* outputs, int dim, float lr) const {
  const auto most = static_cast<size_t>(options_.negatives) + 1;
  std::vector<float*> rows(most);
  std::vector<float> scores(most), work(most + static_cast<size_t>(dim));
  const auto row = [](float* const* all, int32_t word) {
    float* const at = all[word];
    if (at == nullptr) throw std::invalid_argument("a word has no row");
    return at;
  };
  Trained done;
  walk(text, [&](const std::vector<int32_t>& kept, const Centre& centre, const Centre* next) {
    ++done.kept;
    size_t pair = 0;
    for (size_t at = centre.begin; at < centre.end; ++at) {
      if (at == centre.at) continue;
      const size_t drawn = options_.shared ? 0 : pair;
      const uint32_t begin = drawn == 0 ? 0 : centre.ends[drawn - 1], end = centre.ends[drawn];
      int count = 0;
      rows[static_cast<size_t>(count++)] = row(outputs, centre.word);
      for (uint32_t k = begin; k < end; ++k) rows[static_cast<size_t>(count++)] = row(outputs, centre.negatives[k]);
      // Negatives are seldom in the cache: those of the pair to come are asked for while this one is computed.
      const Centre* const coming = drawn + 1 < centre.ends.size() ? &centre : next;
      if (coming != nullptr && !(options_.shared && pair > 0)) {
        const size_t p = coming == &centre ? drawn + 1 : 0;
        if (p < coming->ends.size()) {
          for (uint32_t k = p == 0 ? 0 : coming->ends[p - 1]; k < coming->ends[p]; ++k) {
            prefetch(outputs[coming->negatives[k]], dim);
          }
        }
      }
      step_(row(inputs, kept[at]), rows.data(), count, dim, lr, scores.data(), work.data());
      if (centre.at % kLossEvery == 0) {
        ++done.sampled;
        for (int m = 0; m < count; ++m) {
          const double x = m == 0 ? -scores[static_cast<size_t>(m)] : scores[static_cast<size_t>(m)];
          done.loss += x > 30.0 ? x : std::log1p(std::exp(x));
        }
      }
      ++pair;
    }
    done.pairs += pair;
  });
  return done;
}

void SkipGram::touched(const Sentences& text, uint8_t* inputs, uint8_t* outputs) const {
  walk(text, [&](const std::vector<int32_t>& kept, const Centre& centre, const Centre*) {
    if (centre.ends.empty()) return;
    outputs[centre.word] = 1;
    for (const int32_t word : centre.negatives) outputs[word] = 1;
    for (size_t at = centre.begin; at < centre.end; ++at) {
      if (at != centre.at) inputs[kept[at]] = 1;
    }
  });
}

}  // namespace plsc
