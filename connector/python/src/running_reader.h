// Fast conversion of lists of Python integers and of vLLM's running requests.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry {

/// Converts a Python integer. The conversion is fast if CPython stores the integer in one digit (30 bits), as it does
/// for all token ids and counts. Returns -1 with a Python error set if the object is not an integer or does not fit.
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

/// Converts an integer. Sets a Python error if the object is not an integer, or, unlike a cast, if `Value` can't hold
/// it.
template <class Value>
Value fitting_integer(PyObject* object) {
  const std::int64_t number = small_integer(object);
  if (std::in_range<Value>(number)) return static_cast<Value>(number);
  using Limits = std::numeric_limits<Value>;
  if (PyErr_Occurred() == nullptr)
    PyErr_Format(PyExc_OverflowError, "a token id or count is %lld; allowed: %lld to %lld",
                 static_cast<long long>(number), static_cast<long long>(Limits::min()),
                 static_cast<long long>(Limits::max()));
  return 0;
}

/// Reads a list of integers. Throws TypeError if it is not a list or contains other objects, OverflowError if it
/// contains integers that do not fit.
inline std::vector<std::int32_t> integers(nanobind::handle list) {
  constexpr Py_ssize_t kAhead = 16;  // number of objects to prefetch ahead, since the objects are scattered in memory
  if (!PyList_Check(list.ptr())) throw nanobind::type_error("token ids must be a list");
  const Py_ssize_t size = PyList_GET_SIZE(list.ptr());
  std::vector<std::int32_t> values(static_cast<std::size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (i + kAhead < size) __builtin_prefetch(PyList_GET_ITEM(list.ptr(), i + kAhead));
    values[static_cast<std::size_t>(i)] = fitting_integer<std::int32_t>(PyList_GET_ITEM(list.ptr(), i));
  }
  if (PyErr_Occurred() != nullptr) throw nanobind::python_error();
  return values;
}

/// The fields of vLLM's CachedRequestData, not converted yet, because a step has hundreds of running requests.
struct RunningRequests {
  const nanobind::list& ids;        // list[str]
  const nanobind::list& computed;   // list[int]
  const nanobind::list& blocks;     // list[tuple[list[int], ...] | None]: blocks to add, or the whole table
  const nanobind::set& resumed;     // set[str]: requests for which `blocks` has the whole table
  const nanobind::dict& scheduled;  // dict[str, int]: tokens to compute in this step, for all requests

  std::size_t size() const { return ids.size(); }
};

/// Reads a step's running requests. Nearly all have the same place in the list as in the previous step. Such a request
/// is recognised by the address of its id's str object, which this class keeps alive; its id is not converted again.
class RunningReader {
 public:
  /// Overwrites the first running.size() elements of `requests`, which must have the values of the previous step.
  void read(const RunningRequests& running, std::span<ScheduledRequest> requests) {
    if (running.computed.size() != running.size() || running.blocks.size() != running.size())
      throw nanobind::value_error("the lists of ids, counts and blocks of running requests must have the same length");
    const std::size_t num_before = last_ids_.size();
    last_ids_.resize(running.size());
    InOrder counts(running.scheduled);
    for (std::size_t i = 0; i < running.size(); ++i) {
      PyObject* const id = PyList_GET_ITEM(running.ids.ptr(), static_cast<Py_ssize_t>(i));
      ScheduledRequest& request = requests[i];
      request.same_place = i < num_before && last_ids_[i].ptr() == id;
      if (!request.same_place) {
        request.id.value = nanobind::cast<std::string>(nanobind::handle(id));
        last_ids_[i] = nanobind::borrow(id);
      }
      request.num_computed =
          fitting_integer<std::uint32_t>(PyList_GET_ITEM(running.computed.ptr(), static_cast<Py_ssize_t>(i)));
      request.num_scheduled = fitting_integer<std::uint32_t>(counts.at(id));
      if (PyErr_Occurred() != nullptr) throw nanobind::python_error();
      request.block_ids.reset();
      request.new_block_ids.clear();
      const nanobind::handle blocks = PyList_GET_ITEM(running.blocks.ptr(), static_cast<Py_ssize_t>(i));
      if (running.resumed.size() > 0 && running.resumed.contains(nanobind::handle(id)))
        request.block_ids = nanobind::cast<BlockTable>(blocks);
      else if (!blocks.is_none())
        request.new_block_ids = nanobind::cast<BlockTable>(blocks);
    }
  }

 private:
  /// Reads a dict whose keys are mostly looked up in the dict's own order.
  class InOrder {
   public:
    explicit InOrder(const nanobind::dict& dict) : dict_(dict.ptr()) { next(); }
    PyObject* at(PyObject* key) {
      if (key == key_) {
        PyObject* const value = value_;
        next();
        return value;
      }
      PyObject* const value = PyDict_GetItemWithError(dict_, key);
      if (value == nullptr && PyErr_Occurred() == nullptr) PyErr_SetObject(PyExc_KeyError, key);
      if (value == nullptr) throw nanobind::python_error();
      return value;
    }

   private:
    void next() {
      if (PyDict_Next(dict_, &at_, &key_, &value_) == 0) key_ = nullptr;
    }
    PyObject* dict_;
    Py_ssize_t at_ = 0;
    PyObject *key_ = nullptr, *value_ = nullptr;
  };
  std::vector<nanobind::object> last_ids_;
};

}  // namespace kvferry
