// Error codes of the table in base/error.h as Python exceptions.
#include <exception>

#include "base/error.h"
#include "register.h"

namespace py = pybind11;

namespace unicron::bindings {

namespace {

// Live as long as the interpreter: the module holds a reference of its own, and so do these.
struct Classes {
  PyObject* UnicronError = nullptr;
  PyObject* Timeout = nullptr;
  PyObject* ArenaRefused = nullptr;
};
Classes classes;

PyObject* make_class(py::module_& module, const char* name, const py::tuple& bases) {
  const std::string qualified_name = std::string("unicron._core.") + name;
  PyObject* result = PyErr_NewException(qualified_name.c_str(), bases.ptr(), nullptr);
  if (result == nullptr) throw py::error_already_set();
  module.attr(name) = py::reinterpret_borrow<py::object>(result);
  return result;
}

PyObject* class_of(ErrorCode code) {
  switch (code) {
#define UNICRON_CASE(code, python_class) \
  case ErrorCode::code:                  \
    return classes.python_class;
    UNICRON_ERROR_CODES(UNICRON_CASE)
#undef UNICRON_CASE
  }
  return PyExc_SystemError;  // unreachable: the switch covers the table
}

}  // namespace

void register_errors(py::module_& module) {
  const auto builtin = [](PyObject* type) { return py::reinterpret_borrow<py::object>(type); };
  classes.UnicronError = make_class(module, "UnicronError", py::make_tuple(builtin(PyExc_Exception)));
  const py::object base = builtin(classes.UnicronError);
  classes.Timeout = make_class(module, "Timeout", py::make_tuple(base, builtin(PyExc_TimeoutError)));
  classes.ArenaRefused = make_class(module, "ArenaRefused", py::make_tuple(base));
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      PyErr_SetString(class_of(error.code()), error.what());
    }
  });
}

}  // namespace unicron::bindings
