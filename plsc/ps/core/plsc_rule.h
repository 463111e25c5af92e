/* A rule of your own for a sparse table, in C++ or C: include this, define the two functions, give the file to
 * plsc.ps.NativeRule. Both may be called by several threads at once, each with another row. */
#pragma once

#if defined(__cplusplus)
#define PLSC_RULE extern "C" __attribute__((visibility("default")))
#else
#define PLSC_RULE __attribute__((visibility("default")))
#endif

/* Floats of state that a row of `dim` components needs, 0 or more; they start as zeros. args: as given to NativeRule. */
PLSC_RULE int plsc_rule_state(int dim, const float* args);

/* One step of one row: changes value [dim] and state in place by grad [dim], which is finite. */
PLSC_RULE void plsc_rule_step(float* value, float* state, const float* grad, int dim, float lr, const float* args);

/* Which of these interfaces the file was compiled against. */
PLSC_RULE const int plsc_rule_version;
const int plsc_rule_version = 1;
