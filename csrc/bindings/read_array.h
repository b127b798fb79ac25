// Arrays of numbers from Python, without numpy's headers.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <type_traits>
#include <vector>

namespace unicron::bindings {

// A copy of a contiguous one-dimensional Python buffer of exactly this type ('i': int32, 'd': float64).
template <class Number>
std::vector<Number> read_array(const pybind11::object& data, const char* name) {
  constexpr char kFormat = std::is_same_v<Number, double> ? 'd' : 'i';
  if (PyObject_CheckBuffer(data.ptr()) == 0) throw pybind11::type_error(std::string(name) + ": not a buffer");
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0)
    throw pybind11::error_already_set();
  std::vector<Number> numbers;
  const bool fits = view.format != nullptr && view.format[0] == kFormat && view.format[1] == 0 && view.ndim == 1;
  if (fits) {
    const auto* begin = static_cast<const Number*>(view.buf);
    numbers.assign(begin, begin + view.len / static_cast<Py_ssize_t>(sizeof(Number)));
  }
  PyBuffer_Release(&view);
  if (!fits) throw pybind11::type_error(std::string(name) + ": needs one dimension of type '" + kFormat + "'");
  return numbers;
}

}  // namespace unicron::bindings
