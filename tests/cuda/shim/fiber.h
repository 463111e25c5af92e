// Fibers for the shim: functions with a stack of their own that hand the processor to each other.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace shim {

constexpr size_t STACK_BYTES = 64 << 10;

struct Fiber {
  std::unique_ptr<char[]> stack;
#if defined(__x86_64__)
  void* top = nullptr;
#else
  ucontext_t context;
#endif
};

#if defined(__x86_64__)

// Saves what a function call must keep, and goes on where the other fiber stopped.
extern "C" void plsc_shim_switch(void** from, void* to);
asm(R"(
.pushsection .text
.weak plsc_shim_switch
.type plsc_shim_switch, @function
plsc_shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size plsc_shim_switch, .-plsc_shim_switch
.popsection
)");

inline void switch_fiber(Fiber& from, Fiber& to) { plsc_shim_switch(&from.top, to.top); }

inline void start_fiber(Fiber& fiber, void (*entry)()) {
  if (!fiber.stack) fiber.stack.reset(new char[STACK_BYTES]);
  uintptr_t end = (reinterpret_cast<uintptr_t>(fiber.stack.get()) + STACK_BYTES) & ~uintptr_t(15);
  void** top = reinterpret_cast<void**>(end);
  *--top = nullptr;  // where entry would return to; it never does
  *--top = reinterpret_cast<void*>(entry);
  top -= 6;  // the registers that the switch restores
  for (int i = 0; i < 6; ++i) top[i] = nullptr;
  fiber.top = top;
}

#else

inline void switch_fiber(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

inline void start_fiber(Fiber& fiber, void (*entry)()) {
  if (!fiber.stack) fiber.stack.reset(new char[STACK_BYTES]);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = STACK_BYTES;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}

#endif

}  // namespace shim
