// Slabs and index blocks from mmap, huge pages asked for; see arena.h.
#include "arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>

namespace plsc {
namespace {

constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kOwnPages = size_t{64} << 10;  // from here on freed memory goes back to the system at once
// Memory from here on gets whole huge pages: on small ones every search would be a walk through page tables as well.
constexpr size_t kNearlyHuge = size_t{3} << 19;
constexpr size_t kLargestRegion = size_t{64} << 20;
constexpr size_t kProbes = 32;

#ifdef MAP_POPULATE
constexpr int kTogether = MAP_POPULATE;  // an index is filled all over: its pages come at once, not by a fault each
#else
constexpr int kTogether = 0;
#endif

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

char* map_pages(size_t size, int flags = 0) {
  void* got = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  if (got == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(got);
}

// Memory that starts on a huge page: asks for one more and gives the ends back.
char* map_huge(size_t size) {
  char* const start = map_pages(size + kHuge);
  char* const aligned = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(start), kHuge));
  if (aligned > start) munmap(start, static_cast<size_t>(aligned - start));
  const size_t tail = kHuge - static_cast<size_t>(aligned - start);
  if (tail > 0) munmap(aligned + size, tail);
#ifdef MADV_HUGEPAGE
  madvise(aligned, size, MADV_HUGEPAGE);  // advice: a refusal costs speed only
#endif
  return aligned;
}

int nameless_file(const std::string& directory) {
#ifdef O_TMPFILE
  const int file = open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file >= 0) return file;
  if (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT) fail("cannot make the arena's file");
#endif
  std::string name = directory + "/plsc-arena-XXXXXX";
  const int named = mkstemp(name.data());
  if (named < 0) fail("cannot make the arena's file");
  unlink(name.c_str());
  return named;
}

}  // namespace

Block::Block(size_t bytes) : size_(bytes) {
  if (bytes >= kOwnPages) {
    size_ = bytes >= kNearlyHuge ? std::max(kHuge, round_up(bytes, 4096)) : round_up(bytes, 4096);
    data_ = bytes >= kNearlyHuge ? map_huge(size_) : map_pages(size_, kTogether);
  } else {
    data_ = std::aligned_alloc(64, round_up(bytes, 64));
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_, 0, bytes);
  }
}

Block::~Block() {
  if (data_ == nullptr) return;
  if (size_ >= kOwnPages) {
    munmap(data_, size_);
  } else {
    std::free(data_);
  }
}

Arena::Arena(size_t slab_bytes, const std::string& directory) : slab_bytes_(slab_bytes) {
  if (directory.empty()) return;
  file_ = nameless_file(directory);
  const char* const wanted = std::getenv("PLSC_PS_READ_AHEAD");  // "0": to measure without it
  reads_ahead_ = wanted == nullptr || std::strcmp(wanted, "0") != 0;
}

Arena::~Arena() {
  for (const Region& region : regions_) munmap(region.data, region.size);
  if (file_ >= 0) close(file_);
}

char* Arena::slab() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (regions_.empty() || used_ + slab_bytes_ > regions_.back().size) grow();
  char* const slab = regions_.back().data + used_;
  used_ += slab_bytes_;
  bytes_.fetch_add(slab_bytes_, std::memory_order_relaxed);
  return slab;
}

void Arena::read_ahead(const char* const* rows, size_t count, size_t row_bytes, std::vector<uintptr_t>& work) {
  static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto page_of = [](const char* at) { return reinterpret_cast<uintptr_t>(at) & ~(page - 1); };
  // A few pages tell whether the batch is warm: to ask for each would cost more than warm rows do.
  const size_t step = std::max<size_t>(count / std::min(kProbes, 2 + count / 1024), 1);
  bool warm = true;
  for (size_t i = 0; i < count && warm; i += step) {
    unsigned char there = 1;
    if (rows[i] != nullptr && mincore(reinterpret_cast<void*>(page_of(rows[i])), page, &there) == 0) warm = (there & 1) != 0;
  }
  if (warm) return;
  work.clear();
  for (size_t i = 0; i < count; ++i) {
    if (rows[i] == nullptr) continue;
    for (uintptr_t at = page_of(rows[i]); at <= page_of(rows[i] + row_bytes - 1); at += page) work.push_back(at);
  }
  std::sort(work.begin(), work.end());
  for (size_t i = 0; i < work.size();) {
    const uintptr_t first = work[i];
    uintptr_t end = first + page;
    while (++i < work.size() && work[i] <= end) end = work[i] + page;
    madvise(reinterpret_cast<void*>(first), end - first, MADV_WILLNEED);  // advice: a refusal costs speed only
  }
}

void Arena::grow() {
  const size_t wanted = regions_.empty() ? kHuge : std::min(kLargestRegion, 2 * regions_.back().size);
  const size_t size = round_up(std::max(wanted, slab_bytes_), kHuge);
  const size_t offset = mapped_;
  regions_.reserve(regions_.size() + 1);
  char* data;
  if (file_ < 0) {
    data = map_huge(size);
  } else {
    const int error = posix_fallocate(file_, static_cast<off_t>(offset), static_cast<off_t>(size));
    if (error != 0) {
      // A part may have been reserved: give it back, so that a smaller table can go on.
      if (ftruncate(file_, static_cast<off_t>(offset)) != 0) errno = 0;
      throw std::system_error(error, std::generic_category(), "no room for more rows in the arena's file");
    }
    void* got = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file_, static_cast<off_t>(offset));
    if (got == MAP_FAILED) fail("cannot map the arena's file");
    data = static_cast<char*>(got);
    madvise(data, size, MADV_RANDOM);  // rows are read singly: reading around a fault would read for nothing
  }
  regions_.push_back({data, size});
  used_ = 0;
  mapped_ += size;
}

}  // namespace plsc
