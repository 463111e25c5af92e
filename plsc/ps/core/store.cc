// Tables on disk: written in checked blocks to a file beside, renamed when complete; the format is in docs/ps.md.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "bits.h"
#include "table.h"

namespace plsc {
namespace {

constexpr char kMagic[8] = {'P', 'L', 'S', 'C', 'P', 'S', 'T', '1'};
constexpr uint32_t kRowsMark = 0x53574F52u;  // "ROWS"
constexpr uint32_t kEndMark = 0x21444E45u;   // "END!"
constexpr size_t kBlockBytes = size_t{1} << 20;
constexpr uint32_t kLargestHeader = 1u << 24;
constexpr uint32_t kLargestBlock = 1u << 30;

struct BlockHead {
  uint32_t mark, rows, bytes, crc;
};

std::array<std::array<uint32_t, 256>, 8> make_crc_tables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = (c >> 1) ^ ((c & 1u) != 0 ? 0xEDB88320u : 0u);
    tables[0][i] = c;
  }
  for (size_t t = 1; t < 8; ++t) {
    for (size_t i = 0; i < 256; ++i) tables[t][i] = (tables[t - 1][i] >> 8) ^ tables[0][tables[t - 1][i] & 0xFFu];
  }
  return tables;
}

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
    }
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
};

void sync_folder(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const int fd = open(folder.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;  // a folder that cannot be read can still hold the file
  fsync(fd);
  close(fd);
}

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

uint32_t crc32(uint32_t crc, const void* data, size_t size) {
  static const auto t = make_crc_tables();
  const auto* at = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; size >= 8; size -= 8, at += 8) {
    uint32_t low, high;
    std::memcpy(&low, at, 4);
    std::memcpy(&high, at + 4, 4);
    low ^= crc;
    crc = t[7][low & 0xFFu] ^ t[6][(low >> 8) & 0xFFu] ^ t[5][(low >> 16) & 0xFFu] ^ t[4][low >> 24] ^
          t[3][high & 0xFFu] ^ t[2][(high >> 8) & 0xFFu] ^ t[1][(high >> 16) & 0xFFu] ^ t[0][high >> 24];
  }
  for (; size > 0; --size, ++at) crc = (crc >> 8) ^ t[0][(crc ^ *at) & 0xFFu];
  return ~crc;
}

uint64_t Table::save(const std::string& path, const std::string& header, uint64_t since) {
  const std::string partial = path + ".partial";
  const size_t stride = spec_.layout.stride;
  const size_t most = std::max<size_t>(1, kBlockBytes / (12 + stride));
  uint64_t written = 0;
  try {
    File file(partial, O_WRONLY | O_CREAT | O_TRUNC);
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
      stripe.index.settle();
      const Slots& all = stripe.index.slots();
      uint64_t at = 0;
      while (at < all.capacity()) {
        slots.clear();
        for (; at < all.capacity() && slots.size() < most; ++at) {
          if (all[at].row != 0 && now - all[at].seen <= oldest) slots.push_back(&all[at]);
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
          if (i + 8 < n) __builtin_prefetch(row_at(stripe, slots[i + 8]->row - 1));
          std::memcpy(keys + 8 * i, &slots[i]->key, 8);
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
    if (rename(partial.c_str(), path.c_str()) != 0) fail(errno, path);
  } catch (...) {
    unlink(partial.c_str());
    throw;
  }
  sync_folder(path);
  return written;
}

std::string Table::read_header(const std::string& path) {
  File file(path, O_RDONLY);
  return header_of(file);
}

uint64_t Table::load(const std::string& path) {
  File file(path, O_RDONLY);
  header_of(file);
  const size_t stride = spec_.layout.stride;
  struct stat about;
  if (stat(path.c_str(), &about) == 0) reserve(static_cast<uint64_t>(about.st_size) / (12 + stride));
  std::vector<char> payload;
  std::vector<uint64_t> keys;
  uint64_t total = 0;
  for (;;) {
    BlockHead head;
    file.read(&head, sizeof head);
    if (head.mark == kEndMark) {
      const uint64_t expected = head.rows | (static_cast<uint64_t>(head.bytes) << 32);
      if (crc32(0, &head, 12) != head.crc || expected != total) throw std::runtime_error("is damaged in its end record");
      if (!file.at_end()) throw std::runtime_error("goes on after its end record");
      return total;
    }
    if (head.mark != kRowsMark || head.bytes > kLargestBlock || head.bytes != head.rows * (12 + stride)) {
      throw std::runtime_error("is damaged at a block's head, after " + std::to_string(total) + " rows");
    }
    payload.resize(head.bytes);
    file.read(payload.data(), payload.size());
    if (crc32(0, payload.data(), payload.size()) != head.crc) {
      throw std::runtime_error("is damaged in the block after " + std::to_string(total) + " rows");
    }
    const size_t n = head.rows;
    keys.resize(n);
    std::memcpy(keys.data(), payload.data(), 8 * n);
    const char* const seen = payload.data() + 8 * n;
    restore(keys.data(), n, seen, seen + 4 * n);
    total += n;
  }
}

}  // namespace plsc
