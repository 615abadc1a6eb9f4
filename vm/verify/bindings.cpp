// The analysis as a function of the compiled module.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <utility>
#include <vector>

#include "vm/gil.hpp"
#include "vm/verify/happens_before.hpp"

namespace py = pybind11;

namespace megavm::verify {
namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

// A program as Python passes it.
struct Arrays {
  std::int32_t barriers;
  bool dynamic;
  const Array<std::int32_t>& queues;    // instruction numbers, one queue after the other
  const Array<std::int64_t>& lengths;   // of the queues
  const Array<std::int64_t>& waits;     // [instructions, kMaxWaits, 2]: barrier, target
  const Array<std::int64_t>& signals;   // by instruction
  const Array<bool>& orders;            // [instructions, 2]: reads_late, writes_early
  const Array<std::int64_t>& accesses;  // [accesses, 9]: the members of Access
  const Array<bool>& traits;            // [tensors, 3]: the members of TensorTraits
};

using AccessRow = std::array<std::int64_t, 9>;

AccessRow access_row(const Arrays& arrays, py::ssize_t number) {
  AccessRow row;
  const auto size = static_cast<py::ssize_t>(row.size());
  std::copy_n(arrays.accesses.data() + number * size, row.size(), row.begin());
  return row;
}

void require(bool good, const char* what) {
  if (!good) throw std::invalid_argument(what);
}

template <typename T>
bool has_shape(const Array<T>& array, std::initializer_list<py::ssize_t> shape) {
  return static_cast<std::size_t>(array.ndim()) == shape.size() &&
         std::equal(shape.begin(), shape.end(), array.shape());
}

void check_shapes(const Arrays& arrays) {
  const auto count = arrays.signals.size();
  const auto rows = [](const auto& array) { return array.ndim() > 0 ? array.shape(0) : 0; };
  require(has_shape(arrays.waits, {count, kMaxWaits, 2}) && has_shape(arrays.orders, {count, 2}) &&
              has_shape(arrays.accesses, {rows(arrays.accesses), 9}) &&
              has_shape(arrays.traits, {rows(arrays.traits), 3}),
          "arrays of the wrong shape");
}

// Throws if a number is out of range; the analysis itself checks none.
void check_numbers(const Arrays& arrays) {
  const auto barriers = arrays.barriers;
  const auto count = static_cast<std::int64_t>(arrays.signals.size());
  require(barriers >= 0, "a negative number of barriers");
  std::int64_t entries = 0;
  for (py::ssize_t i = 0; i < arrays.lengths.size(); ++i) {
    require(arrays.lengths.data()[i] >= 0, "a queue of negative length");
    entries += arrays.lengths.data()[i];
  }
  require(entries == arrays.queues.size() && entries == count, "queues hold each instruction once");
  std::vector<char> seen(static_cast<std::size_t>(count), 0);
  for (py::ssize_t i = 0; i < arrays.queues.size(); ++i) {
    const std::int64_t entry = arrays.queues.data()[i];
    require(entry >= 0 && entry < count && !seen[static_cast<std::size_t>(entry)],
            "queues hold each instruction once");
    seen[static_cast<std::size_t>(entry)] = 1;
  }
  std::vector<std::int64_t> signalled(static_cast<std::size_t>(barriers), 0);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto barrier = arrays.signals.data()[i];
    require(barrier >= -1 && barrier < barriers, "a signal names no barrier");
    if (barrier >= 0) ++signalled[static_cast<std::size_t>(barrier)];
  }
  for (std::int64_t i = 0; i < count * kMaxWaits; ++i) {
    const auto barrier = arrays.waits.data()[2 * i], target = arrays.waits.data()[2 * i + 1];
    require(barrier >= -1 && barrier < barriers, "a wait names no barrier");
    require(barrier < 0 || (target >= 0 && target <= signalled[static_cast<std::size_t>(barrier)]),
            "a wait for more than a step signals");
  }
  std::int64_t before = 0;
  for (py::ssize_t i = 0; i < arrays.accesses.shape(0); ++i) {
    const auto [instruction, tensor, row_begin, row_end, column_begin, column_end, write, indexed,
                earlier] = access_row(arrays, i);
    require(instruction >= before && instruction < count, "accesses are sorted by instruction");
    before = instruction;
    require(tensor >= 0 && tensor < arrays.traits.shape(0), "an access names no tensor");
    require(row_begin >= 0 && row_begin < row_end && column_begin >= 0 && column_begin < column_end,
            "an access of nothing");
  }
}

