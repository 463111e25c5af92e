// Skip-gram with negative sampling (Mikolov et al. 2013): the walk over a text and the updates, on rows wherever they lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace plsc {

struct SkipGramOptions {
  int window = 5;
  int negatives = 5;
  bool shared = false;  // one draw of negatives serves all pairs of a centre word
  uint64_t seed = 0;
  std::string instructions;  // "plain", "avx2", "avx512"; empty: the best that this processor has
};

// Sentences: tokens[starts[s] .. starts[s + 1]), of which the first has the number `first` in the text.
struct Sentences {
  const int32_t* tokens;
  const int64_t* starts;
  size_t count;
  uint64_t first;
  uint64_t epoch;
};

struct Trained {
  uint64_t kept = 0;   // words that sub-sampling left
  uint64_t pairs = 0;  // of a word and one beside it
  double loss = 0;     // sum over `sampled` pairs, from before their updates
  uint64_t sampled = 0;
};

// What a step does to one input row x and `count` output rows: scores from before it, then x and the rows move.
// labels: the first row's is 1, the others' 0. `scores` [count] gets x . row; `work` holds count + dim floats.
using PairStep = void (*)(float* x, float* const* rows, int count, int dim, float lr, float* scores, float* work);
// Null where this processor lacks the instructions, or there are none of that name.
PairStep pair_step(const std::string& instructions);

// Draws depend on (seed, epoch, sentence) alone: not on the thread, nor on how a text is cut into calls.
class SkipGram {
 public:
  // keep[w] / 2^32: chance that an occurrence of word w stays, 2^32 - 1 for always; weights[w]: as negatives are drawn.
  SkipGram(const uint32_t* keep, const double* weights, size_t words, const SkipGramOptions& options);

  // inputs[w], outputs[w]: rows of `dim` floats, trained in place; other threads may be at them, too.
  Trained train(const Sentences& text, float* const* inputs, float* const* outputs, int dim, float lr) const;
  // Marks the words whose rows `train` would read.
  void touched(const Sentences& text, uint8_t* inputs, uint8_t* outputs) const;

  size_t words() const { return keep_.size(); }
  const std::vector<uint32_t>& thresholds() const { return thresholds_; }
  const std::vector<uint32_t>& aliases() const { return aliases_; }

 private:
  struct Centre;
  template <class Visit>
  void walk(const Sentences& text, Visit visit) const;
  void plan(const std::vector<int32_t>& kept, size_t at, uint64_t& random, Centre& centre) const;

  const SkipGramOptions options_;
  const PairStep step_;
  std::vector<uint32_t> keep_;
  // Walker's alias method: slot i is word i with chance thresholds[i] / 2^32, else word aliases[i].
  std::vector<uint32_t> thresholds_, aliases_;
};

}  // namespace plsc
