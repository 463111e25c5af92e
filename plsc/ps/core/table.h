// The sparse table: rows of floats under 64-bit keys, in stripes that each have a lock, an index and rows of their own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "arena.h"
#include "bits.h"
#include "index.h"
#include "rules.h"

namespace plsc {

struct TableOptions {
  int dim = 1;
  Dtype dtype = Dtype::fp32;
  RuleOptions rule;
  Init init = Init::uniform;
  float init_scale = 0.01f;
  uint64_t seed = 0;
  bool locked = false;       // false: Hogwild, floats are read and written outside the locks
  int stripes = 64;          // a power of two
  std::string arena;         // a directory whose disk holds the rows; empty: RAM
  bool counters = false;     // two floats a row: how often shown, how often clicked
  uint32_t admit_after = 1;  // a key gets a row at its n-th push
  float admit_probability = 1.0f;
  size_t sketch_bytes = size_t{1} << 22;  // what counts keys that have no row yet
  uint64_t max_rows = 0;                  // 0: no bound
  bool least_shown = false;               // what goes at max_rows: least shown (LFU), else longest unseen (LRU)
};

struct TableStats {
  uint64_t rows = 0, born = 0, evicted = 0, refused = 0, unadmitted = 0, clock = 0;
  uint64_t contended = 0;  // times that a batch found a stripe locked by another thread
  uint64_t payload_bytes = 0, index_bytes = 0, arena_bytes = 0;
};

// Many may be inside, or one alone. Who waits to be alone keeps newcomers out, so he is not starved.
class Gate {
 public:
  void enter() {
    const std::lock_guard<std::mutex> knock(door_);
    room_.lock_shared();
  }
  void leave() { room_.unlock_shared(); }
  void enter_alone() {
    door_.lock();
    room_.lock();
  }
  void leave_alone() {
    room_.unlock();
    door_.unlock();
  }

 private:
  std::mutex door_;
  std::shared_mutex room_;
};

class Inside {
 public:
  explicit Inside(Gate& gate) : gate_(gate) { gate_.enter(); }
  ~Inside() { gate_.leave(); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  Gate& gate_;
};

class Alone {
 public:
  explicit Alone(Gate& gate) : gate_(gate) { gate_.enter_alone(); }
  ~Alone() { gate_.leave_alone(); }
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;

 private:
  Gate& gate_;
};

// One lock's part of a table: an index, and rows in slabs that never move.
struct alignas(64) Stripe {
  Stripe(uint64_t lines, uint64_t salt) : index(lines, salt) {}
  std::mutex mutex;
  Index index;
  uint32_t rows = 0;               // row numbers given out so far
  std::vector<uint32_t> free_rows;  // of these, the ones given back
  std::vector<char*> slabs;
  std::vector<uint8_t> sketch;
  uint64_t sightings = 0;
};

class Table {
 public:
  explicit Table(const TableOptions& options);
  ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  // rows[i] = the row of keys[i]. A missing key's row is born (create) or its initial value answered.
  void pull(const uint64_t* keys, size_t n, float* out, bool create);
  // One step of the rule a (key, gradient) pair, in order; returns how many were refused: those with a NaN or an infinity
  // in gradient or counts, which nothing learns of, and those whose row would not be finite, which stays as it was.
  // `shows` and `clicks` may be null: 1 and 0.
  uint64_t push(const uint64_t* keys, size_t n, const float* grads, const float* shows, const float* clicks, float lr);
  // A push under a rule that runs elsewhere: begun with the number of gradients refused beforehand; then, for keys that
  // do not repeat, rows gathered as floats, `values` [n, dim] and `state` [n, layout().state], and scattered.
  void begin_push(uint64_t refused);
  // Missing keys are born, or, where the table's admission refuses them, answered with their initial row.
  void gather(const uint64_t* keys, size_t n, float* values, float* state);
  // Sets rows that are there, each shown once; returns how many were refused for not being finite.
  uint64_t scatter(const uint64_t* keys, size_t n, const float* values, const float* state);
  // Sets values, making rows that are missing, with the state of newborns.
  void assign(const uint64_t* keys, size_t n, const float* values);
  // Adds deltas [n, dim] to values, making rows that are missing; optimizer state stays. Returns how many were refused,
  // as push.
  uint64_t add(const uint64_t* keys, size_t n, const float* deltas);
  // Show and click counts [n, 2]; zeros for missing keys.
  void read_counters(const uint64_t* keys, size_t n, float* out);
  void contains(const uint64_t* keys, size_t n, uint8_t* out);
  // Where rows lie, for loops that train them in place; missing ones are made. Good until the row is erased.
  void addresses(const uint64_t* keys, size_t n, uint64_t* out);

