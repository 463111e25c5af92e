// Memory that never moves: regions from the system, cut into slabs of equal size; in RAM or in a nameless file.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace plsc {

// Zeroed memory for an index, cache lines whole: from malloc while small, from the system on huge pages once large. Owns what it holds.
class Block {
 public:
  Block() = default;
  explicit Block(size_t bytes);
  Block(Block&& other) noexcept { swap(other); }
  Block& operator=(Block&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Block();
  void* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void swap(Block& other) {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  void* data_ = nullptr;
  size_t size_ = 0;
};

// Hands out slabs; they live as long as the arena. Thread-safe.
class Arena {
 public:
  // `directory` empty: RAM. Else the slabs are pages of a file on that directory's disk, which has no name and goes
  // with the arena. Room on the disk is reserved before a slab is handed out, so a full disk is an exception here.
  Arena(size_t slab_bytes, const std::string& directory);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  char* slab();
  size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }  // of slabs handed out
  // Whether rows may have to be read from a disk, and are to be asked for beforehand.
  bool reads_ahead() const { return reads_ahead_; }
  // Asks the disk for the pages of these rows, all at once, unless memory seems to have them already. Rows may be null.
  // Without it a row that is not in memory is read when it is touched, one after the other. `work` is scratch.
  static void read_ahead(const char* const* rows, size_t count, size_t row_bytes, std::vector<uintptr_t>& work);

 private:
  struct Region {
    char* data;
    size_t size;
  };
  void grow();

  const size_t slab_bytes_;
  int file_ = -1;
  bool reads_ahead_ = false;
  std::mutex mutex_;
  std::vector<Region> regions_;
  size_t used_ = 0;    // of the last region
  size_t mapped_ = 0;  // of all regions; pages are taken from the system when they are first written to
  std::atomic<size_t> bytes_{0};
};

}  // namespace plsc
