// The kernels for every processor.
#include "kernels.h"

namespace plsc {
namespace scalar {
#define PLSC_TARGET
#include "rows.h"
}  // namespace scalar

const Kernels scalar_kernels = {"scalar", scalar::load_rows, scalar::exponentials, scalar::step_rows};
}  // namespace plsc