  uint64_t erase(const uint64_t* keys, size_t n);
  // Erases rows unseen for more than max_age ticks (negative: any age) or with show_weight * shows + click_weight *
  // clicks below min_score (NaN: any score); returns how many.
  uint64_t evict(int64_t max_age, float min_score, float show_weight, float click_weight);
  void decay(float factor);  // of shows and clicks

  // One stripe's rows, as of one moment.
  void stripe_rows(int stripe, std::vector<uint64_t>& keys, std::vector<float>& values, std::vector<float>& state);

  // Writes header and rows seen at or after `since` (0: all) to `path` and syncs it. Training may go on: each stripe is
  // locked while it is written. Returns rows written.
  uint64_t save(const std::string& path, const std::string& header, uint64_t since);
  // Reads rows of such a file over those here; the header is the caller's to compare. `later` is added to the times they
  // were seen: what this table's clock is ahead of the file's, where the two have not counted the same pushes.
  uint64_t load(const std::string& path, uint32_t later = 0);
  static std::string read_header(const std::string& path);
  // Moves the clock on and returns the new time: rows touched from now on are seen at or after it. The clock is of 32
  // bits and goes round: times are compared by their distance from now, so ages up to 2^32 pushes are told apart.
  uint64_t tick();
  void set_clock(uint64_t clock) { clock_.store(static_cast<uint32_t>(clock)); }

  size_t size() const { return static_cast<size_t>(rows_.load(std::memory_order_relaxed)); }
  TableStats stats();
  const Layout& layout() const { return spec_.layout; }
  int num_stripes() const { return static_cast<int>(stripes_.size()); }

  Gate& gate() { return gate_; }

 private:
  struct Scratch;
  // What becomes of a key without a row: nothing, a row as it is born, the same if admitted, or a row that the visitor
  // sets as a whole.
  enum class Missing { skip, create, admit, set };

  static Scratch& scratch();
  template <class Visit>
  struct Shifted;
  template <class Visit>
  void batch(const uint64_t* keys, size_t n, Missing missing, bool touch, size_t row_bytes, const void* beside,
             size_t beside_bytes, Visit visit);
  template <class Work>
  void by_stripe(Scratch& s, Work work);
  template <class Visit>
  bool chunk(const uint64_t* keys, size_t n, Missing missing, bool touch, size_t row_bytes, Scratch& s, Visit& visit);
  // What comes with n keys, of which shows and clicks may be null.
  struct Pairs {
    const uint64_t* keys;
    size_t n;
    const float* floats;  // [n, dim]
    const float* shows;
    const float* clicks;
  };
  // Calls step with the pairs, a chunk at a time, but for those whose floats reach `limit` or whose counts are not
  // finite; returns how many those are and counts them and what step refuses.
  template <class Step>
  uint64_t judge(const Pairs& pairs, uint32_t limit, Step step);
  // Whole rows as they were saved, `seen` [n] of four bytes each; both unaligned.
  void restore(const uint64_t* keys, size_t n, const char* seen, const char* rows);
  // With `floats` null the row is the caller's to set.
  Slot* insert(Stripe& stripe, uint64_t hash, float* floats);
  void count(char* row, float shows, float clicks) const;
  bool admits(Stripe& stripe, uint64_t hash);
  void remove(Stripe& stripe, const Slot& slot);
  void reserve(uint64_t rows);
  uint64_t remove_where(Stripe& stripe, const std::function<bool(const Slot&, const char*)>& goes);
  uint64_t trim(Stripe& stripe);
  bool over_quota(const Stripe& stripe) const { return quota_ > 0 && stripe.index.count() > quota_; }
  char* row_at(const Stripe& stripe, uint32_t row) const {
    return stripe.slabs[row >> slab_shift_] + static_cast<size_t>(row & slab_mask_) * spec_.layout.stride;
  }
  Stripe& stripe_of(uint64_t hash) { return *stripes_[hash & stripe_mask_]; }

  const TableOptions options_;
  const RowSpec spec_;
  const Update update_;
  unsigned slab_shift_ = 0;
  uint32_t slab_mask_ = 0;
  uint64_t stripe_mask_ = 0;
  uint64_t quota_ = 0;  // rows a stripe may keep
  std::unique_ptr<Arena> arena_;
  std::vector<std::unique_ptr<Stripe>> stripes_;
  Gate gate_;
  std::atomic<uint32_t> clock_{1};
  std::atomic<uint64_t> rows_{0}, born_{0}, evicted_{0}, refused_{0}, unadmitted_{0}, contended_{0};
};

}  // namespace plsc
