// Growth of a stripe's index, insertion and removal; see index.h.
#include "index.h"

#include <utility>

namespace plsc {
namespace {

constexpr uint64_t kMoved = 32;  // slots that one insertion moves on: growth ends long before the old array is full

}  // namespace

Slot* Index::put(const Slots& slots, uint64_t place, const Slot& slot) {
  uint64_t at = slots.home(place);
  while (slots[at].row != 0) at = slots.after(at);
  slots[at] = slot;
  return &slots[at];
}

void Index::make_room() {
  if (old_.capacity() != 0) advance(kMoved);
  if ((count_ + 1) * 5 <= now_.capacity() * 4) return;
  settle();
  const uint64_t lines = now_.capacity() / kLine;
  Slots larger(lines + lines / 2 + 1);
  old_ = std::move(now_);
  now_ = std::move(larger);
  start_ = front_ = 0;
  while (old_[start_ + kLine - 1].row != 0) start_ += kLine;  // a fifth of the slots is free
  start_ = old_.after(start_ + kLine - 1);
  // From the start on, so that the front is always ahead of runs that go on past the start.
  advance(kMoved);
}

void Index::reserve(uint64_t more) {
  const uint64_t wanted = (count_ + more) * 4 / 3 / kLine + 1;
  if (more == 0 || now_.capacity() >= wanted * kLine) return;
  settle();
  Slots larger(wanted);
  visit([&](const Slot& slot) { put(larger, place_of(slot), slot); });
  now_ = std::move(larger);
}

Slot* Index::insert(uint64_t key, uint64_t hash, uint32_t row, uint32_t seen) {
  ++count_;
  const uint64_t place = hash * salt_;
  return put(where(place), place, {key, row, seen});
}

// Moves whole runs, so that the front stands in a gap again.
void Index::advance(uint64_t steps) {
  const uint64_t capacity = old_.capacity();
  uint64_t at = start_ + front_;
  if (at >= capacity) at -= capacity;
  while (front_ < capacity) {
    Slot& slot = old_[at];
    if (slot.row == 0) {
      if (steps == 0) return;
    } else {
      put(now_, place_of(slot), slot);
      slot.row = 0;
    }
    ++front_;
    at = old_.after(at);
    steps -= steps > 0 ? 1 : 0;
  }
  // The last run may have gone on past the start.
  for (; old_[at].row != 0; at = old_.after(at)) put(now_, place_of(old_[at]), old_[at]);
  old_ = Slots();
}

void Index::settle() {
  if (old_.capacity() != 0) advance(old_.capacity());
}

void Index::remove(uint64_t key, uint64_t hash) {
  const uint64_t place = hash * salt_;
  const Slots& slots = where(place);
  uint64_t hole = slots.home(place);
  while (slots[hole].key != key || slots[hole].row == 0) hole = slots.after(hole);
  uint64_t at = hole;
  for (;;) {
    at = slots.after(at);
    if (slots[at].row == 0) break;
    const uint64_t wants = slots.home(place_of(slots[at]));
    const bool stays = hole <= at ? (hole < wants && wants <= at) : (hole < wants || wants <= at);
    if (stays) continue;
    slots[hole] = slots[at];
    hole = at;
  }
  slots[hole].row = 0;
  --count_;
}

}  // namespace plsc
