// The table's core without Python, for the compiler's sanitizers: threads, growth, eviction, forks of the road on disk.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "bits.h"
#include "table.h"

using namespace plsc;

namespace {

#define CHECK(what)                                                   \
  do {                                                                \
    if (!(what)) {                                                    \
      std::fprintf(stderr, "line %d: not true: %s\n", __LINE__, #what); \
      std::exit(1);                                                   \
    }                                                                 \
  } while (false)

TableOptions options(int dim, RuleKind rule) {
  TableOptions o;
  o.dim = dim;
  o.rule.kind = rule;
  o.stripes = 8;
  o.init = Init::zeros;
  return o;
}

void parallel(int threads, void (*work)(Table&, uint64_t), Table& table) {
  std::vector<std::thread> all;
  for (int i = 0; i < threads; ++i) all.emplace_back(work, std::ref(table), static_cast<uint64_t>(i));
  for (std::thread& thread : all) thread.join();
}

// An index that begins with one line grows through many sizes while keys come and go. Some live at the end of it, so
// that runs go on at the beginning.
void index_against_map() {
  std::unordered_map<uint64_t, uint32_t> expected;
  Index index(1, 1);  // places are hashes
  std::vector<uint64_t> keys;
  for (uint64_t i = 0; i < 4000; ++i) keys.push_back(i % 9 == 0 ? unmix(~uint64_t{0} - i) : i);
  CHECK(mix(unmix(12345)) == 12345);
  uint64_t random = 1;
  for (uint32_t turn = 0; turn < 60000; ++turn) {
    random = mix(random + kGolden);
    const uint64_t key = keys[random % std::min<size_t>(keys.size(), 16 + turn / 8)];
    const uint64_t hash = mix(key);
    Slot* const slot = index.find(hash);
    const auto known = expected.find(key);
    CHECK((slot != nullptr) == (known != expected.end()));
    if (slot != nullptr) CHECK(slot->row == known->second && slot->key() == key);
    if (slot == nullptr) {
      index.make_room();
      index.insert(hash, turn + 1, 0);
      expected[key] = turn + 1;
    } else if (random % 16 < 7) {
      index.remove(hash);
      expected.erase(known);
    }
    if (turn % 9001 == 9000) index.settle();
    CHECK(index.count() == expected.size());
    if (turn % 1000 != 999) continue;
    uint64_t seen = 0;  // of the arrays that it has while it grows, too
    index.visit([&](const Slot& slot) {
      ++seen;
      CHECK(expected.at(slot.key()) == slot.row);
    });
    CHECK(seen == expected.size());
  }
  CHECK(expected.size() > 500);
}

// Sums of small whole numbers are exact in floats.
void sums_under_locks() {
  TableOptions o = options(3, RuleKind::sgd);
  o.locked = true;
  Table table(o);
  parallel(4, [](Table& t, uint64_t me) {
    std::vector<uint64_t> keys(700);
    std::vector<float> grads(2100, 1.0f), rows(2100);
    for (uint64_t turn = 0; turn < 20; ++turn) {
      for (size_t i = 0; i < keys.size(); ++i) keys[i] = mix(me * 7919 + turn * 131 + i) % 500;
      t.push(keys.data(), keys.size(), grads.data(), nullptr, nullptr, 1.0f);
      t.pull(keys.data(), keys.size(), rows.data(), true);
    }
  }, table);
  double sum = 0;
  for (uint64_t key = 0; key < 500; ++key) {
    float row[3];
    table.pull(&key, 1, row, false);
    CHECK(row[0] == row[1] && row[1] == row[2]);
    sum += static_cast<double>(row[0]);
  }
  CHECK(sum == -4.0 * 20 * 700);
}

// Without locks on floats, the index is still shared by all; the floats here are each thread's own.
void index_without_locks_on_floats() {
  Table table(options(5, RuleKind::adam));
  parallel(4, [](Table& t, uint64_t me) {
    std::vector<uint64_t> keys(900);
    std::vector<float> grads(4500, 0.5f), rows(4500);
    for (uint64_t turn = 0; turn < 8; ++turn) {
      for (size_t i = 0; i < keys.size(); ++i) keys[i] = 4 * (turn * 500 + i) + me;
      t.push(keys.data(), keys.size(), grads.data(), nullptr, nullptr, 0.1f);
      t.pull(keys.data(), keys.size(), rows.data(), true);
      for (const float x : rows) CHECK(x < 0.0f);
    }
  }, table);
  CHECK(table.size() == 4 * 4400);
}

// Everything at once: births, a bound, erasures, evictions, counters, saves.
void life(const std::string& folder, Dtype dtype) {
  TableOptions o = options(4, RuleKind::adagrad);
  o.locked = true;
  o.counters = true;
  o.dtype = dtype;
  o.max_rows = 1000;
  Table table(o);
  static std::string path;
  path = folder + "/life";
  parallel(4, [](Table& t, uint64_t me) {
    std::vector<uint64_t> keys(300);
    std::vector<float> grads(1200, 0.25f), rows(1200);
    for (uint64_t turn = 0; turn < 12; ++turn) {
      for (size_t i = 0; i < keys.size(); ++i) keys[i] = mix(me + 31 * turn + 977 * i) % 3000;
      t.push(keys.data(), keys.size(), grads.data(), nullptr, nullptr, 0.1f);
      t.pull(keys.data(), keys.size(), rows.data(), turn % 2 == 0);
      if (me == 0) t.erase(keys.data(), 40);
      if (me == 1) t.evict(20, 0.5f, 1.0f, 1.0f);
      if (me == 2) t.decay(0.9f);
      if (me == 3) t.save(path, "{}", 0);
      t.stats();
    }
  }, table);
  CHECK(table.size() <= 1000);
  const uint64_t saved = table.save(path, "{}", 0);
  CHECK(saved == table.size());
  TableOptions other = o;
  other.stripes = 2;
  other.max_rows = 0;
  Table loaded(other);
  CHECK(loaded.load(path) == saved && loaded.size() == saved);
  for (uint64_t key = 0; key < 3000; ++key) {
    float a[4], b[4];
    table.pull(&key, 1, a, false);
    loaded.pull(&key, 1, b, false);
    for (int d = 0; d < 4; ++d) CHECK(a[d] == b[d]);
  }
}

void rows_in_a_file(const std::string& folder) {
  TableOptions o = options(64, RuleKind::momentum);
  o.arena = folder;
  Table table(o);
  std::vector<uint64_t> keys(3000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i * 3;
  std::vector<float> grads(keys.size() * 64, 1.0f);
  table.push(keys.data(), keys.size(), grads.data(), nullptr, nullptr, 1.0f);
  std::vector<float> rows(grads.size());
  table.pull(keys.data(), keys.size(), rows.data(), false);
  for (const float x : rows) CHECK(x == -1.0f);
}

void admission() {
  TableOptions o = options(1, RuleKind::ftrl);
  o.admit_after = 3;
  Table table(o);
  const uint64_t keys[2] = {0, ~uint64_t{0}};
  const float grads[2] = {1.0f, 1.0f};
  for (int i = 0; i < 2; ++i) table.push(keys, 2, grads, nullptr, nullptr, 0.1f);
  CHECK(table.size() == 0);
  table.push(keys, 2, grads, nullptr, nullptr, 0.1f);
  CHECK(table.size() == 2);
}

// Bit by bit, as the polynomial is defined.
uint32_t crc32_by_bits(uint32_t crc, const unsigned char* at, size_t size) {
  crc = ~crc;
  for (size_t i = 0; i < 8 * size; ++i) {
    const uint32_t bit = (crc ^ (static_cast<uint32_t>(at[i / 8]) >> (i % 8))) & 1u;
    crc = (crc >> 1) ^ (bit != 0 ? 0xEDB88320u : 0u);
  }
  return ~crc;
}

void checksum() {
  CHECK(crc32(0, "123456789", 9) == 0xCBF43926u);
  std::vector<unsigned char> bytes(700);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(mix(i));
  for (size_t size = 0; size < 600; ++size) {
    const unsigned char* const start = bytes.data() + size % 17;
    const uint32_t whole = crc32(0, start, size);
    CHECK(whole == crc32_by_bits(0, start, size));
    CHECK(whole == crc32(crc32(0, start, size / 3), start + size / 3, size - size / 3));
  }
}

// A file of many blocks is read by several threads, into a table that others use.
void load_of_many_blocks(const std::string& folder) {
  TableOptions o = options(16, RuleKind::adagrad);
  o.init = Init::uniform;
  Table table(o);
  std::vector<uint64_t> keys(90000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = mix(i);
  std::vector<float> grads(16 * keys.size(), 0.5f), a(grads.size()), b(grads.size());
  table.push(keys.data(), keys.size(), grads.data(), nullptr, nullptr, 0.1f);
  table.pull(keys.data(), keys.size(), a.data(), false);
  const std::string path = folder + "/many";
  CHECK(table.save(path, "{}", 0) == keys.size());
  for (const int stripes : {1, 8, 64}) {
    o.stripes = stripes;
    Table loaded(o);
    std::thread other([&] {
      std::vector<float> rows(16 * 100);
      for (int turn = 0; turn < 50; ++turn) loaded.pull(keys.data() + 1700 * turn, 100, rows.data(), false);
    });
    CHECK(loaded.load(path) == keys.size() && loaded.size() == keys.size());
    other.join();
    loaded.pull(keys.data(), keys.size(), b.data(), false);
    CHECK(a == b);
  }
}

}  // namespace

int main(int, char** argv) {
  const std::string folder = argv[1];
  checksum();
  index_against_map();
  sums_under_locks();
  index_without_locks_on_floats();
  life(folder, Dtype::fp32);
  life(folder, Dtype::fp16);
  rows_in_a_file(folder);
  load_of_many_blocks(folder);
  admission();
  std::puts("all true");
}
