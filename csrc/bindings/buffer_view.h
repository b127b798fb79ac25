// A contiguous Python buffer, held while C++ looks at it.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

namespace unicron::bindings {

class BufferView {
 public:
  explicit BufferView(const pybind11::object& data, bool is_written = false) {
    const int flags = PyBUF_ANY_CONTIGUOUS | (is_written ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(data.ptr(), &view_, flags) != 0) throw pybind11::error_already_set();
  }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;
  ~BufferView() { PyBuffer_Release(&view_); }

  const void* data() const { return view_.buf; }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

}  // namespace unicron::bindings
