// Finds races: in a build with -fsanitize=thread, and without the library of that name, every access to memory that a
// kernel makes comes here. Two threads' accesses to one byte, of which one at least writes and which are not both
// atomic, must have an order: __syncthreads of their block between them, or __syncwarp of their warp. Blocks have none,
// and other collectives of a warp promise none.
// Forgotten are all but three reads of a byte since it was written; a launch wants one worker.
#pragma once

#include <unordered_map>

namespace shim {

struct Access {
  size_t block = ~size_t(0), thread = 0;
  unsigned barriers = 0, syncs = 0;
  bool atomic = false;

  size_t warp() const { return thread / 32; }
};

struct Byte {
  Access write, reads[3];  // reads: the last, the last by another lane of its warp, the last by another warp
};

inline thread_local bool looking = false;
inline std::unordered_map<uintptr_t, Byte>& bytes_touched() {
  static thread_local std::unordered_map<uintptr_t, Byte> all;
  return all;
}

inline void forget_accesses() { bytes_touched().clear(); }
inline void forget_accesses(void* address, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) bytes_touched().erase(reinterpret_cast<uintptr_t>(address) + i);
}

inline bool unordered(const Access& before, const Access& now) {
  if (before.block == ~size_t(0) || (before.atomic && now.atomic)) return false;
  if (before.block != now.block) return true;
  if (before.thread == now.thread || before.barriers != now.barriers) return false;
  return before.warp() != now.warp() || before.syncs == now.syncs;
}

inline void complain(const Access& before, const Access& now) {
  auto name = [](const Access& by) {
    return "thread " + std::to_string(by.thread) + " of block " + std::to_string(by.block);
  };
  fail("race: " + name(before) + " and " + name(now) + " touch one address in no order, and one writes");
}

inline void touch(Byte& byte, const Access& now, bool write) {
  if (unordered(byte.write, now)) complain(byte.write, now);
  if (write) {
    for (Access& read : byte.reads) {
      if (unordered(read, now)) complain(read, now);
      read = Access();
    }
    byte.write = now;
    return;
  }
  Access& last = byte.reads[0];
  if (last.block != now.block || last.warp() != now.warp()) byte.reads[2] = last;
  else if (last.thread != now.thread) byte.reads[1] = last;
  last = now;
}

[[gnu::no_sanitize("thread")]] inline void look(void* address, size_t bytes, bool write, bool atomic) {
  if (looking || !block || !block->current || block->current->quiet) return;
  looking = true;
  Thread& me = *block->current;
  uintptr_t at = reinterpret_cast<uintptr_t>(address), stack = reinterpret_cast<uintptr_t>(me.fiber.stack.get());
  Access now{block->number, size_t(&me - block->threads.data()), block->barriers, me.syncs, atomic};
  if (at < stack || at >= stack + STACK_BYTES)
    for (size_t i = 0; i < bytes; ++i) touch(bytes_touched()[at + i], now, write);
  looking = false;
}

}  // namespace shim

#define HOOK extern "C" [[gnu::no_sanitize("thread")]]
#define ACCESSES(bytes)                                                                          \
  HOOK void __tsan_read##bytes(void* at) { shim::look(at, bytes, false, false); }                \
  HOOK void __tsan_write##bytes(void* at) { shim::look(at, bytes, true, false); }                \
  HOOK void __tsan_unaligned_read##bytes(void* at) { shim::look(at, bytes, false, false); }      \
  HOOK void __tsan_unaligned_write##bytes(void* at) { shim::look(at, bytes, true, false); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
HOOK void __tsan_read_range(void* at, size_t bytes) { shim::look(at, bytes, false, false); }
HOOK void __tsan_write_range(void* at, size_t bytes) { shim::look(at, bytes, true, false); }
HOOK void __tsan_vptr_update(void**, void*) {}
HOOK void __tsan_vptr_read(void**) {}
HOOK void __tsan_init() {}

#define ATOMICS(bits, type)                                                                                         \
  HOOK type __tsan_atomic##bits##_load(const volatile type* at, int) {                                              \
    shim::look(const_cast<type*>(at), bits / 8, false, true);                                                       \
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);                                                                   \
  }                                                                                                                 \
  HOOK type __tsan_atomic##bits##_fetch_add(volatile type* at, type x, int) {                                       \
    shim::look(const_cast<type*>(at), bits / 8, true, true);                                                        \
    return __atomic_fetch_add(at, x, __ATOMIC_SEQ_CST);                                                             \
  }                                                                                                                 \
  HOOK type __tsan_atomic##bits##_fetch_or(volatile type* at, type x, int) {                                        \
    shim::look(const_cast<type*>(at), bits / 8, true, true);                                                        \
    return __atomic_fetch_or(at, x, __ATOMIC_SEQ_CST);                                                              \
  }                                                                                                                 \
  HOOK int __tsan_atomic##bits##_compare_exchange_strong(volatile type* at, type* old, type x, int, int) {          \
    shim::look(const_cast<type*>(at), bits / 8, true, true);                                                        \
    return __atomic_compare_exchange_n(at, old, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                      \
  }
ATOMICS(8, unsigned char)
ATOMICS(32, unsigned)
ATOMICS(64, unsigned long)
