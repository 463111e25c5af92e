// What becomes of rows later: erased, evicted by age, score or bound, faded, counted, listed; see table.h.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "table.h"

namespace plsc {

void Table::remove(Stripe& stripe, const Slot& slot) {
  stripe.free_rows.push_back(slot.row - 1);
  stripe.index.remove(slot.hash);
}

uint64_t Table::erase(const uint64_t* keys, size_t n) {
  uint64_t erased = 0;
  const Alone alone(gate_);  // nobody holds a pointer to a row that goes
  for (size_t i = 0; i < n; ++i) {
    const uint64_t hash = mix(keys[i]);
    Stripe& stripe = stripe_of(hash);
    const Slot* slot = stripe.index.find(hash);
    if (slot == nullptr) continue;
    remove(stripe, *slot);
    ++erased;
  }
  rows_.fetch_sub(erased, std::memory_order_relaxed);
  evicted_.fetch_add(erased, std::memory_order_relaxed);
  return erased;
}

uint64_t Table::remove_where(Stripe& stripe, const std::function<bool(const Slot&, const char*)>& goes) {
  // Removing moves slots back, past the one looked at: keys are collected first.
  std::vector<uint64_t> hashes;
  stripe.index.visit([&](const Slot& slot) {
    if (goes(slot, row_at(stripe, slot.row - 1))) hashes.push_back(slot.hash);
  });
  for (const uint64_t hash : hashes) remove(stripe, *stripe.index.find(hash));
  rows_.fetch_sub(hashes.size(), std::memory_order_relaxed);
  evicted_.fetch_add(hashes.size(), std::memory_order_relaxed);
  return hashes.size();
}

// Brings a stripe an eighth below its quota: what is worth least goes, ties by hash.
uint64_t Table::trim(Stripe& stripe) {
  struct Worth {
    float shows;
    uint32_t age;
    uint64_t hash;
    bool operator<(const Worth& o) const {
      if (shows != o.shows) return shows < o.shows;
      return age != o.age ? age > o.age : hash < o.hash;
    }
  };
  const uint32_t now = clock_.load(std::memory_order_relaxed);
  const auto worth = [&](const Slot& slot, const char* row) {
    float shows = 0.0f;
    if (options_.least_shown) std::memcpy(&shows, row + spec_.layout.counters_at, 4);
    return Worth{shows, now - slot.seen, slot.hash};
  };
  std::vector<Worth> all;
  all.reserve(stripe.index.count());
  stripe.index.visit([&](const Slot& slot) { all.push_back(worth(slot, row_at(stripe, slot.row - 1))); });
  const uint64_t goal = quota_ - quota_ / 8;
  const auto last = all.begin() + static_cast<std::ptrdiff_t>(stripe.index.count() - goal);
  std::nth_element(all.begin(), last, all.end());
  const Worth bound = *last;
  return remove_where(stripe, [&](const Slot& slot, const char* row) { return worth(slot, row) < bound; });
}

uint64_t Table::evict(int64_t max_age, float min_score, float show_weight, float click_weight) {
  uint64_t gone = 0;
  const Layout& layout = spec_.layout;
  for (auto& stripe : stripes_) {
    const Alone alone(gate_);  // a stripe at a time, so that training pauses briefly only
    const uint32_t now = clock_.load(std::memory_order_relaxed);
    gone += remove_where(*stripe, [&](const Slot& slot, const char* row) {
      if (max_age >= 0 && static_cast<int64_t>(now - slot.seen) > max_age) return true;
      if (!layout.counters || std::isnan(min_score)) return false;
      float counters[2];
      std::memcpy(counters, row + layout.counters_at, 8);
      return show_weight * counters[0] + click_weight * counters[1] < min_score;
    });
  }
  return gone;
}

void Table::decay(float factor) {
  if (!spec_.layout.counters) return;
  for (auto& stripe : stripes_) {
    const Alone alone(gate_);
    stripe->index.visit([&](const Slot& slot) {
      auto* const counters = reinterpret_cast<float*>(row_at(*stripe, slot.row - 1) + spec_.layout.counters_at);
      counters[0] *= factor;
      counters[1] *= factor;
    });
  }
}

void Table::stripe_rows(int index, std::vector<uint64_t>& keys, std::vector<float>& values, std::vector<float>& state) {
  const Inside inside(gate_);
  Stripe& stripe = *stripes_.at(static_cast<size_t>(index));
  const std::lock_guard<std::mutex> lock(stripe.mutex);
  const auto dim = static_cast<size_t>(spec_.layout.dim);
  const auto width = static_cast<size_t>(spec_.layout.state);
  keys.resize(stripe.index.count());
  values.resize(keys.size() * dim);
  state.resize(keys.size() * width);
  size_t i = 0;
  stripe.index.visit([&](const Slot& slot) {
    const char* const row = row_at(stripe, slot.row - 1);
    keys[i] = slot.key();
    read_value(spec_.layout, row, values.data() + i * dim);
    if (width > 0) std::memcpy(state.data() + i * width, row + spec_.layout.state_at, 4 * width);
    ++i;
  });
}

uint64_t Table::tick() {
  const Alone alone(gate_);  // calls under way have ended: what they touched is older than the new time
  return ++clock_;
}

TableStats Table::stats() {
  const Inside inside(gate_);
  TableStats stats;
  stats.rows = size();
  stats.born = born_.load(std::memory_order_relaxed);
  stats.evicted = evicted_.load(std::memory_order_relaxed);
  stats.refused = refused_.load(std::memory_order_relaxed);
  stats.unadmitted = unadmitted_.load(std::memory_order_relaxed);
  stats.contended = contended_.load(std::memory_order_relaxed);
  stats.clock = clock_.load(std::memory_order_relaxed);
  stats.payload_bytes = stats.rows * spec_.layout.stride;
  stats.arena_bytes = arena_->bytes();
  for (auto& stripe : stripes_) {
    const std::lock_guard<std::mutex> lock(stripe->mutex);
    stats.index_bytes += stripe->index.bytes();
  }
  return stats;
}

}  // namespace plsc
