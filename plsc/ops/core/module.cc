// The kernels as a Python module, by nanobind. Tensors come as addresses; plsc/ops/kernels.py, their only caller, has
// checked shapes, types and strides. The GIL is released while a kernel works.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "kernels.h"
#include "pool.h"

namespace nb = nanobind;
using namespace plsc;

namespace {

bool runs(const std::string& name) {
#if defined(__x86_64__)
  if (name == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (name == "avx512") {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
  }
#endif
  return name == "scalar";
}

const Kernels& best() {
#if defined(__x86_64__)
  if (runs("avx512")) return avx512_kernels;
  if (runs("avx2")) return avx2_kernels;
#endif
  return scalar_kernels;
}

const Kernels* chosen = &best();

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void choose(const std::string& name) {
  if (!runs(name)) throw std::invalid_argument("this processor has no " + name);
  chosen = &scalar_kernels;
#if defined(__x86_64__)
  if (name == "avx2") chosen = &avx2_kernels;
  if (name == "avx512") chosen = &avx512_kernels;
#endif
}

Weight weight_of(int format, uintptr_t data, uintptr_t low, int64_t dim, int64_t centers) {
  return {static_cast<Format>(format), at<void>(data), at<uint16_t>(low), dim, centers};
}

// Enough work for a thread to be worth waking: a few microseconds.
int64_t grain(int64_t numbers_each) { return 1 + 16384 / (numbers_each + 1); }

void load(int format, uintptr_t data, int64_t dim, int64_t centers, uintptr_t index, int64_t start, int64_t count,
          uintptr_t out, uintptr_t inverse, int threads) {
  const Weight weight = weight_of(format, data, 0, dim, centers);
  const Rows rows = {at<const int64_t>(index), start, count};
  const Kernels& kernels = *chosen;
  Pool::of_process().run(count, threads, grain(weight.length()), [&](int64_t begin, int64_t end) {
    kernels.load(weight, rows, begin, end, at<float>(out), at<float>(inverse));
  });
}

void exponentials(uintptr_t data, int64_t samples, int64_t classes, int64_t stride, uintptr_t inverse, uintptr_t place,
                  int64_t start, float shift, uintptr_t total, int threads) {
  const Block block = {at<float>(data), samples, classes, stride};
  const Kernels& kernels = *chosen;
  Pool::of_process().run(samples, threads, grain(classes), [&](int64_t begin, int64_t end) {
    kernels.exponentials(block, at<const float>(inverse), at<const int64_t>(place), start, shift, at<float>(total), begin, end);
  });
}

void step(int format, uintptr_t data, uintptr_t low, int64_t dim, int64_t centers, uintptr_t index, int64_t start,
          int64_t count, uintptr_t grad, bool normalize, int rule, float lr, float weight_decay, float momentum,
          bool nesterov, float beta1, float beta2, float eps, int momentum_format, uintptr_t momentum_data,
          uintptr_t momentum_scale, uintptr_t second, uintptr_t steps, uint32_t key, int64_t first_class, int threads) {
  const Weight weight = weight_of(format, data, low, dim, centers);
  const Rows rows = {at<const int64_t>(index), start, count};
  const Step step = {static_cast<Rule>(rule), normalize, nesterov, lr, weight_decay, momentum, beta1, beta2, eps,
                     static_cast<Format>(momentum_format), at<void>(momentum_data), at<float>(momentum_scale),
                     at<float>(second), at<float>(steps), key, first_class};
  const Kernels& kernels = *chosen;
  Pool::of_process().run(count, threads, grain(4 * weight.length()), [&](int64_t begin, int64_t end) {
    kernels.step(weight, rows, step, at<float>(grad), begin, end);
  });
}

}  // namespace

NB_MODULE(_kernels, m) {
  m.def("runs", &runs, "Whether this processor has an instruction set: scalar, avx2, avx512.");
  m.def("choose", &choose, "Takes the kernels of one instruction set; the best is chosen at the start.");
  m.def("chosen", [] { return std::string(chosen->name); });
  using released = nb::call_guard<nb::gil_scoped_release>;
  m.def("load", &load, released());
  m.def("exponentials", &exponentials, released());
  m.def("step", &step, released());
}
