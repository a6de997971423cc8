// Reads lists of Python integers fast.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

namespace kvferry {

/// Reads an integer of one Python digit in place, as all token ids and counts are. Returns -1 with a Python error set
/// if the object is not an integer that fits.
inline std::int64_t small_integer(PyObject* object) {
  if (PyLong_CheckExact(object)) {
#if PY_VERSION_HEX >= 0x030C0000
    const auto* const number = reinterpret_cast<PyLongObject*>(object);
    if (PyUnstable_Long_IsCompact(number)) return PyUnstable_Long_CompactValue(number);
#else
    const auto* const number = reinterpret_cast<PyLongObject*>(object);
    if (Py_SIZE(object) == 1) return number->ob_digit[0];
#endif
  }
  return PyLong_AsLong(object);
}

/// Reads a list of integers. Throws TypeError if it is not a list or contains other objects.
inline std::vector<std::int32_t> integers(nanobind::handle list) {
  constexpr Py_ssize_t kAhead = 16;  // number of objects to prefetch ahead, since they are scattered in memory
  if (!PyList_Check(list.ptr())) throw nanobind::type_error("token ids must be a list");
  const Py_ssize_t size = PyList_GET_SIZE(list.ptr());
  std::vector<std::int32_t> values(static_cast<std::size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (i + kAhead < size) __builtin_prefetch(PyList_GET_ITEM(list.ptr(), i + kAhead));
    values[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(small_integer(PyList_GET_ITEM(list.ptr(), i)));
  }
  if (PyErr_Occurred() != nullptr) throw nanobind::python_error();
  return values;
}

}  // namespace kvferry
