// Tables on disk, in checked blocks; the format is in docs/ps.md.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "bits.h"
#include "table.h"

namespace plsc {
namespace {

constexpr char kMagic[8] = {'P', 'L', 'S', 'C', 'P', 'S', 'T', '1'};
constexpr uint32_t kRowsMark = 0x53574F52u;  // "ROWS"
constexpr uint32_t kEndMark = 0x21444E45u;   // "END!"
constexpr size_t kBlockBytes = size_t{1} << 20;
constexpr size_t kLoaders = 4;  // threads that load a file: one reads a block while others lay theirs down
constexpr size_t kFlushBytes = size_t{8} << 20;  // the disk is given these at once, not all at the end
constexpr uint32_t kLargestHeader = 1u << 24;
constexpr uint32_t kLargestBlock = 1u << 30;
constexpr size_t kAhead = 12;  // rows whose lines are on their way

struct BlockHead {
  uint32_t mark, rows, bytes, crc;
};

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

class File {
 public:
  File(const std::string& path, int flags) : path_(path), fd_(open(path.c_str(), flags | O_CLOEXEC, 0644)) {
    if (fd_ < 0) fail(errno, path);
  }
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  void write(const void* data, size_t size) {
    const char* at = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t done = ::write(fd_, at, size);
      if (done < 0) {
        if (errno == EINTR) continue;
        fail(errno, path_);
      }
      at += done;
      size -= static_cast<size_t>(done);
      written_ += static_cast<size_t>(done);
    }
#ifdef SYNC_FILE_RANGE_WRITE
    if (written_ - flushed_ >= kFlushBytes) {
      sync_file_range(fd_, static_cast<off_t>(flushed_), static_cast<off_t>(written_ - flushed_), SYNC_FILE_RANGE_WRITE);
      flushed_ = written_;  // advice: finish() tells of failures
    }
#endif
  }

  size_t size() const {
    struct stat about;
    if (fstat(fd_, &about) != 0) fail(errno, path_);
    return static_cast<size_t>(about.st_size);
  }

  void read(void* data, size_t size) {
    char* at = static_cast<char*>(data);
    while (size > 0) {
      const ssize_t done = ::read(fd_, at, size);
      if (done < 0) {
        if (errno == EINTR) continue;
        fail(errno, path_);
      }
      if (done == 0) throw std::runtime_error("ends early: the file was cut short");
      at += done;
      size -= static_cast<size_t>(done);
    }
  }

  bool at_end() {
    char one;
    return ::read(fd_, &one, 1) == 0;
  }

  void finish() {
    if (fsync(fd_) != 0) fail(errno, path_);
    const int fd = fd_;
    fd_ = -1;
    if (close(fd) != 0) fail(errno, path_);
  }

 private:
  const std::string path_;
  int fd_;
  size_t written_ = 0, flushed_ = 0;
};

std::string header_of(File& file) {
  char magic[8];
  uint32_t head[2];
  file.read(magic, sizeof magic);
  if (std::memcmp(magic, kMagic, sizeof magic) != 0) throw std::runtime_error("is not a table: it begins with other bytes");
  file.read(head, sizeof head);
  if (head[0] > kLargestHeader) throw std::runtime_error("is damaged in its header");
  std::string header(head[0], '\0');
  file.read(header.data(), header.size());
  if (crc32(0, header.data(), header.size()) != head[1]) throw std::runtime_error("is damaged in its header");
  return header;
}

}  // namespace

