// Skip-gram as Python sees it, by nanobind: addresses of rows in, the GIL released while a text is walked.
#include "skipgram_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "skipgram.h"

namespace nb = nanobind;
using plsc::SkipGram;

namespace {

template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void expect(size_t got, size_t wanted, const char* what) {
  if (got != wanted) throw std::invalid_argument(std::string(what) + " has " + std::to_string(got) + " elements, expected " + std::to_string(wanted));
}

plsc::Sentences sentences(const In<int32_t>& tokens, const In<int64_t>& starts, uint64_t first, uint64_t epoch) {
  const size_t bounds = starts.size();
  if (bounds == 0 || starts.data()[0] < 0 || starts.data()[bounds - 1] > static_cast<int64_t>(tokens.size())) {
    throw std::invalid_argument("starts lie outside the tokens");
  }
  for (size_t s = 0; s + 1 < bounds; ++s) {
    if (starts.data()[s] > starts.data()[s + 1]) throw std::invalid_argument("starts fall");
  }
  return {tokens.data(), starts.data(), bounds - 1, first, epoch};
}

// An address a word, 0 where it has no row.
float* const* rows(const In<uint64_t>& addresses) {
  static_assert(sizeof(float*) == sizeof(uint64_t), "addresses travel as 64-bit words");
  return reinterpret_cast<float* const*>(addresses.data());
}

}  // namespace

void bind_skipgram(nb::module_& m) {
  nb::class_<SkipGram>(m, "SkipGram")
      .def("__init__",
           [](SkipGram* self, In<uint32_t> keep, In<double> weights, int window, int negatives, bool shared, uint64_t seed,
              const std::string& instructions) {
             expect(weights.size(), keep.size(), "weights");
             if (window < 1 || negatives < 1) throw std::invalid_argument("window and negatives begin at 1");
             new (self) SkipGram(keep.data(), weights.data(), keep.size(), {window, negatives, shared, seed, instructions});
           })
      .def("train",
           [](const SkipGram& s, In<int32_t> tokens, In<int64_t> starts, uint64_t first, uint64_t epoch, In<uint64_t> inputs,
              In<uint64_t> outputs, int dim, float lr) {
             expect(inputs.size(), s.words(), "inputs");
             expect(outputs.size(), s.words(), "outputs");
             const plsc::Sentences text = sentences(tokens, starts, first, epoch);
             plsc::Trained done;
             {
               const nb::gil_scoped_release release;
               done = s.train(text, rows(inputs), rows(outputs), dim, lr);
             }
             return nb::make_tuple(done.kept, done.pairs, done.loss, done.sampled);
           })
      .def("touched",
           [](const SkipGram& s, In<int32_t> tokens, In<int64_t> starts, uint64_t first, uint64_t epoch, Out<uint8_t> inputs,
              Out<uint8_t> outputs) {
             expect(inputs.size(), s.words(), "inputs");
             expect(outputs.size(), s.words(), "outputs");
             const plsc::Sentences text = sentences(tokens, starts, first, epoch);
             const nb::gil_scoped_release release;
             s.touched(text, inputs.data(), outputs.data());
           })
      .def("noise", [](const SkipGram& s, Out<uint32_t> thresholds, Out<uint32_t> aliases) {
        expect(thresholds.size(), s.words(), "thresholds");
        expect(aliases.size(), s.words(), "aliases");
        std::copy(s.thresholds().begin(), s.thresholds().end(), thresholds.data());
        std::copy(s.aliases().begin(), s.aliases().end(), aliases.data());
      });
}
