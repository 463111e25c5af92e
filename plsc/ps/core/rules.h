// What a push does to a row: the optimizers that run where the rows are, one row and one gradient at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace plsc {

enum class Dtype { fp32, fp16, bf16 };
enum class Init { zeros, constant, uniform, normal };
enum class RuleKind { sgd, momentum, adagrad, row_adagrad, adam, adamw, ftrl, user, custom };

// A rule of the user's own, compiled by him against plsc_rule.h, where it is described.
using UserStep = void (*)(float* value, float* state, const float* grad, int dim, float lr, const float* args);

struct RuleOptions {
  RuleKind kind = RuleKind::sgd;
  float weight_decay = 0.0f;  // adds weight_decay * value to the gradient; of adamw, shrinks the value
  float clip_norm = 0.0f;     // 0: off. Largest 2-norm of a row's gradient
  float clip_value = 0.0f;    // 0: off. Largest magnitude of a component
  float momentum = 0.9f;
  float eps = 1e-10f;
  float initial = 0.0f;  // what Adagrad's sums start with
  float beta1 = 0.9f;
  float beta2 = 0.999f;
  float beta = 1.0f;
  float l1 = 0.0f;
  float l2 = 0.0f;
  int custom_state = 0;  // floats a row when the rule is the caller's own
  UserStep step = nullptr;  // of a user's rule, with its constants
  std::vector<float> args;
};

// Corrections of Adam's moments after t steps, 1 / (1 - beta1^t) and 1 / sqrt(1 - beta2^t): computed in double, kept.
struct BiasCorrection {
  std::vector<float> first, second;
  void fill(double beta1, double beta2);
};

// Where the parts of a row lie: [ value | state, fp32 | show, click ], in bytes.
struct Layout {
  int dim = 0;
  Dtype dtype = Dtype::fp32;
  int state = 0;  // floats
  bool counters = false;
  size_t state_at = 0, counters_at = 0, stride = 0;
};

struct RowSpec {
  Layout layout;
  RuleOptions rule;
  BiasCorrection bias;
  Init init = Init::uniform;
  float init_scale = 0.0f;
  uint64_t seed = 0;
};

// Applies one gradient of numbers below its rule's limit; false: the row would not be finite, and is as it was.
// `scratch` holds 2 * dim + state floats.
using Update = bool (*)(const RowSpec& spec, float lr, char* row, const float* grad, float* scratch);

RowSpec make_spec(int dim, Dtype dtype, const RuleOptions& rule, Init init, float init_scale, uint64_t seed,
                  bool counters);
Update update_of(const RowSpec& spec);  // null for a custom rule
// As bits, the magnitude at which gradients are refused: infinity or, unclipped, 2^50.
uint32_t gradient_limit(const RuleOptions& rule);
// Whether all numbers are of less than such a magnitude.
bool all_below(const float* x, size_t n, uint32_t limit);

void read_value(const Layout& layout, const char* row, float* out);
void write_value(const Layout& layout, char* row, const float* value);
// Adds to a row's value; false: the sum would not be finite and the row is as it was. `scratch` holds dim floats.
bool add_value(const RowSpec& spec, char* row, const float* delta, float* scratch);
// What a row of this key starts as: the value alone, and the whole row with its state.
void initial_value(const RowSpec& spec, uint64_t key, float* out);
void give_birth(const RowSpec& spec, uint64_t key, char* row, float* scratch);
// State and counters for a row whose value has just been set from outside.
void initial_state(const RowSpec& spec, char* row);

}  // namespace plsc
