// Batches on the sparse table: keys sorted by stripe, rows found under its lock, then visited, memory fetched ahead; see table.h.
#include "table.h"

#include <pthread.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <set>
#include <stdexcept>

#include "bits.h"

namespace plsc {
namespace {

constexpr size_t kChunk = 4096;          // keys worked on at a time: with slots, floats and scratch they stay in the cache
constexpr size_t kDiskChunk = 16384;     // the same where rows may have to be read from a disk, many at once
constexpr size_t kSlabBytes = 64 << 10;  // about
constexpr double kFirstLines = 32;
constexpr size_t kAhead = 16;            // rows whose lines are on their way

void prefetch_row(const char* row, size_t bytes) {  // of a row or null
  const char* const end = row + std::min<size_t>(bytes, 512);
  for (row -= reinterpret_cast<uintptr_t>(row) % 64; row < end; row += 64) __builtin_prefetch(row, 1, 3);
}

// A fork while another thread holds a lock would leave it locked in the child for ever: every table is emptied of
// callers around a fork.
struct Registry {
  std::mutex mutex;
  std::set<Table*> tables;
};

Registry& registry() {
  static Registry* const all = new Registry;  // outlives every table
  return *all;
}

void before_fork() {
  registry().mutex.lock();
  for (Table* table : registry().tables) table->gate().enter_alone();
}

void after_fork_parent() {
  for (Table* table : registry().tables) table->gate().leave_alone();
  registry().mutex.unlock();
}

void after_fork_child() {
  // The thread has another id here, so what it holds is not unlocked but made anew.
  for (Table* table : registry().tables) new (&table->gate()) Gate;
  new (&registry().mutex) std::mutex;
}

void enroll(Table* table) {
  static const int installed = pthread_atfork(before_fork, after_fork_parent, after_fork_child);
  (void)installed;
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().tables.insert(table);
}

}  // namespace

struct Table::Scratch {
  struct Item {
    uint64_t hash;
    uint64_t at;  // in the chunk
  };
  std::vector<uint64_t> hashes;  // of a chunk's keys
  std::vector<Item> items;       // the same, sorted by stripe
  std::vector<uint32_t> start, late;
  std::vector<char*> rows;
  std::vector<uintptr_t> pages;  // to be read from the arena's file
  std::vector<float> floats;
  uint32_t touched = 0;  // what is read only to have it in the cache, so that the compiler keeps the reading
  const char* seen = nullptr;  // of a batch that says when its rows were seen: four bytes a key, unaligned
};

Table::Scratch& Table::scratch() {
  static thread_local Scratch mine;
  return mine;
}

Table::Table(const TableOptions& options)
    : options_(options),
      spec_(make_spec(options.dim, options.dtype, options.rule, options.init, options.init_scale, options.seed,
                      options.counters)),
      update_(update_of(spec_)) {
  if (options.dim < 1 || options.stripes < 1 || (options.stripes & (options.stripes - 1)) != 0)
    throw std::invalid_argument("dim must be positive, stripes a power of two");
  size_t rows = 8;
  while (2 * rows * spec_.layout.stride <= kSlabBytes) rows *= 2;
  while ((size_t{1} << slab_shift_) < rows) ++slab_shift_;
  slab_mask_ = static_cast<uint32_t>(rows - 1);
  arena_ = std::make_unique<Arena>((rows * spec_.layout.stride + 63) / 64 * 64, options.arena);
  stripe_mask_ = static_cast<uint64_t>(options.stripes - 1);
  quota_ = options.max_rows / static_cast<uint64_t>(options.stripes);
  const bool counts = options.admit_after > 1;
  // Keys often come in the order that another table or a file has them in, and pile up at one end of an index that
  // keeps them in the same order and is still growing. So every table has an order of its own.
  std::random_device random;
  const uint64_t salt = mix(random() ^ (static_cast<uint64_t>(random()) << 32));
  for (int i = 0; i < options.stripes; ++i) {
    // Stripes fill alike and grow by half: spread over one and a half times the size, they do not grow all at once.
    const double lines = kFirstLines * std::pow(1.5, static_cast<double>(i) / options.stripes);
    stripes_.push_back(std::make_unique<Stripe>(static_cast<uint64_t>(lines), salt));
    if (counts) stripes_.back()->sketch.resize(options.sketch_bytes / static_cast<size_t>(options.stripes) + 1);
  }
  enroll(this);
}

Table::~Table() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().tables.erase(this);
}

