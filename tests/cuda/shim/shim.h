// Runs CUDA kernels on a CPU, for tests: included before a .cu file, it makes it C++. Every CUDA thread is a fiber;
// it runs until it waits (at a barrier, or for the other lanes of its warp), and then a schedule says who goes on.
// Blocks run on one or two OS threads, atomics are real, shared memory starts as 0xff in every block.
//
// Found: barriers or lanes that never meet, barriers of different lines, missing barriers (by the warp-greedy
// schedules), vector accesses at addresses that do not allow them, with sanitizers what lies out of bounds, and in the
// build of races.h threads that touch one address in no order. Not found: speed, what CUDA's own instructions do.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>

#include "fiber.h"

#define PLSC_SHIM
#define __global__
#define __restrict__
#define DEVICE inline

namespace shim {

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

enum class State { ready, at_barrier, in_warp, done };

struct Thread {
  Fiber fiber;
  State state = State::ready;
  Dim index;
  int line = 0;
  uint64_t slot[2] = {0, 0};
  int slot_line[2] = {0, 0};
  unsigned generation = 0;
  unsigned syncs = 0;  // of its warp that are behind it
  int quiet = 1;  // above 0: what runs is the shim, not the kernel
};

struct Warp {
  unsigned arrived[2] = {0, 0};
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Fiber scheduler;
  Thread* current = nullptr;
  Dim index, size, grid;
  size_t number = 0;      // of the launch
  unsigned barriers = 0;  // behind it
  std::string error;
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
};

inline thread_local Block* block = nullptr;

// Around what the shim itself does for a thread.
struct Quiet {
  [[gnu::noinline, gnu::no_sanitize("thread")]] Quiet() { ++block->current->quiet; }
  [[gnu::noinline, gnu::no_sanitize("thread")]] ~Quiet() { --block->current->quiet; }
};

#ifdef __SANITIZE_THREAD__  // races.h
void forget_accesses();
void forget_accesses(void* address, size_t bytes);
#else
inline void forget_accesses() {}
inline void forget_accesses(void*, size_t) {}
#endif

// ---- shared memory: static in CUDA, so one array a place in the source and OS thread, refilled for every block

struct Area {
  void* data;
  size_t bytes;
};
inline std::vector<Area>& areas() {
  static thread_local std::vector<Area> all;
  return all;
}
inline void fill_areas() {
  for (Area& area : areas()) {
    std::memset(area.data, 0xff, area.bytes);
    forget_accesses(area.data, area.bytes);  // by another block, whose memory it was
  }
}

template <class T, int count>
struct Shared {
  T data[count];
  Shared() {
    std::memset(static_cast<void*>(data), 0xff, sizeof(data));
    areas().push_back({data, sizeof(data)});
  }
};

template <class T, class Find>
T* shared(Find find) {
  Quiet quiet;
  return find();
}

// ---- waiting

inline void fail(const std::string& what) {
  if (block->error.empty()) block->error = what;
}

inline void yield() { switch_fiber(block->current->fiber, block->scheduler); }

inline void sync_threads(int line) {
  Quiet quiet;
  block->current->state = State::at_barrier;
  block->current->line = line;
  yield();
}

// Gives `value` to the warp; returns the parity of the slots in which all lanes' values now lie.
inline int exchange(uint64_t value, unsigned mask, int line) {
  Quiet quiet;
  Thread& me = *block->current;
  size_t number = &me - block->threads.data();
  Warp& warp = block->warps[number / 32];
  int parity = int(me.generation++ & 1u);
  me.slot[parity] = value;
  me.slot_line[parity] = line;
  if (mask != 0xffffffffu) fail("line " + std::to_string(line) + ": the shim knows collectives of whole warps only");
  if (++warp.arrived[parity] < 32) {
    me.state = State::in_warp;
    me.line = line;
    yield();
    return parity;
  }
  warp.arrived[parity] = 0;
  for (size_t lane = number / 32 * 32; lane < number / 32 * 32 + 32; ++lane) {
    Thread& other = block->threads[lane];
    if (other.slot_line[parity] != line)
      fail("lanes of a warp meet at lines " + std::to_string(line) + " and " +
           std::to_string(other.slot_line[parity]));
    other.state = State::ready;
  }
  return parity;
}

inline void sync_warp(int line) {
  Quiet quiet;
  exchange(0, 0xffffffffu, line);
  ++block->current->syncs;
}

template <class T>
T shuffle(T value, int from, unsigned mask, int line) {
  Quiet quiet;
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0, got;
  std::memcpy(&bits, &value, sizeof(T));
  int parity = exchange(bits, mask, line);
  size_t base = (block->current - block->threads.data()) / 32 * 32;
  got = block->threads[base + from % 32].slot[parity];
  std::memcpy(&value, &got, sizeof(T));
  return value;
}

inline void check_aligned(const void* address, size_t bytes) {
  Quiet quiet;
  if (reinterpret_cast<uintptr_t>(address) % bytes)
    fail(std::to_string(bytes) + " bytes at once from an address that is no multiple of them");
}

inline int lane() { return int((block->current - block->threads.data()) % 32); }

inline unsigned ballot(bool set, unsigned mask, int line) {
  Quiet quiet;
  int parity = exchange(set, mask, line);
  size_t base = (block->current - block->threads.data()) / 32 * 32;
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= unsigned(block->threads[base + i].slot[parity] & 1u) << i;
  return bits;
}

// ---- schedules

// 0, 1, 2: a thread after the other, from the front, from the back, shuffled. 3, 4, 5: a warp runs as far as it can
// before another does, likewise.
constexpr int ORDERS = 6;

inline void run_thread(Thread& thread) {
  block->current = &thread;
  switch_fiber(block->scheduler, thread.fiber);
}

inline bool run_warp(size_t warp) {
  bool moved = false;
  for (bool again = true; again;) {
    again = false;
    for (size_t i = warp * 32; i < warp * 32 + 32; ++i)
      if (block->threads[i].state == State::ready) {
        run_thread(block->threads[i]);
        moved = again = true;
      }
  }
  return moved;
}

inline std::vector<size_t> turns(size_t count, int order, std::mt19937& random) {
  std::vector<size_t> all(count);
  for (size_t i = 0; i < count; ++i) all[i] = order % 3 == 1 ? count - 1 - i : i;
  if (order % 3 == 2)
    for (size_t i = count; i > 1; --i) std::swap(all[i - 1], all[random() % i]);
  return all;
}

inline bool release_barrier() {
  int line = 0;
  for (Thread& thread : block->threads) {
    if (thread.state == State::in_warp) return false;
    if (thread.state != State::at_barrier) continue;
    if (line && thread.line != line)
      fail("threads of a block wait at the barriers of lines " + std::to_string(line) + " and " +
           std::to_string(thread.line));
    line = thread.line;
  }
  for (Thread& thread : block->threads)
    if (thread.state == State::at_barrier) thread.state = State::ready;
  ++block->barriers;
  return true;
}

inline void run_block(int order, std::mt19937& random) {
  fill_areas();
  for (size_t i = 0; i < block->threads.size(); ++i) {
    Thread& thread = block->threads[i];
    thread.state = State::ready;
    thread.generation = thread.syncs = 0;
    thread.quiet = 1;
    thread.index = Dim{unsigned(i), 0, 0};
    start_fiber(thread.fiber, [] {
      block->current->quiet = 0;
      block->body(block->argument);
      Quiet quiet;
      block->current->state = State::done;
      yield();
    });
  }
  for (Warp& warp : block->warps) warp = Warp();
  for (;;) {
    bool moved = false, alive = false;
    if (order < 3) {
      for (size_t i : turns(block->threads.size(), order, random))
        if (block->threads[i].state == State::ready) {
          run_thread(block->threads[i]);
          moved = true;
        }
    } else {
      for (size_t warp : turns(block->warps.size(), order, random)) moved |= run_warp(warp);
    }
    for (Thread& thread : block->threads) alive |= thread.state != State::done;
    if (!alive || !block->error.empty()) return;
    if (moved) continue;
    if (!release_barrier()) {
      for (Thread& thread : block->threads)
        if (thread.state == State::in_warp)
          return fail("lanes wait at line " + std::to_string(thread.line) + " for lanes that never come");
    }
  }
}

// ---- launching

struct Launch {
  Dim grid, size;
  int order, workers;
  void (*body)(void*);
  void* argument;
};

inline std::string run(const Launch& launch) {
  forget_accesses();
  size_t count = size_t(launch.grid.x) * launch.grid.y * launch.grid.z;
  if (launch.size.x % 32 || launch.size.x == 0 || launch.size.x > 1024) return "blocks are 32 to 1024 threads, by 32";
  std::atomic<size_t> next{0};
  std::string errors[8];
  auto work = [&](int worker) {
    Block mine;
    mine.threads = std::vector<Thread>(launch.size.x);
    mine.warps.resize(launch.size.x / 32);
    mine.size = launch.size;
    mine.grid = launch.grid;
    mine.body = launch.body;
    mine.argument = launch.argument;
    std::mt19937 random(unsigned(7 + worker));
    block = &mine;
    for (size_t turn; (turn = next++) < count && mine.error.empty();) {
      size_t i = launch.order % 2 ? count - 1 - turn : turn;
      mine.number = i;
      mine.index = Dim{unsigned(i % launch.grid.x), unsigned(i / launch.grid.x % launch.grid.y),
                       unsigned(i / launch.grid.x / launch.grid.y)};
      run_block(launch.order, random);
    }
    errors[worker] = mine.error;
    block = nullptr;
  };
  if (launch.workers == 1 || count == 1) {
    work(0);
  } else {
    std::thread other(work, 1);
    work(0);
    other.join();
  }
  return errors[0].empty() ? errors[1] : errors[0];
}

// The kind of a parameter in one letter, compared with what Python hands over: a pointer, or a number by its type.
template <class T>
constexpr char kind() {
  if (std::is_pointer_v<T>) return 'p';
  if (std::is_same_v<T, float>) return 'f';
  if (std::is_same_v<T, double>) return 'd';
  if (std::is_same_v<T, int>) return 'i';
  if (std::is_same_v<T, unsigned>) return 'u';
  if (std::is_same_v<T, long long>) return 'l';
  return '?';
}

template <class... Args>
const char* launch(void (*kernel)(Args...), const char* kinds, void** args, const unsigned* grid, unsigned threads,
                   int order, int workers) {
  static std::string error;
  std::string expected{kind<Args>()...};
  if (expected != kinds) {
    error = "parameters are " + expected + ", got " + kinds;
    return error.c_str();
  }
  std::tuple<Args...> values;
  size_t i = 0;
  std::apply([&](auto&... value) { ((std::memcpy(&value, args[i++], sizeof(value))), ...); }, values);
  auto call = [&] { std::apply(kernel, values); };
  using Call = decltype(call);
  Launch it{{grid[0], grid[1], grid[2]}, {threads, 1, 1}, order, workers,
            [](void* argument) { (*static_cast<Call*>(argument))(); }, &call};
  error = run(it);
  return error.empty() ? nullptr : error.c_str();
}

// ---- half precision, in software: to the nearest, ties to even

inline float half_to_float(unsigned short bits) {
  unsigned sign = unsigned(bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 1023u, out;
  if (exponent == 31) out = sign | 0x7f800000u | fraction << 13;
  else if (exponent) out = sign | (exponent + 112) << 23 | fraction << 13;
  else {
    float small = std::ldexp(float(fraction), -24);
    std::memcpy(&out, &small, 4);
    out |= sign;
  }
  float x;
  std::memcpy(&x, &out, 4);
  return x;
}

inline unsigned short float_to_half(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  unsigned short sign = (unsigned short)(bits >> 16 & 0x8000u);
  if (x != x) return sign | 0x7e00u;
  double size = std::fabs(double(x));
  if (size >= 65520.0) return sign | 0x7c00u;
  if (size < std::ldexp(1.0, -14)) return sign | (unsigned short)std::nearbyint(std::ldexp(size, 24));
  int exponent;
  double fraction = std::frexp(size, &exponent);  // in [0.5, 1)
  unsigned rounded = unsigned(std::nearbyint(std::ldexp(fraction, 11)));  // [1024, 2048]
  return sign | (unsigned short)((unsigned(exponent + 13) << 10) + rounded);
}

}  // namespace shim

// ---- the names of CUDA that kernels use

#define threadIdx (shim::block->current->index)
#define blockIdx (shim::block->index)
#define blockDim (shim::block->size)
#define gridDim (shim::block->grid)
#define SHARED_ARRAY(type, name, count)                 \
  type* name = shim::shared<type>([] {                  \
    static thread_local shim::Shared<type, count> area; \
    return area.data;                                   \
  })
#define CHECK_ALIGNED(address, bytes) shim::check_aligned(address, bytes)
#define __syncthreads() shim::sync_threads(__LINE__)
#define __syncwarp() shim::sync_warp(__LINE__)
#define __shfl_sync(mask, value, from) shim::shuffle(value, from, mask, __LINE__)
#define __shfl_xor_sync(mask, value, other) shim::shuffle(value, shim::lane() ^ (other), mask, __LINE__)
#define __ballot_sync(mask, set) shim::ballot(set, mask, __LINE__)

#define EXPORT_KERNEL(name)                                                                                      \
  extern "C" const char* shim_##name(const char* kinds, void** args, const unsigned* grid, unsigned threads,    \
                                     int order, int workers) {                                                  \
    return shim::launch(name, kinds, args, grid, threads, order, workers);                                      \
  }

inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned atomicAdd(unsigned* at, unsigned x) { return __atomic_fetch_add(at, x, __ATOMIC_RELAXED); }
inline unsigned atomicOr(unsigned* at, unsigned x) { return __atomic_fetch_or(at, x, __ATOMIC_RELAXED); }
inline unsigned atomicMax(unsigned* at, unsigned x) {
  unsigned old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (old < x && !__atomic_compare_exchange_n(at, &old, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}

#ifdef __SANITIZE_THREAD__
#include "races.h"
#endif