uint64_t Table::save(const std::string& path, const std::string& header, uint64_t since) {
  const size_t stride = spec_.layout.stride;
  const size_t most = std::max<size_t>(1, kBlockBytes / (12 + stride));
  uint64_t written = 0;
  File file(path, O_WRONLY | O_CREAT | O_TRUNC);
  const uint32_t head[2] = {static_cast<uint32_t>(header.size()), crc32(0, header.data(), header.size())};
  file.write(kMagic, sizeof kMagic);
  file.write(head, sizeof head);
  file.write(header.data(), header.size());
  // A block: its head, then keys, times seen and rows, each in one piece.
  std::vector<char> block(sizeof(BlockHead) + most * (12 + stride));
  std::vector<const Slot*> slots;
  std::vector<const char*> ahead;
  std::vector<uintptr_t> pages;
  for (auto& owned : stripes_) {
    gate_.enter();
    const std::unique_ptr<Gate, void (*)(Gate*)> leave(&gate_, [](Gate* gate) { gate->leave(); });
    Stripe& stripe = *owned;
    const std::lock_guard<std::mutex> lock(stripe.mutex);
    const uint32_t now = clock_.load(std::memory_order_relaxed);
    const uint32_t oldest = since == 0 ? ~uint32_t{0} : now - static_cast<uint32_t>(since);
    const Search search = stripe.index.search();
    uint64_t at = 0;
    const uint64_t capacity = search.now.capacity() + search.old.capacity();
    while (at < capacity) {
      slots.clear();
      for (; at < capacity && slots.size() < most; ++at) {
        const Slot& slot = at < search.now.capacity() ? search.now[at] : search.old[at - search.now.capacity()];
        if (slot.row != 0 && now - slot.seen <= oldest) slots.push_back(&slot);
      }
      if (slots.empty()) break;
      const size_t n = slots.size(), bytes = n * (12 + stride);
      if (arena_->reads_ahead()) {
        ahead.clear();
        for (const Slot* slot : slots) ahead.push_back(row_at(stripe, slot->row - 1));
        Arena::read_ahead(ahead.data(), n, stride, pages);
      }
      char* const keys = block.data() + sizeof(BlockHead);
      char* const seen = keys + 8 * n;
      char* const rows = seen + 4 * n;
      for (size_t i = 0; i < n; ++i) {
        if (i + kAhead < n) {
          const char* const row = row_at(stripe, slots[i + kAhead]->row - 1);
          for (size_t line = 0; line < std::min<size_t>(stride, 256); line += 64) __builtin_prefetch(row + line);
        }
        const uint64_t key = slots[i]->key();
        std::memcpy(keys + 8 * i, &key, 8);
        std::memcpy(seen + 4 * i, &slots[i]->seen, 4);
        std::memcpy(rows + stride * i, row_at(stripe, slots[i]->row - 1), stride);
      }
      const BlockHead block_head{kRowsMark, static_cast<uint32_t>(n), static_cast<uint32_t>(bytes), crc32(0, keys, bytes)};
      std::memcpy(block.data(), &block_head, sizeof block_head);
      file.write(block.data(), sizeof block_head + bytes);
      written += n;
    }
  }
  uint32_t end[4] = {kEndMark, static_cast<uint32_t>(written), static_cast<uint32_t>(written >> 32), 0};
  end[3] = crc32(0, end, 12);
  file.write(end, sizeof end);
  file.finish();
  return written;
}

std::string Table::read_header(const std::string& path) {
  File file(path, O_RDONLY);
  return header_of(file);
}

uint64_t Table::load(const std::string& path, uint32_t later) {
  File file(path, O_RDONLY);
  header_of(file);
  const size_t stride = spec_.layout.stride;
  reserve(file.size() / (12 + stride));
  // Blocks are read one after the other, and checked and laid down by whoever read them.
  std::mutex reading;
  bool done = false;
  uint64_t total = 0;
  std::exception_ptr failed;
  const auto next = [&](std::vector<char>& payload) {
    const std::lock_guard<std::mutex> lock(reading);
    if (done) return false;
    BlockHead head;
    file.read(&head, sizeof head);
    if (head.mark == kEndMark) {
      done = true;
      const uint64_t rows = head.rows | (static_cast<uint64_t>(head.bytes) << 32);
      if (crc32(0, &head, 12) != head.crc || rows != total) throw std::runtime_error("is damaged in its end record");
      if (!file.at_end()) throw std::runtime_error("goes on after its end record");
      return false;
    }
    if (head.mark != kRowsMark || head.bytes > kLargestBlock || head.bytes != head.rows * (12 + stride)) {
      throw std::runtime_error("is damaged at a block's head, after " + std::to_string(total) + " rows");
    }
    payload.resize(sizeof head + head.bytes);
    std::memcpy(payload.data(), &head, sizeof head);
    file.read(payload.data() + sizeof head, head.bytes);
    total += head.rows;
    return true;
  };
  const auto work = [&] {
    try {
      std::vector<char> payload;
      std::vector<uint64_t> keys;
      while (next(payload)) {
        BlockHead head;
        std::memcpy(&head, payload.data(), sizeof head);
        char* const start = payload.data() + sizeof head;
        if (crc32(0, start, head.bytes) != head.crc) throw std::runtime_error("is damaged in one of its blocks");
        keys.resize(head.rows);
        std::memcpy(keys.data(), start, 8 * size_t{head.rows});
        char* const seen = start + 8 * size_t{head.rows};
        for (size_t i = 0; later != 0 && i < head.rows; ++i) {
          uint32_t time;
          std::memcpy(&time, seen + 4 * i, 4);
          time += later;
          std::memcpy(seen + 4 * i, &time, 4);
        }
        restore(keys.data(), head.rows, seen, seen + 4 * size_t{head.rows});
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(reading);
      done = true;
      if (failed == nullptr) failed = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  const unsigned cores = std::thread::hardware_concurrency();
  const size_t blocks = file.size() / kBlockBytes;
  try {
    while (others.size() + 1 < std::min<size_t>({kLoaders, cores, blocks / 4})) others.emplace_back(work);
  } catch (const std::system_error&) {
    // The system gives no more threads: fewer do the same.
  }
  work();
  for (std::thread& other : others) other.join();
  if (failed != nullptr) std::rethrow_exception(failed);
  return total;
}

}  // namespace plsc