// The key is not there. Whatever can fail is done before the index changes.
Slot* Table::insert(Stripe& stripe, uint64_t hash, float* floats) {
  stripe.index.make_room();
  uint32_t row;
  if (!stripe.free_rows.empty()) {
    row = stripe.free_rows.back();
    stripe.free_rows.pop_back();
  } else {
    if (stripe.rows == std::numeric_limits<uint32_t>::max()) throw std::length_error("a stripe is full; use more stripes");
    row = stripe.rows;
    if ((row >> slab_shift_) == stripe.slabs.size()) {
      stripe.slabs.reserve(stripe.slabs.size() + 1 + stripe.slabs.size() / 2);
      stripe.slabs.push_back(arena_->slab());
    }
    ++stripe.rows;
  }
  if (floats != nullptr) give_birth(spec_, unmix(hash), row_at(stripe, row), floats);
  return stripe.index.insert(hash, row + 1, clock_.load(std::memory_order_relaxed));
}

// Room for so many rows more: a file's size says how many are coming.
void Table::reserve(uint64_t rows) {
  const Alone alone(gate_);
  for (auto& stripe : stripes_) stripe->index.reserve(rows / stripes_.size());
}

// Counts a key that has no row; true once it may have one.
bool Table::admits(Stripe& stripe, uint64_t hash) {
  if (options_.admit_probability < 1.0f) {
    const float draw = uniform01(stream_of(options_.seed ^ 0x5DEECE66Dull, unmix(hash)), stripe.sightings++);
    if (draw >= options_.admit_probability) return false;
  }
  if (options_.admit_after <= 1) return true;
  uint8_t& a = stripe.sketch[scale_to(mix(hash + kGolden), stripe.sketch.size())];
  uint8_t& b = stripe.sketch[scale_to(mix(hash + 2 * kGolden), stripe.sketch.size())];
  const uint8_t least = std::min(a, b);  // conservative count-min: only the smaller one is raised
  const auto next = static_cast<uint8_t>(least < 255 ? least + 1 : 255);
  a = std::max(a, next);
  b = std::max(b, next);
  return next >= options_.admit_after;
}

// Calls work(stripe, first, end) with the part of s.items that is the stripe's, for every stripe that has one, under its
// lock. Stripes that another thread holds are left for later.
template <class Work>
void Table::by_stripe(Scratch& s, Work work) {
  const auto one = [&](size_t k) { work(*stripes_[k], s.start[k], s.start[k + 1]); };
  s.late.clear();
  for (size_t k = 0; k < stripes_.size(); ++k) {
    if (s.start[k] == s.start[k + 1]) continue;
    const std::unique_lock<std::mutex> lock(stripes_[k]->mutex, std::try_to_lock);
    if (lock.owns_lock()) {
      one(k);
    } else {
      s.late.push_back(static_cast<uint32_t>(k));
    }
  }
  for (const uint32_t k : s.late) {
    const std::lock_guard<std::mutex> lock(stripes_[k]->mutex);
    one(k);
  }
  contended_.fetch_add(s.late.size(), std::memory_order_relaxed);
}

