// The compiled module megavm.vm._native.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "megavm/declared.hpp"
#include "vm/cpu/interpreter.hpp"
#include "vm/cpu/levels.hpp"
#include "vm/gil.hpp"

namespace py = pybind11;

// The analysis of the verifier, in vm/verify/.
void bind_happens_before(py::module_& module);

namespace megavm {
namespace {

// (address and rows of each part, rows, columns, columns that a rank writes, shape of at most four
// dimensions, dtype code, tagged)
using TensorTuple = std::tuple<std::vector<std::pair<uintptr_t, int64_t>>, int64_t, int64_t,
                               int64_t, std::vector<int64_t>, uint32_t, bool>;

void add_tensor(const TensorTuple& from, uint32_t rank, Executable& e) {
  const auto& [parts, rows, columns, own_columns, shape, dtype, tagged] = from;
  std::vector<StoredRows>& stored = e.parts.emplace_back();
  int64_t stored_rows = 0;
  for (const auto& [address, count] : parts) {
    stored.push_back({reinterpret_cast<void*>(address), count});
    stored_rows += count;
  }
  if (stored_rows != rows) throw py::value_error("the parts of a tensor do not add up to it");
  Tensor tensor{};
  tensor.data = stored[0].data;
  tensor.parts = stored.data();
  tensor.rows = rows;
  tensor.columns = columns;
  tensor.own_columns = own_columns;
  tensor.share_begin = own_columns < columns ? rank * own_columns : 0;
  for (size_t i = 0; i < 4; ++i) tensor.shape[i] = i < shape.size() ? shape[i] : 1;
  tensor.dtype = static_cast<DType>(dtype);
  tensor.tagged = tagged;
  e.tensors.push_back(tensor);
}

template <typename Element>
std::vector<Element> copy_bytes(const py::bytes& from) {
  const std::string_view view = from;
  if (view.size() % sizeof(Element))
    throw py::value_error("bytes are not a whole number of elements");
  std::vector<Element> out(view.size() / sizeof(Element));
  if (!view.empty()) std::memcpy(static_cast<void*>(out.data()), view.data(), view.size());
  return out;
}

const Level& level_of(const std::optional<std::string>& name) {
  if (!name) return *levels().back();
  for (const Level* level : levels())
    if (*name == level->name) return *level;
  throw py::value_error("this processor has no level " + *name);
}

// Check the preconditions of the interpreter.
void check(const Executable& e, const Level& level) {
  const size_t barriers = e.signals.size();
  for (const Words& words : e.instructions) {
    const Header& h = words.header;
    if (h.opcode >= kNumOpcodes || !level.kernels[h.opcode])
      throw py::value_error("opcode " + std::to_string(h.opcode) +
                            " is unknown to the compiled extension: install megavm again");
    if (h.signal != kNone && h.signal >= barriers)
      throw py::value_error("a signal names no barrier");
    for (const Wait& wait : h.waits)
      if (wait.barrier != kNone && wait.barrier >= barriers)
        throw py::value_error("a wait names no barrier");
  }
  if (e.ranks == 0 || e.workers == 0 || e.all_workers() > 4096)
    throw py::value_error("workers must be 1 to 4096");
  if (e.queues.size() != (e.dynamic ? 1 : e.workers))
    throw py::value_error("wrong number of queues");
  for (const auto& queue : e.queues)
    for (const int32_t index : queue)
      if (index < 0 || static_cast<size_t>(index) >= e.instructions.size())
        throw py::value_error("a queue names no instruction");
  if (!e.arena_limits.empty() && e.arena_limits.size() != e.instructions.size())
    throw py::value_error("one limit per instruction");
}

// Each row: (instruction, tensor, row begin, row end, begin, end, write, only); see
// ExchangedRegion.
using Regions = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

// The regions by instruction, checked against the tensors.
std::vector<std::vector<ExchangedRegion>> read_regions(const Regions& from, const Executable& e) {
  if (from.ndim() != 2 || from.shape(1) != 8)
    throw py::value_error("exchanged regions are rows of eight numbers");
  if (from.shape(0) == 0) return {};
  std::vector<std::vector<ExchangedRegion>> regions(e.instructions.size());
  for (py::ssize_t i = 0; i < from.shape(0); ++i) {
    const int64_t* r = from.data(i, 0);
    if (r[0] < 0 || static_cast<size_t>(r[0]) >= regions.size() || r[1] < 0 ||
        static_cast<size_t>(r[1]) >= e.tensors.size() / e.ranks)
      throw py::value_error("an exchanged region names no instruction or no tensor");
    const Tensor& t = e.tensors[static_cast<size_t>(r[1])];
    const bool write = r[6] != 0;
    int64_t size = write ? t.own_columns : t.columns;
    if (t.tagged) size = size * dtype_bytes(t.dtype) / 4;
    if (r[7] >= int64_t{e.ranks}) throw py::value_error("an exchanged region names no rank");
    if ((!t.tagged && !write) || r[2] < 0 || r[3] > t.rows || r[4] < 0 || r[5] > size)
      throw py::value_error("an exchanged region is outside of its tensor");
    regions[static_cast<size_t>(r[0])].push_back(
        {static_cast<uint32_t>(r[1]), write, r[2], r[3], r[4], r[5], r[7]});
  }
  return regions;
}

std::unique_ptr<Executable> load(const Interpreter& interpreter, const py::bytes& words,
                                 const std::vector<std::vector<TensorTuple>>& tensors,
                                 const std::vector<py::bytes>& queues, bool dynamic,
                                 uint32_t workers, const py::bytes& signals,
                                 uint32_t shared_barriers, const Regions& exchanged,
                                 const std::vector<uint32_t>& arena_limits) {
  auto e = std::make_unique<Executable>();
  e->instructions = copy_bytes<Words>(words);
  e->ranks = static_cast<uint32_t>(tensors.size());
  for (uint32_t rank = 0; rank < e->ranks; ++rank) {
    if (tensors[rank].size() != tensors[0].size())
      throw py::value_error("all ranks have the same tensors");
    for (const TensorTuple& tensor : tensors[rank]) add_tensor(tensor, rank, *e);
  }
  for (const py::bytes& queue : queues) e->queues.push_back(copy_bytes<int32_t>(queue));
  e->dynamic = dynamic;
  e->workers = workers;
  e->signals = copy_bytes<uint32_t>(signals);
  e->shared_barriers = shared_barriers;
  e->arena_limits = arena_limits;
  e->barriers = std::make_unique<Counter[]>(e->ranks * e->signals.size());
  check(*e, interpreter.level());
  e->exchanged = read_regions(exchanged, *e);
  return e;
}

// None, or (kind, cause, worker, [(instruction, condition kind, object, row, word, target, value)
// per worker]).
py::object describe(const std::optional<Fault>& fault) {
  if (!fault) return py::none();
  static const char* const kKinds[] = {"instruction", "no progress", "interrupted"};
  static const char* const kConditions[] = {"", "barrier", "tag"};
  py::list workers;
  for (const WorkerReport& w : fault->workers)
    workers.append(py::make_tuple(w.instruction, kConditions[w.waiting.kind], w.waiting.object,
                                  w.waiting.row, w.waiting.word, w.waiting.target, w.value));
  return py::make_tuple(kKinds[fault->kind], fault->cause, fault->worker, workers);
}

bool interrupted() {
  const py::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

// Only Python's main thread handles signals; runs on other threads need not take the GIL to check.
bool never_interrupted() { return false; }

py::object run(Interpreter& interpreter, Executable& executable, uint32_t steps, uint32_t epoch,
               bool main_thread, bool trace) {
  std::optional<Fault> fault;
  {
    const GilReleased released;
    fault = interpreter.run(executable, steps, epoch, trace,
                            main_thread ? interrupted : never_interrupted);
  }
  // A signal handler has raised an exception.
  if (PyErr_Occurred()) throw py::error_already_set();
  return describe(fault);
}

py::tuple execute_one(Interpreter& interpreter, Executable& executable, uint32_t rank,
                      uint32_t index, uint32_t step, uint32_t epoch) {
  if (rank >= executable.ranks) throw py::value_error("no such rank");
  if (index >= executable.instructions.size()) throw py::value_error("no such instruction");
  size_t used = 0;
  std::optional<Fault> fault;
  {
    const GilReleased released;
    fault = interpreter.execute_one(executable, rank, index, step, epoch, &used);
  }
  return py::make_tuple(describe(fault), used);
}

// The notes of every run, int64 [rows, fields of Note]. Removes them from the executable.
py::list take_notes(Executable& executable) {
  constexpr size_t kFields = sizeof(Note) / sizeof(int64_t);
  std::vector<std::vector<Note>> taken;
  {
    const std::lock_guard lock(executable.notes_mutex);
    taken.swap(executable.notes);
  }
  py::list runs;
  for (std::vector<Note>& run : taken) {
    auto* notes = new std::vector<Note>(std::move(run));
    const py::capsule owner(notes, [](void* p) { delete static_cast<std::vector<Note>*>(p); });
    runs.append(py::array_t<int64_t>({notes->size(), kFields},
                                     reinterpret_cast<const int64_t*>(notes->data()), owner));
  }
  return runs;
}

std::vector<uint32_t> barrier_values(const Executable& executable) {
  std::vector<uint32_t> values;
  for (uint32_t rank = 0; rank < executable.ranks; ++rank)
    for (uint32_t i = 0; i < executable.signals.size(); ++i)
      values.push_back(executable.barrier(rank, i).value.load());
  return values;
}

void set_barriers(Executable& executable, uint32_t steps_run) {
  executable.steps_run = steps_run;
  for (uint32_t rank = 0; rank < executable.ranks; ++rank)
    for (uint32_t i = 0; i < executable.signals.size(); ++i)
      executable.barrier(rank, i).value = steps_run * executable.signals[i];
}

void reset(Executable& executable) {
  set_barriers(executable, 0);
  executable.broken = false;
}

void lose_signal(Executable& executable, uint32_t barrier, uint32_t rank) {
  if (barrier >= executable.signals.size() || rank >= executable.ranks)
    throw py::value_error("no such barrier");
  executable.barrier(rank, barrier).value.fetch_sub(1);
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "The CPU machine's interpreter.";
  py::class_<Executable>(m, "Executable")
      .def_property_readonly("broken", [](const Executable& e) { return e.broken; })
      .def_property_readonly("barriers", barrier_values)
      .def("take_notes", take_notes,
           "What each traced run since the last call noted: int64 [rows, members of Note].")
      .def("reset", reset, "Set all counters to those of a fresh load.")
      .def("set_steps_run", set_barriers, py::arg("steps"),
           "Pretend that the program has run `steps` steps (for tests of counters that wrap "
           "around).")
      .def("lose_signal", lose_signal, py::arg("barrier"), py::arg("rank") = 0,
           "Take one signal of a barrier back (for tests of runs that cannot go on).");
  py::class_<Interpreter>(m, "Interpreter")
      .def(py::init([](const std::optional<std::string>& level, double timeout) {
             return std::make_unique<Interpreter>(level_of(level), timeout);
           }),
           py::arg("level"), py::arg("timeout"))
      .def_property_readonly("level", [](const Interpreter& i) { return i.level().name; })
      .def("load", load, py::arg("words"), py::arg("tensors"), py::arg("queues"),
           py::arg("dynamic"), py::arg("workers"), py::arg("signals"), py::arg("shared_barriers"),
           py::arg("exchanged"), py::arg("arena_limits"))
      .def("run", run, py::arg("executable"), py::arg("steps"), py::arg("epoch"),
           py::arg("main_thread"), py::arg("trace"))
      .def("execute_one", execute_one, py::arg("executable"), py::arg("rank"), py::arg("index"),
           py::arg("step"), py::arg("epoch"));
  m.def("levels", [] {
    std::vector<std::string> names;
    for (const Level* level : levels()) names.emplace_back(level->name);
    return names;
  });
  py::dict declared;
  for (const Declared& each : kDeclared) declared[each.source] = each.digest;
  m.attr("declared") = declared;
  m.def("num_processors", num_processors);
  bind_happens_before(m);
}

}  // namespace megavm
