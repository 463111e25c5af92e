// The core as a Python module, by nanobind: arrays in and out without copies, the GIL released while the table works.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <stdexcept>
#include <system_error>
#include <utility>
#include <vector>

#include "merge.h"
#include "skipgram_module.h"
#include "table.h"

namespace nb = nanobind;
using plsc::Table;

namespace {

template <class T>
using In = nb::ndarray<const T, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

void expect(size_t got, size_t wanted, const char* what) {
  // The Python face checks what its callers give; this keeps a slip there from writing past an array.
  if (got != wanted) throw std::invalid_argument(std::string(what) + " has " + std::to_string(got) + " elements, expected " + std::to_string(wanted));
}

template <class T>
nb::object owned(std::vector<T>&& data) {
  auto kept = std::make_unique<std::vector<T>>(std::move(data));
  T* const start = kept->data();
  const size_t size = kept->size();
  nb::capsule owner(kept.release(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(start, {size}, owner));
}

template <class T>
T choose(const std::string& name, std::initializer_list<std::pair<const char*, T>> known) {
  for (const auto& [word, value] : known) {
    if (name == word) return value;
  }
  throw std::invalid_argument("unknown word " + name);
}

template <class T>
T get(const nb::dict& options, const char* name) {
  return nb::cast<T>(options[name]);
}

plsc::TableOptions read_options(const nb::dict& o) {
  using plsc::Dtype, plsc::Init, plsc::RuleKind;
  plsc::TableOptions t;
  t.dim = get<int>(o, "dim");
  t.dtype = choose<Dtype>(get<std::string>(o, "dtype"), {{"fp32", Dtype::fp32}, {"fp16", Dtype::fp16}, {"bf16", Dtype::bf16}});
  t.init = choose<Init>(get<std::string>(o, "init"), {{"zeros", Init::zeros}, {"constant", Init::constant}, {"uniform", Init::uniform}, {"normal", Init::normal}});
  t.init_scale = get<float>(o, "init_scale");
  t.seed = get<uint64_t>(o, "seed");
  t.locked = get<bool>(o, "locked");
  t.stripes = get<int>(o, "stripes");
  t.arena = get<std::string>(o, "arena");
  t.counters = get<bool>(o, "counters");
  t.admit_after = get<uint32_t>(o, "admit_after");
  t.admit_probability = get<float>(o, "admit_probability");
  t.max_rows = get<uint64_t>(o, "max_rows");
  t.least_shown = get<bool>(o, "least_shown");
  const auto r = get<nb::dict>(o, "rule");
  t.rule.kind = choose<RuleKind>(get<std::string>(r, "kind"),
                                 {{"sgd", RuleKind::sgd}, {"momentum", RuleKind::momentum}, {"adagrad", RuleKind::adagrad},
                                  {"row_adagrad", RuleKind::row_adagrad}, {"adam", RuleKind::adam}, {"adamw", RuleKind::adamw}, {"ftrl", RuleKind::ftrl},
                                  {"user", RuleKind::user}, {"custom", RuleKind::custom}});
  const std::pair<const char*, float*> numbers[] = {
      {"weight_decay", &t.rule.weight_decay}, {"clip_norm", &t.rule.clip_norm}, {"clip_value", &t.rule.clip_value},
      {"momentum", &t.rule.momentum}, {"eps", &t.rule.eps}, {"initial", &t.rule.initial}, {"beta1", &t.rule.beta1},
      {"beta2", &t.rule.beta2}, {"beta", &t.rule.beta}, {"l1", &t.rule.l1}, {"l2", &t.rule.l2}};
  for (const auto& [name, number] : numbers) {
    if (r.contains(name)) *number = get<float>(r, name);
  }
  if (r.contains("custom_state")) t.rule.custom_state = get<int>(r, "custom_state");
  if (r.contains("step")) t.rule.step = reinterpret_cast<plsc::UserStep>(get<uintptr_t>(r, "step"));
  if (r.contains("args")) t.rule.args = get<std::vector<float>>(r, "args");
  return t;
}

}  // namespace

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // a table that a thread of the user's still holds when Python ends is no leak
  bind_skipgram(m);
  m.def("unique_keys", [](In<uint64_t> keys, Out<uint64_t> unique, Out<int64_t> at) {
    expect(unique.size(), keys.size(), "unique");
    expect(at.size(), keys.size(), "at");
    const nb::gil_scoped_release release;
    return plsc::unique_keys(keys.data(), keys.size(), unique.data(), at.data());
  });
  m.def("sum_rows", [](In<int64_t> at, In<float> rows, size_t dim, Out<float> sums) {
    expect(rows.size(), at.size() * dim, "rows");
    const nb::gil_scoped_release release;
    plsc::sum_rows(at.data(), rows.data(), at.size(), dim, sums.data());
  });
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const std::system_error& e) {
      PyObject* const args = Py_BuildValue("(is)", e.code().value(), e.what());
      PyErr_SetObject(PyExc_OSError, args);
      Py_XDECREF(args);
    }
  });

  nb::class_<Table>(m, "Core")
      .def("__init__", [](Table* self, const nb::dict& options) { new (self) Table(read_options(options)); })
      .def("pull",
           [](Table& t, In<uint64_t> keys, Out<float> out, bool create) {
             expect(out.size(), keys.size() * static_cast<size_t>(t.layout().dim), "out");
             const nb::gil_scoped_release release;
             t.pull(keys.data(), keys.size(), out.data(), create);
           })
      .def(
          "push",
          [](Table& t, In<uint64_t> keys, In<float> grads, std::optional<In<float>> shows, std::optional<In<float>> clicks, float lr) {
            expect(grads.size(), keys.size() * static_cast<size_t>(t.layout().dim), "grads");
            if (shows) expect(shows->size(), keys.size(), "shows");
            if (clicks) expect(clicks->size(), keys.size(), "clicks");
            const nb::gil_scoped_release release;
            return t.push(keys.data(), keys.size(), grads.data(), shows ? shows->data() : nullptr,
                          clicks ? clicks->data() : nullptr, lr);
          },
          nb::arg("keys"), nb::arg("grads"), nb::arg("shows").none(), nb::arg("clicks").none(), nb::arg("lr"))
      .def("begin_push", &Table::begin_push)
      .def("gather",
           [](Table& t, In<uint64_t> keys, Out<float> values, Out<float> state) {
             expect(values.size(), keys.size() * static_cast<size_t>(t.layout().dim), "values");
             expect(state.size(), keys.size() * static_cast<size_t>(t.layout().state), "state");
             const nb::gil_scoped_release release;
             t.gather(keys.data(), keys.size(), values.data(), state.data());
           })
      .def("scatter",
           [](Table& t, In<uint64_t> keys, In<float> values, In<float> state) {
             expect(values.size(), keys.size() * static_cast<size_t>(t.layout().dim), "values");
             expect(state.size(), keys.size() * static_cast<size_t>(t.layout().state), "state");
             const nb::gil_scoped_release release;
             return t.scatter(keys.data(), keys.size(), values.data(), state.data());
           })
      .def("assign",
           [](Table& t, In<uint64_t> keys, In<float> values) {
             expect(values.size(), keys.size() * static_cast<size_t>(t.layout().dim), "values");
             const nb::gil_scoped_release release;
             t.assign(keys.data(), keys.size(), values.data());
           })
      .def("add",
           [](Table& t, In<uint64_t> keys, In<float> deltas) {
             expect(deltas.size(), keys.size() * static_cast<size_t>(t.layout().dim), "deltas");
             const nb::gil_scoped_release release;
             return t.add(keys.data(), keys.size(), deltas.data());
           })
      .def("read_counters",
           [](Table& t, In<uint64_t> keys, Out<float> out) {
             expect(out.size(), 2 * keys.size(), "out");
             const nb::gil_scoped_release release;
             t.read_counters(keys.data(), keys.size(), out.data());
           })
      .def("contains",
           [](Table& t, In<uint64_t> keys, Out<uint8_t> out) {
             expect(out.size(), keys.size(), "out");
             const nb::gil_scoped_release release;
             t.contains(keys.data(), keys.size(), out.data());
           })
      .def("addresses",
           [](Table& t, In<uint64_t> keys, Out<uint64_t> out) {
             expect(out.size(), keys.size(), "out");
             const nb::gil_scoped_release release;
             t.addresses(keys.data(), keys.size(), out.data());
           })
      .def("erase",
           [](Table& t, In<uint64_t> keys) {
             const nb::gil_scoped_release release;
             return t.erase(keys.data(), keys.size());
           })
      .def("evict", &Table::evict, nb::call_guard<nb::gil_scoped_release>())
      .def("decay", &Table::decay, nb::call_guard<nb::gil_scoped_release>())
      .def("tick", &Table::tick, nb::call_guard<nb::gil_scoped_release>())
      .def("set_clock", &Table::set_clock)
      .def("stripe_rows",
           [](Table& t, int stripe) {
             std::vector<uint64_t> keys;
             std::vector<float> values, state;
             {
               const nb::gil_scoped_release release;
               t.stripe_rows(stripe, keys, values, state);
             }
             return nb::make_tuple(owned(std::move(keys)), owned(std::move(values)), owned(std::move(state)));
           })
      .def("save",
           [](Table& t, const std::string& path, nb::bytes header, uint64_t since) {
             const std::string text(header.c_str(), header.size());
             const nb::gil_scoped_release release;
             return t.save(path, text, since);
           })
      .def("load", &Table::load, nb::arg("path"), nb::arg("later") = 0, nb::call_guard<nb::gil_scoped_release>())
      .def_static("read_header",
                  [](const std::string& path) {
                    const std::string text = Table::read_header(path);
                    return nb::bytes(text.data(), text.size());
                  })
      .def("stats",
           [](Table& t) {
             const plsc::TableStats s = t.stats();
             nb::dict d;
             d["rows"] = s.rows;
             d["born"] = s.born;
             d["evicted"] = s.evicted;
             d["refused"] = s.refused;
             d["unadmitted"] = s.unadmitted;
             d["clock"] = s.clock;
             d["contended"] = s.contended;
             d["payload_bytes"] = s.payload_bytes;
             d["index_bytes"] = s.index_bytes;
             d["arena_bytes"] = s.arena_bytes;
             return d;
           })
      .def("__len__", &Table::size)
      .def_prop_ro("state_size", [](const Table& t) { return t.layout().state; })
      .def_prop_ro("num_stripes", &Table::num_stripes);
}