// Rows do not move, and none goes while somebody is inside: they are found under the locks, all of the chunk, and visited
// after that, without locks in the order of the batch (Hogwild) or once more under each.
template <class Visit>
bool Table::chunk(const uint64_t* keys, size_t n, Missing missing, bool touch, size_t row_bytes, Scratch& s,
                  Visit& visit) {
  const size_t stripes = stripes_.size();
  s.start.assign(stripes + 2, 0);
  uint32_t* const next = s.start.data() + 1;
  uint64_t* const hashes = s.hashes.data();
  Scratch::Item* const items = s.items.data();
  char** const rows = s.rows.data();
  const bool sets = missing == Missing::set;
  for (size_t i = 0; i < n; ++i) {
    const uint64_t hash = hashes[i] = mix(keys[i]);
    if (sets) visit.ahead(i);
    ++next[(hash & stripe_mask_) + 1];
  }
  for (size_t k = 0; k < stripes; ++k) next[k + 1] += next[k];
  // Filling moves every stripe's place on to its end, which is where the next one begins.
  for (size_t i = 0; i < n; ++i) items[next[hashes[i] & stripe_mask_]++] = {hashes[i], i};

  bool over = false;
  uint64_t born = 0, turned_away = 0;
  const uint32_t now = clock_.load(std::memory_order_relaxed);
  const char* const seen = s.seen == nullptr ? nullptr : s.seen + 4 * visit.done;
  by_stripe(s, [&](Stripe& stripe, uint32_t first, uint32_t end) {
    stripe.index.go_on();
    Search search = stripe.index.search();
    // A loop of nothing but loads has more of them under way than software prefetches, of which a full queue loses some.
    uint32_t touched = 0;
    for (uint32_t j = first; j < end; ++j) touched += search.line_of(stripe.index.place(items[j].hash))->row;
    s.touched = touched;
    for (uint32_t j = first; j < end; ++j) {
      const auto [hash, at] = items[j];
      Slot* slot = search.find(hash, stripe.index.place(hash));
      bool newborn = false;
      if (__builtin_expect(slot == nullptr && missing != Missing::skip, 0)) {
        if (missing != Missing::admit || admits(stripe, hash)) {
          slot = insert(stripe, hash, sets ? nullptr : s.floats.data());
          search = stripe.index.search();
          newborn = true;
          rows_.fetch_add(1, std::memory_order_relaxed);
          ++born;
        } else {
          ++turned_away;
        }
      }
      rows[at] = nullptr;
      if (slot == nullptr) continue;
      if (touch) slot->seen = now;
      if (seen != nullptr) std::memcpy(&slot->seen, seen + 4 * at, 4);
      char* const row = row_at(stripe, slot->row - 1);
      if (newborn && sets) {
        visit(at, row);
      } else {
        rows[at] = row;
      }
    }
    over = over || over_quota(stripe);
  });
  born_.fetch_add(born, std::memory_order_relaxed);
  unadmitted_.fetch_add(turned_away, std::memory_order_relaxed);
  if (arena_->reads_ahead()) Arena::read_ahead(rows, n, row_bytes, s.pages);
  if (!options_.locked) {
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < n && rows[i + kAhead] != nullptr) prefetch_row(rows[i + kAhead], row_bytes);
      visit(i, rows[i]);
    }
    return over;
  }
  by_stripe(s, [&](Stripe&, uint32_t first, uint32_t end) {
    for (uint32_t j = first; j < end; ++j) {
      if (j + kAhead < n) {
        const size_t at = items[j + kAhead].at;
        if (rows[at] != nullptr) prefetch_row(rows[at], row_bytes);
        visit.ahead(at);
      }
      visit(items[j].at, rows[items[j].at]);
    }
  });
  return over;
}

// A visitor of one chunk as one of the whole batch; `beside` is what it reads or writes there, fetched ahead as well.
template <class Visit>
struct Table::Shifted {
  Visit& visit;
  size_t done;
  float* floats;
  const void* beside;
  size_t bytes;

  void operator()(size_t i, char* row) { visit(done + i, row, floats); }
  void ahead(size_t i) const {
    const char* const start = static_cast<const char*>(beside) + (done + i) * bytes;
    for (size_t at = 0; at < std::min<size_t>(bytes, 256); at += 64) __builtin_prefetch(start + at, 0, 3);
  }
};

// Calls visit(position, row or null, floats) for every key, the positions of one key in order. Fetched ahead: so many
// bytes of the row, and those of `beside`, an array of beside_bytes a key (may be null, with 0 bytes).
template <class Visit>
void Table::batch(const uint64_t* keys, size_t n, Missing missing, bool touch, size_t row_bytes, const void* beside,
                  size_t beside_bytes, Visit visit) {
  Scratch& s = scratch();
  const size_t chunk_keys = arena_->reads_ahead() ? kDiskChunk : kChunk, most = std::min(n, chunk_keys);
  if (s.items.size() < most) {
    s.hashes.resize(most);
    s.items.resize(most);
    s.rows.resize(most);
  }
  const size_t floats = 2 * static_cast<size_t>(spec_.layout.dim) + static_cast<size_t>(spec_.layout.state);
  if (s.floats.size() < floats) s.floats.resize(floats);
  for (size_t done = 0; done < n; done += chunk_keys) {
    const size_t count = std::min(chunk_keys, n - done);
    bool over = false;
    {
      const Inside inside(gate_);
      Shifted<Visit> shifted{visit, done, s.floats.data(), beside, beside_bytes};
      over = chunk(keys + done, count, missing, touch, row_bytes, s, shifted);
    }
    if (over) {
      const Alone alone(gate_);
      for (auto& stripe : stripes_) {
        if (over_quota(*stripe)) trim(*stripe);
      }
    }
  }
}

