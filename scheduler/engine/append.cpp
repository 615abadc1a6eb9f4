// The tokens that a step chose, appended to their sequences. The module
// megavm.scheduler.engine._append.
//
// Most tokens of a large batch are in the middle of their sequence and have a text of their own.
// This does for all of these what Sequence.append does for one, which takes microseconds of Python.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <structmember.h>

#include <cstdint>
#include <string>

namespace py = pybind11;

namespace megavm {
namespace {

py::object checked(PyObject* made) {
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

// An attribute of a class with __slots__, by its place in the object.
class Slot {
 public:
  Slot(const py::type& owner, const char* name) {
    const py::object found = owner.attr(name);
    if (Py_TYPE(found.ptr()) != &PyMemberDescr_Type)
      throw py::type_error(std::string(name) + " is not one of the class's __slots__");
    offset_ = reinterpret_cast<PyMemberDescrObject*>(found.ptr())->d_member->offset;
  }
  py::handle of(const py::handle& object) const { return place(object); }
  // Of a new object, whose slots are empty.
  void set(const py::handle& object, py::object value) const {
    place(object) = value.release().ptr();
  }

 private:
  PyObject*& place(const py::handle& object) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object.ptr()) + offset_);
  }
  Py_ssize_t offset_;
};

// See _append.pyi.
class Appender {
 public:
  Appender(const py::type& sequence, const py::type& delta, py::object finished)
      : sequence_(sequence), delta_(delta), finished_(std::move(finished)) {}

  py::tuple append_inside(const py::tuple& sequences,
                          const py::array_t<int32_t, py::array::c_style>& tokens,
                          const py::array_t<bool, py::array::c_style>& stopped) const {
    const auto chosen = tokens.unchecked<2>();
    const auto stops = stopped.unchecked<1>();
    const auto count = static_cast<py::ssize_t>(sequences.size());
    if (chosen.shape(0) != count || stops.shape(0) != count)
      throw py::value_error("tokens and stopped must have a row for each sequence");
    const py::ssize_t steps = chosen.shape(1);
    py::list deltas, rest;
    for (py::ssize_t i = 0; i < count; ++i) {
      const py::handle sequence = PyTuple_GET_ITEM(sequences.ptr(), i);
      // What only says that it is one, such as a mock, has other slots.
      auto* const type = reinterpret_cast<PyTypeObject*>(sequence_.type.ptr());
      if (!PyObject_TypeCheck(sequence.ptr(), type))
        throw py::type_error("sequences must be Sequence objects");
      if (stops(i) || !is_inside(sequence, steps)) {
        rest.append(i);
        continue;
      }
      const py::handle output = sequence_.output.of(sequence);
      py::list own(steps), pieces(steps);
      for (py::ssize_t step = 0; step < steps; ++step) {
        py::object token = checked(PyLong_FromLong(chosen(i, step)));
        if (PyList_Append(output.ptr(), token.ptr()) != 0) throw py::error_already_set();
        py::object text = text_of(sequence_.decoder.of(sequence), token);
        PyList_SET_ITEM(pieces.ptr(), step, text.release().ptr());
        PyList_SET_ITEM(own.ptr(), step, token.release().ptr());
      }
      deltas.append(new_delta(sequence, std::move(own), std::move(pieces)));
    }
    return py::make_tuple(deltas, rest);
  }

 private:
  // Whether so many further tokens are in the middle of a sequence, and only their text counts.
  bool is_inside(const py::handle& sequence, py::ssize_t steps) const {
    if (sequence_.state.of(sequence).is(finished_) || sequence_.decoder.of(sequence).is_none())
      return false;
    const py::ssize_t length = PyList_Size(sequence_.output.of(sequence).ptr());
    if (length < 0) throw py::error_already_set();
    return length > 0 && length + steps < sequence_.max_output.of(sequence).cast<py::ssize_t>();
  }

  // The text of a token: from the decoder's table, or else from its method.
  py::object text_of(const py::handle& decoder, const py::object& token) const {
    const py::object plain = checked(PyObject_GetAttr(decoder.ptr(), plain_.ptr()));
    if (PyObject* text = PyDict_GetItemWithError(plain.ptr(), token.ptr()))
      return py::reinterpret_borrow<py::object>(text);
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return checked(PyObject_CallMethodOneArg(decoder.ptr(), step_.ptr(), token.ptr()));
  }

  // Delta(request, index, token_ids, pieces, []), without __init__, which takes longer than the
  // rest.
  py::object new_delta(const py::handle& sequence, py::list token_ids, py::list pieces) const {
    auto* const type = reinterpret_cast<PyTypeObject*>(delta_.type.ptr());
    py::object delta = checked(type->tp_alloc(type, 0));
    delta_.request.set(delta, py::reinterpret_borrow<py::object>(sequence_.request.of(sequence)));
    delta_.index.set(delta, py::reinterpret_borrow<py::object>(sequence_.index.of(sequence)));
    delta_.token_ids.set(delta, std::move(token_ids));
    delta_.pieces.set(delta, std::move(pieces));
    delta_.logprobs.set(delta, py::list());
    for (const Slot* empty : {&delta_.finish_reason, &delta_.stop_reason, &delta_.error})
      empty->set(delta, py::none());
    return delta;
  }

  struct SequenceSlots {
    explicit SequenceSlots(const py::type& of)
        : type(of),
          state(of, "state"),
          output(of, "output"),
          max_output(of, "max_output"),
          decoder(of, "decoder"),
          request(of, "request"),
          index(of, "index") {}
    py::type type;
    Slot state, output, max_output, decoder, request, index;
  };
  struct DeltaSlots {
    explicit DeltaSlots(const py::type& of)
        : type(of),
          request(of, "request"),
          index(of, "index"),
          token_ids(of, "token_ids"),
          pieces(of, "pieces"),
          logprobs(of, "logprobs"),
          finish_reason(of, "finish_reason"),
          stop_reason(of, "stop_reason"),
          error(of, "error") {}
    py::type type;
    Slot request, index, token_ids, pieces, logprobs, finish_reason, stop_reason, error;
  };

  SequenceSlots sequence_;
  DeltaSlots delta_;
  py::object finished_;
  py::str plain_{"plain"}, step_{"step"};
};

}  // namespace
}  // namespace megavm

PYBIND11_MODULE(_append, module) {
  using megavm::Appender;
  py::class_<Appender>(module, "Appender")
      .def(py::init<const py::type&, const py::type&, py::object>(), py::arg("sequence"),
           py::arg("delta"), py::arg("finished"))
      .def("append_inside", &Appender::append_inside, py::arg("sequences"), py::arg("tokens"),
           py::arg("stopped"));
}