ProgramView make_view(const Arrays& arrays) {
  ProgramView program;
  program.barriers = arrays.barriers;
  program.dynamic = arrays.dynamic;
  const std::int32_t* entry = arrays.queues.data();
  for (py::ssize_t queue = 0; queue < arrays.lengths.size(); ++queue) {
    program.queues.emplace_back(entry, entry + arrays.lengths.at(queue));
    entry += arrays.lengths.at(queue);
  }
  program.instructions.resize(static_cast<std::size_t>(arrays.signals.size()));
  for (std::size_t i = 0; i < program.instructions.size(); ++i) {
    const std::int64_t* wait = arrays.waits.data() + i * 2 * kMaxWaits;
    for (auto& target : program.instructions[i].waits) {
      target = {static_cast<std::int32_t>(wait[0]), wait[1]};
      wait += 2;
    }
    program.instructions[i].signal = static_cast<std::int32_t>(arrays.signals.data()[i]);
    program.instructions[i].reads_late = arrays.orders.data()[2 * i];
    program.instructions[i].writes_early = arrays.orders.data()[2 * i + 1];
  }
  program.accesses.reserve(static_cast<std::size_t>(arrays.accesses.shape(0)));
  for (py::ssize_t i = 0; i < arrays.accesses.shape(0); ++i) {
    const auto [instruction, tensor, row_begin, row_end, column_begin, column_end, write, indexed,
                earlier] = access_row(arrays, i);
    program.accesses.push_back({static_cast<std::int32_t>(instruction),
                                static_cast<std::int32_t>(tensor),
                                {row_begin, row_end, column_begin, column_end},
                                write != 0,
                                indexed != 0,
                                earlier != 0});
  }
  program.tensors.resize(static_cast<std::size_t>(arrays.traits.shape(0)));
  for (std::size_t i = 0; i < program.tensors.size(); ++i) {
    const bool* traits = arrays.traits.data() + 3 * i;
    program.tensors[i] = {traits[0], traits[1], traits[2]};
  }
  return program;
}

// (kind, first access, its step, second access, its step, heads of queues that cannot run)
py::tuple to_python(const Finding& finding) {
  constexpr const char* kNames[] = {"deadlock", "unordered", "unwritten", "tag_unreachable",
                                    "tag_ambiguous"};
  py::list blocked;
  for (const auto& head : finding.blocked)
    blocked.append(
        py::make_tuple(head.instruction, head.barrier, head.value, head.target, head.missing));
  return py::make_tuple(kNames[static_cast<int>(finding.kind)], finding.first_access,
                        finding.first_step, finding.second_access, finding.second_step, blocked);
}

py::tuple analyse_arrays(std::int32_t barriers, bool dynamic, const Array<std::int32_t>& queues,
                         const Array<std::int64_t>& lengths, const Array<std::int64_t>& waits,
                         const Array<std::int64_t>& signals, const Array<bool>& orders,
                         const Array<std::int64_t>& accesses, const Array<bool>& traits) {
  const Arrays arrays{barriers, dynamic, queues, lengths, waits, signals, orders, accesses, traits};
  check_shapes(arrays);
  check_numbers(arrays);
  ProgramView program = make_view(arrays);
  Analysis analysis;
  {
    const GilReleased released;
    analysis = analyse(std::move(program));
  }
  const py::object fault = analysis.fault ? py::object(to_python(*analysis.fault)) : py::none();
  return py::make_tuple(fault, analysis.needs_queue_order);
}

}  // namespace
}  // namespace megavm::verify

void bind_happens_before(py::module_& module) {
  module.def("analyse", &megavm::verify::analyse_arrays, py::arg("barriers"), py::arg("dynamic"),
             py::arg("queues"), py::arg("lengths"), py::arg("waits"), py::arg("signals"),
             py::arg("orders"), py::arg("accesses"), py::arg("traits"));
}