void Table::pull(const uint64_t* keys, size_t n, float* out, bool create) {
  const auto dim = static_cast<size_t>(spec_.layout.dim);
  const bool admission = options_.admit_after > 1 || options_.admit_probability < 1.0f;
  const bool plain16 = dim == 16 && spec_.layout.dtype == Dtype::fp32;
  // With admission, rows are born by pushes: else a pull and its push would count one sighting twice.
  const Missing missing = create && !admission ? Missing::create : Missing::skip;
  batch(keys, n, missing, false, spec_.layout.state_at, out, 4 * dim, [&](size_t i, const char* row, float*) {
    if (row == nullptr) {
      initial_value(spec_, keys[i], out + i * dim);
    } else if (plain16) {
      std::memcpy(out + i * 16, row, 64);
    } else {
      read_value(spec_.layout, row, out + i * dim);
    }
  });
}

template <class Step>
uint64_t Table::judge(const Pairs& pairs, uint32_t limit, Step step) {
  const auto dim = static_cast<size_t>(spec_.layout.dim);
  const auto sound = [&](size_t i, size_t n) {
    return all_below(pairs.floats + i * dim, n * dim, limit) &&
           (pairs.shows == nullptr || all_below(pairs.shows + i, n, kInfinity)) &&
           (pairs.clicks == nullptr || all_below(pairs.clicks + i, n, kInfinity));
  };
  const auto from = [](const float* x, size_t i) { return x == nullptr ? nullptr : x + i; };
  uint64_t refused = 0;
  for (size_t done = 0; done < pairs.n; done += kChunk) {
    const size_t count = std::min(kChunk, pairs.n - done);
    if (sound(done, count)) {
      refused += step({pairs.keys + done, count, pairs.floats + done * dim, from(pairs.shows, done), from(pairs.clicks, done)});
      continue;
    }
    std::vector<uint64_t> keys;
    std::vector<float> floats, shows, clicks;
    for (size_t i = done; i < done + count; ++i) {
      if (!sound(i, 1)) continue;
      keys.push_back(pairs.keys[i]);
      floats.insert(floats.end(), pairs.floats + i * dim, pairs.floats + (i + 1) * dim);
      if (pairs.shows != nullptr) shows.push_back(pairs.shows[i]);
      if (pairs.clicks != nullptr) clicks.push_back(pairs.clicks[i]);
    }
    refused += count - keys.size();
    refused += step({keys.data(), keys.size(), floats.data(), pairs.shows == nullptr ? nullptr : shows.data(),
                     pairs.clicks == nullptr ? nullptr : clicks.data()});
  }
  refused_.fetch_add(refused, std::memory_order_relaxed);
  return refused;
}

uint64_t Table::push(const uint64_t* keys, size_t n, const float* grads, const float* shows, const float* clicks,
                     float lr) {
  if (update_ == nullptr) throw std::logic_error("a custom rule's rows are gathered, stepped and scattered");
  clock_.fetch_add(1, std::memory_order_relaxed);
  const auto dim = static_cast<size_t>(spec_.layout.dim);
  return judge({keys, n, grads, shows, clicks}, gradient_limit(spec_.rule), [&](const Pairs& part) {
    uint64_t refused = 0;
    batch(part.keys, part.n, Missing::admit, true, spec_.layout.stride, part.floats, 4 * dim,
          [&](size_t i, char* row, float* floats) {
      if (row == nullptr) return;
      if (!update_(spec_, lr, row, part.floats + i * dim, floats)) {
        ++refused;
        return;
      }
      if (spec_.layout.counters) count(row, part.shows == nullptr ? 1.0f : part.shows[i], part.clicks == nullptr ? 0.0f : part.clicks[i]);
    });
    return refused;
  });
}

// Counters stay finite: an infinite one would not fade.
void Table::count(char* row, float shows, float clicks) const {
  auto* const counters = reinterpret_cast<float*>(row + spec_.layout.counters_at);
  counters[0] = bounded(counters[0] + shows, std::numeric_limits<float>::max());
  counters[1] = bounded(counters[1] + clicks, std::numeric_limits<float>::max());
}

