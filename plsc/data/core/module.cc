// The native parts of reading as a Python module, by nanobind. Arrays come as addresses: the callers in plsc/data have checked
// shapes and strides. The GIL is released meanwhile.
#include <nanobind/nanobind.h>

#include "kernels.h"

namespace nb = nanobind;

namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

NB_MODULE(_native, module) {
  const nb::call_guard<nb::gil_scoped_release> free;
  module.def("normalise", [](uintptr_t from, uintptr_t to, int64_t count) {
    plsc::normalise(at<const uint8_t>(from), at<float>(to), count);
  }, free);
  module.def("mirror", [](uintptr_t from, uintptr_t to, int64_t height, int64_t width, int64_t channels, int64_t stride) {
    plsc::mirror(at<const uint8_t>(from), at<uint8_t>(to), height, width, channels, stride);
  }, free);
  module.def("parse_pairs", [](uintptr_t text, int64_t size, uintptr_t pairs, int64_t most) {
    return plsc::parse_pairs(at<const char>(text), size, at<int64_t>(pairs), most);
  }, free);
}
