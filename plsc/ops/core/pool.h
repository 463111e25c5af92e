// A few waiting threads that share out a loop. A caller that finds them busy (ranks may be threads of one process)
// runs its loop alone, so that cores are never asked for twice.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

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
      pool = new Pool;
      owner = getpid();
    }
    return *pool;
  }

  // Calls body on consecutive parts of [0, total) from up to `threads` threads, this one among them; returns when all
  // are done. body must not throw. grain: fewest items worth a thread. There are more parts than threads, and whoever is
  // free takes the next: a thread whose core is taken (torch's own wait busily after each product) holds up nobody.
  void run(int64_t total, int threads, int64_t grain, const Body& body) {
    const int64_t most = grain > 0 ? total / grain : total;
    std::unique_lock<std::mutex> busy(busy_, std::defer_lock);
    if (threads < 2 || most < 2 || !busy.try_lock()) {
      if (total > 0) body(0, total);
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

  std::mutex busy_, mutex_;
  std::condition_variable wake_, done_;
  const Body* body_ = nullptr;
  int64_t total_ = 0, next_ = 0, parts_ = 0, pending_ = 0;
  int helpers_ = 0, size_ = 0;
};

}  // namespace plsc
