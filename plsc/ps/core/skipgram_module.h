// What skipgram_module.cc adds to the Python module of the core.
#pragma once

#include <nanobind/nanobind.h>

void bind_skipgram(nanobind::module_& m);
