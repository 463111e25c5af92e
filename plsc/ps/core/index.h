// Where a stripe's rows are: open addressing with linear probing over slots, grown a few slots at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arena.h"
#include "bits.h"

namespace plsc {

struct Slot {
  uint64_t hash;  // mix() of the key: no two keys have the same, so it stands for the key
  uint32_t row;   // row number + 1; 0: free
  uint32_t seen;  // the table's clock when the row was born or last pushed to

  uint64_t key() const { return unmix(hash); }
};
constexpr uint64_t kLine = 4;    // slots a cache line
constexpr uint64_t kGoOn = 256;  // slots that a batch moves on in a stripe that grows
static_assert(sizeof(Slot) * kLine == 64, "a line of slots is a cache line");

// An array of lines of slots, all free at first. A key's home is the start of a line, from where the first free slot is
// taken: in every line the free slots are the last ones.
struct Lines {
  Slot* slots = nullptr;
  uint64_t count = 0;

  Slot& operator[](uint64_t i) const { return slots[i]; }
  uint64_t capacity() const { return count * kLine; }
  // Places keep their order, so an array of another size is filled in one sweep over this one.
  uint64_t home(uint64_t place) const { return scale_to(place, count) * kLine; }
  uint64_t after(uint64_t i) const {
    if (__builtin_expect(i + 1 == capacity(), 0)) return 0;
    return i + 1;
  }
};

// What a search reads of an index, to be copied out of it for a loop: good until the index changes.
struct Search {
  Lines now, old;       // while an index grows there are two arrays
  uint64_t start = 0;  // in old: just after a free slot
  uint64_t front = 0;  // slots from start on that were moved; where it stands there is a gap before it

  uint64_t distance(uint64_t home) const { return home >= start ? home - start : home + old.capacity() - start; }
  const Lines& where(uint64_t place) const {
    if (__builtin_expect(old.count == 0, 1)) return now;
    return distance(old.home(place)) < front ? now : old;
  }
  // The line that a search begins with.
  const Slot* line_of(uint64_t place) const {
    const Lines& lines = where(place);
    return &lines[lines.home(place)];
  }
  Slot* find(uint64_t hash, uint64_t place) const {
    const Lines& lines = where(place);
    for (uint64_t at = lines.home(place);; at = lines.after(at + kLine - 1)) {
      // All four are compared at once: where in the line a key is cannot be foretold, that it is there can. Free slots
      // keep the hash of before, but come last, so the first one that is equal decides.
      Slot* const line = &lines[at];
      unsigned found = 0;
      for (unsigned i = 0; i < kLine; ++i) found |= static_cast<unsigned>(line[i].hash == hash) << i;
      if (found != 0 && line[__builtin_ctz(found)].row != 0) return line + __builtin_ctz(found);
      if (line[kLine - 1].row == 0) return nullptr;
    }
  }
};

// The slots of one stripe. While it grows there are two arrays, and every insertion moves some slots to the new one:
// those whose home lies before a front that goes around the old array, from one gap between runs of slots to the next.
class Index {
 public:
  // `lines` to begin with; indexes that begin with different numbers do not grow at the same time. `salt` makes the
  // order that keys are kept in another one.
  Index(uint64_t lines, uint64_t salt) : salt_(salt | 1) { use(Block(lines * sizeof(Slot) * kLine), lines); }

  // Where a key of this hash belongs, whatever the size.
  uint64_t place(uint64_t hash) const { return hash * salt_; }
  Search search() const { return search_; }
  Slot* find(uint64_t hash) const { return search_.find(hash, place(hash)); }
  // Makes room for one more: what can fail of an insertion.
  void make_room();
  // Room for so many more at once, in one go.
  void reserve(uint64_t more);
  // The key is not there and make_room() came before.
  Slot* insert(uint64_t hash, uint32_t row, uint32_t seen);
  // Takes a slot out and moves later ones of its run back over it, so that no probe meets a gap.
  void remove(uint64_t hash);
  // Brings a growth under way nearer to its end: it would wait there for insertions, with two arrays to search.
  void go_on() {
    if (__builtin_expect(search_.old.count != 0, 0)) advance(kGoOn);
  }
  // Ends a growth under way: afterwards all slots are in one array.
  void settle();
  template <class Visit>
  void visit(Visit one) const {
    for (const Lines& slots : {search_.now, search_.old}) {
      for (uint64_t at = 0; at < slots.capacity(); ++at) {
        if (slots[at].row != 0) one(slots[at]);
      }
    }
  }
  uint64_t count() const { return count_; }
  size_t bytes() const { return now_block_.size() + old_block_.size(); }

 private:
  const Lines& slots() const { return search_.now; }
  uint64_t place_of(const Slot& slot) const { return place(slot.hash); }
  static Slot* put(const Lines& slots, uint64_t place, const Slot& slot);
  void use(Block block, uint64_t lines);
  void advance(uint64_t steps);

  uint64_t salt_;
  Search search_;
  Block now_block_, old_block_;  // that hold its arrays
  uint64_t count_ = 0;
};

}  // namespace plsc