void Table::begin_push(uint64_t refused) {
  clock_.fetch_add(1, std::memory_order_relaxed);
  refused_.fetch_add(refused, std::memory_order_relaxed);
}

void Table::gather(const uint64_t* keys, size_t n, float* values, float* state) {
  const auto dim = static_cast<size_t>(spec_.layout.dim);
  const auto width = static_cast<size_t>(spec_.layout.state);
  std::vector<char> newborn(spec_.layout.stride);
  batch(keys, n, Missing::admit, true, spec_.layout.stride, values, 4 * dim, [&](size_t i, const char* row, float* floats) {
    if (row == nullptr) {
      give_birth(spec_, keys[i], newborn.data(), floats);
      row = newborn.data();
    }
    read_value(spec_.layout, row, values + i * dim);
    if (width > 0) std::memcpy(state + i * width, row + spec_.layout.state_at, 4 * width);
  });
}

uint64_t Table::scatter(const uint64_t* keys, size_t n, const float* values, const float* state) {
  const auto dim = static_cast<size_t>(spec_.layout.dim);
  const auto width = static_cast<size_t>(spec_.layout.state);
  uint64_t refused = 0;
  batch(keys, n, Missing::skip, true, spec_.layout.stride, values, 4 * dim, [&](size_t i, char* row, float*) {
    if (row == nullptr) return;
    if (!finite(values + i * dim, dim) || !finite(state + i * width, width)) {
      ++refused;
      return;
    }
    write_value(spec_.layout, row, values + i * dim);
    if (width > 0) std::memcpy(row + spec_.layout.state_at, state + i * width, 4 * width);
    if (spec_.layout.counters) count(row, 1.0f, 0.0f);
  });
  refused_.fetch_add(refused, std::memory_order_relaxed);
  return refused;
}

void Table::assign(const uint64_t* keys, size_t n, const float* values) {
  const auto dim = static_cast<size_t>(spec_.layout.dim);
  batch(keys, n, Missing::set, true, spec_.layout.stride, values, 4 * dim, [&](size_t i, char* row, float*) {
    if (row == nullptr) return;
    write_value(spec_.layout, row, values + i * dim);
    initial_state(spec_, row);
  });
}

uint64_t Table::add(const uint64_t* keys, size_t n, const float* deltas) {
  clock_.fetch_add(1, std::memory_order_relaxed);
  const auto dim = static_cast<size_t>(spec_.layout.dim);
  return judge({keys, n, deltas, nullptr, nullptr}, kInfinity, [&](const Pairs& part) {
    uint64_t refused = 0;
    batch(part.keys, part.n, Missing::create, true, spec_.layout.stride, part.floats, 4 * dim,
          [&](size_t i, char* row, float* floats) { refused += !add_value(spec_, row, part.floats + i * dim, floats); });
    return refused;
  });
}

void Table::restore(const uint64_t* keys, size_t n, const char* seen, const char* rows) {
  const size_t stride = spec_.layout.stride;
  struct Until {
    Scratch& s;
    ~Until() { s.seen = nullptr; }
  } until{scratch()};
  until.s.seen = seen;
  batch(keys, n, Missing::set, false, stride, rows, stride, [&](size_t i, char* row, float*) {
    if (row != nullptr) std::memcpy(row, rows + stride * i, stride);
  });
}

void Table::read_counters(const uint64_t* keys, size_t n, float* out) {
  batch(keys, n, Missing::skip, false, spec_.layout.stride, nullptr, 0, [&](size_t i, const char* row, float*) {
    if (row == nullptr || !spec_.layout.counters) {
      out[2 * i] = out[2 * i + 1] = 0.0f;
    } else {
      std::memcpy(out + 2 * i, row + spec_.layout.counters_at, 8);
    }
  });
}

void Table::contains(const uint64_t* keys, size_t n, uint8_t* out) {
  batch(keys, n, Missing::skip, false, 0, nullptr, 0, [&](size_t i, const char* row, float*) { out[i] = row != nullptr; });
}

void Table::addresses(const uint64_t* keys, size_t n, uint64_t* out) {
  batch(keys, n, Missing::create, true, 0, nullptr, 0,
        [&](size_t i, const char* row, float*) { out[i] = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(row)); });
}

}  // namespace plsc
