// Growth of a stripe's index, insertion and removal; see index.h.
#include "index.h"

#include <utility>

namespace plsc {
namespace {

constexpr uint64_t kMoved = 32;  // slots that one insertion moves on: growth ends long before the old array is full

}  // namespace

Slot* Index::put(const Lines& slots, uint64_t place, const Slot& slot) {
  uint64_t at = slots.home(place);
  while (slots[at].row != 0) at = slots.after(at);
  slots[at] = slot;
  return &slots[at];
}

void Index::use(Block block, uint64_t lines) {
  now_block_ = std::move(block);
  search_.now = {static_cast<Slot*>(now_block_.data()), lines};
}

void Index::make_room() {
  if (search_.old.count != 0) advance(kMoved);
  if ((count_ + 1) * 5 <= slots().capacity() * 4) return;
  settle();
  const uint64_t lines = slots().count + slots().count / 2 + 1;
  Block larger(lines * kLine * sizeof(Slot));
  old_block_ = std::move(now_block_);
  Lines& old = search_.old;
  old = search_.now;
  use(std::move(larger), lines);
  uint64_t start = 0;
  while (old[start + kLine - 1].row != 0) start += kLine;  // a fifth of the slots is free
  search_.start = old.after(start + kLine - 1);
  search_.front = 0;
  // From the start on, so that the front is always ahead of runs that go on past the start.
  advance(kMoved);
}

void Index::reserve(uint64_t more) {
  const uint64_t wanted = (count_ + more) * 4 / 3 / kLine + 1;
  if (more == 0 || slots().count >= wanted) return;
  settle();
  Block block(wanted * kLine * sizeof(Slot));
  const Lines larger{static_cast<Slot*>(block.data()), wanted};
  visit([&](const Slot& slot) { put(larger, place_of(slot), slot); });
  use(std::move(block), wanted);
}

Slot* Index::insert(uint64_t hash, uint32_t row, uint32_t seen) {
  ++count_;
  return put(search_.where(place(hash)), place(hash), {hash, row, seen});
}

// Moves whole runs, so that the front stands in a gap again.
void Index::advance(uint64_t steps) {
  Search& s = search_;
  const uint64_t capacity = s.old.capacity();
  uint64_t at = s.start + s.front;
  if (at >= capacity) at -= capacity;
  while (s.front < capacity) {
    Slot& slot = s.old[at];
    if (slot.row == 0) {
      if (steps == 0) return;
    } else {
      put(s.now, place_of(slot), slot);
      slot.row = 0;
    }
    ++s.front;
    at = s.old.after(at);
    steps -= steps > 0 ? 1 : 0;
  }
  // The last run may have gone on past the start.
  for (; s.old[at].row != 0; at = s.old.after(at)) put(s.now, place_of(s.old[at]), s.old[at]);
  s.old = {};
  old_block_ = Block();
}

void Index::settle() {
  if (search_.old.count != 0) advance(search_.old.capacity());
}

void Index::remove(uint64_t hash) {
  const Lines& slots = search_.where(place(hash));
  uint64_t hole = slots.home(place(hash));
  while (slots[hole].hash != hash || slots[hole].row == 0) hole = slots.after(hole);
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
