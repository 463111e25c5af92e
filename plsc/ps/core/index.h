// Where a stripe's rows are: open addressing with linear probing over slots, grown a few slots at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arena.h"
#include "bits.h"

namespace plsc {

struct Slot {
  uint64_t key;
  uint32_t row;   // row number + 1; 0: free
  uint32_t seen;  // the table's clock when the row was born or last pushed to
};
constexpr uint64_t kLine = 4;  // slots a cache line
static_assert(sizeof(Slot) * kLine == 64, "a line of slots is a cache line");

// An array of lines of slots, all free at first. A key's home is the start of a line, from where the first free slot is
// taken: in every line the free slots are the last ones.
class Slots {
 public:
  Slots() = default;
  explicit Slots(uint64_t lines)
      : block_(lines * kLine * sizeof(Slot)), slots_(static_cast<Slot*>(block_.data())), capacity_(lines * kLine) {}

  Slot& operator[](uint64_t i) const { return slots_[i]; }
  uint64_t capacity() const { return capacity_; }
  // Places keep their order, so an array of another size is filled in one sweep over this one.
  uint64_t home(uint64_t place) const { return scale_to(place, capacity_ / kLine) * kLine; }
  uint64_t after(uint64_t i) const {
    if (__builtin_expect(i + 1 == capacity_, 0)) return 0;
    return i + 1;
  }
  size_t bytes() const { return block_.size(); }

 private:
  Block block_;
  Slot* slots_ = nullptr;
  uint64_t capacity_ = 0;
};

// The slots of one stripe. While it grows there are two arrays, and every insertion moves some slots to the new one:
// those whose home lies before a front that goes around the old array, from one gap between runs of slots to the next.
class Index {
 public:
  // `lines` to begin with; indexes that begin with different numbers do not grow at the same time. `salt` makes the
  // order that keys are kept in another one.
  Index(uint64_t lines, uint64_t salt) : salt_(salt | 1), now_(lines) {}

  Slot* find(uint64_t key, uint64_t hash) const {
    const uint64_t place = hash * salt_;
    const Slots& slots = where(place);
    for (uint64_t at = slots.home(place);; at = slots.after(at + kLine - 1)) {
      // All four are compared at once: where in the line a key is cannot be foretold, that it is there can.
      Slot* const line = &slots[at];
      unsigned found = 0;
      for (unsigned i = 0; i < kLine; ++i) {
        found |= (static_cast<unsigned>(line[i].key == key) & static_cast<unsigned>(line[i].row != 0)) << i;
      }
      if (found != 0) return line + __builtin_ctz(found);
      if (line[kLine - 1].row == 0) return nullptr;
    }
  }
  // The line that a search begins with, to be fetched ahead by the caller: GCC drops calls that do nothing but fetch.
  const Slot* line_of(uint64_t hash) const {
    const uint64_t place = hash * salt_;
    const Slots& slots = where(place);
    return &slots[slots.home(place)];
  }
  // Makes room for one more: what can fail of an insertion.
  void make_room();
  // Room for so many more at once, in one go.
  void reserve(uint64_t more);
  // The key is not there and make_room() came before.
  Slot* insert(uint64_t key, uint64_t hash, uint32_t row, uint32_t seen);
  // Takes a slot out and moves later ones of its run back over it, so that no probe meets a gap.
  void remove(uint64_t key, uint64_t hash);
  // Ends a growth under way: afterwards all slots are in one array, which visit() goes through.
  void settle();
  template <class Visit>
  void visit(Visit one) const {  // after settle()
    for (uint64_t at = 0; at < now_.capacity(); ++at) {
      if (now_[at].row != 0) one(now_[at]);
    }
  }
  const Slots& slots() const { return now_; }  // after settle()
  uint64_t count() const { return count_; }
  size_t bytes() const { return now_.bytes() + old_.bytes(); }

 private:
  const Slots& where(uint64_t place) const {
    if (old_.capacity() == 0) return now_;
    return distance(old_.home(place)) < front_ ? now_ : old_;
  }
  uint64_t place_of(const Slot& slot) const { return mix(slot.key) * salt_; }
  uint64_t distance(uint64_t home) const { return home >= start_ ? home - start_ : home + old_.capacity() - start_; }
  static Slot* put(const Slots& slots, uint64_t place, const Slot& slot);
  void advance(uint64_t steps);

  uint64_t salt_;
  Slots now_, old_;
  uint64_t count_ = 0;
  uint64_t start_ = 0;  // in old_: just after a free slot
  uint64_t front_ = 0;  // slots from start_ on that were moved; where it stands there is a gap before it
};

}  // namespace plsc
