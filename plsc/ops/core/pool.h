// Threads that share out a loop: those of the OpenMP runtime that is loaded already (torch brings it), else a few of our
// own. A caller that finds them busy (ranks may be threads of one process) runs its loop alone, so that cores are never
// asked for twice.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

#include <dlfcn.h>
#include <unistd.h>

namespace plsc {

class Pool {
 public:
  using Body = std::function<void(int64_t begin, int64_t end)>;

  // Never destroyed: its threads may still wait when the process ends. A forked child has none of them and starts anew.
  static Pool& of_process() {
    static std::mutex mutex;
    static Pool* pool = nullptr;
    static pid_t owner = 0;
    std::lock_guard<std::mutex> lock(mutex);
    if (pool == nullptr || owner != getpid()) {
      owner = getpid();
      pool = new Pool(owner == loaded_in);
    }
    return *pool;
  }

  static inline const pid_t loaded_in = getpid();

  // openmp: may use the threads of the OpenMP runtime; a forked child must not, which has none of them.
  explicit Pool(bool openmp) {
    if (openmp) parallel_ = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  }

  // Calls body on consecutive parts of [0, total) from up to `threads` threads, this one among them; returns when all
  // are done. body must not throw. grain: fewest items worth a thread. There are more parts than threads, and whoever is
  // free takes the next: a thread whose core is taken holds up nobody.
  void run(int64_t total, int threads, int64_t grain, const Body& body) {
    const int64_t most = grain > 0 ? total / grain : total;
    std::unique_lock<std::mutex> busy(busy_, std::defer_lock);
    if (threads < 2 || most < 2 || !busy.try_lock()) {
      if (total > 0) body(0, total);
      return;
    }
    if (parallel_ != nullptr) {
      share_out(total, threads, most, body);
      return;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    helpers_ = grow(static_cast<int>(most < threads ? most : threads) - 1);
    const int64_t wanted = int64_t{PARTS} * (helpers_ + 1);
    body_ = &body, total_ = total, next_ = 0, parts_ = pending_ = most < wanted ? most : wanted;
    wake_.notify_all();
    take_parts(lock);
    done_.wait(lock, [this] { return pending_ == 0; });
  }

 private:
  // Of GNU's OpenMP ABI, which LLVM's and Intel's runtimes have too: fn(data) in `threads` threads, this one among them.
  using Parallel = void (*)(void (*fn)(void*), void* data, unsigned threads, unsigned flags);

  struct Loop {
    const Body& body;
    int64_t total, parts;
    std::atomic<int64_t> next{0};
  };

  // After a product torch's threads wait busily for the next: threads of our own would find no core. The team keeps its
  // size, `threads`, for a runtime ends those it does not need.
  void share_out(int64_t total, int threads, int64_t most, const Body& body) {
    const int64_t wanted = int64_t{PARTS} * threads;
    Loop loop{body, total, most < wanted ? most : wanted};
    parallel_(
        [](void* data) {
          Loop& loop = *static_cast<Loop*>(data);
          for (int64_t i; (i = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.parts;)
            loop.body(loop.total * i / loop.parts, loop.total * (i + 1) / loop.parts);
        },
        &loop, static_cast<unsigned>(threads), 0);
  }

  // Starts threads up to `wanted`; how many of them there are, fewer where the system gives no more.
  int grow(int wanted) {
    try {
      for (; size_ < wanted; ++size_) std::thread(&Pool::work, this, size_).detach();
    } catch (const std::system_error&) {
    }
    return size_ < wanted ? size_ : wanted;
  }

  void work(int number) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return next_ < parts_ && number < helpers_; });
      take_parts(lock);
    }
  }

  // Works on parts as long as there are any; the lock is held between them.
  void take_parts(std::unique_lock<std::mutex>& lock) {
    while (next_ < parts_) {
      const int64_t begin = total_ * next_ / parts_, end = total_ * (next_ + 1) / parts_;
      const Body* body = body_;
      ++next_;
      lock.unlock();
      (*body)(begin, end);
      lock.lock();
      if (--pending_ == 0) done_.notify_one();
    }
  }

  static constexpr int PARTS = 8;  // of each thread

  Parallel parallel_ = nullptr;
  std::mutex busy_, mutex_;
  std::condition_variable wake_, done_;
  const Body* body_ = nullptr;
  int64_t total_ = 0, next_ = 0, parts_ = 0, pending_ = 0;
  int helpers_ = 0, size_ = 0;
};

}  // namespace plsc
