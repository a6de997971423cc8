// Fast conversion of lists of Python integers and of vLLM's running requests.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry {

/// Returns the value of a Python integer that CPython stores in one digit (30 bits), as it stores positive token ids
/// and counts. Returns a negative number if this function can't read the object; with the stable ABI it can read none.
inline std::int32_t one_digit_integer(PyObject* object) {
#if defined(Py_LIMITED_API)  // Python's stable ABI hides the digits of integers
  (void)object;
#else
  if (PyLong_CheckExact(object)) {
    const auto* const number = reinterpret_cast<PyLongObject*>(object);
#if PY_VERSION_HEX >= 0x030C0000
    if (PyUnstable_Long_IsCompact(number)) return static_cast<std::int32_t>(PyUnstable_Long_CompactValue(number));
#else
    if (Py_SIZE(object) == 1) return static_cast<std::int32_t>(number->ob_digit[0]);
#endif
  }
#endif
  return -1;
}

/// Converts an integer. If the object is not an integer, or if `Value` can't hold it, sets a Python error and returns 0
/// or -1 (always 0 if `Value` is unsigned).
template <class Value>
Value fitting_integer(PyObject* object) {
  if (const std::int32_t number = one_digit_integer(object); number >= 0) return static_cast<Value>(number);
  const std::int64_t number = PyLong_AsLong(object);
  if (std::in_range<Value>(number)) return static_cast<Value>(number);
  using Limits = std::numeric_limits<Value>;
  if (PyErr_Occurred() == nullptr)
    PyErr_Format(PyExc_OverflowError, "a token id or count is %lld; allowed: %lld to %lld",
                 static_cast<long long>(number), static_cast<long long>(Limits::min()),
                 static_cast<long long>(Limits::max()));
  return 0;
}

/// Reads a list of integers. Throws TypeError if `list` is not a list or contains other objects, OverflowError if it
/// contains integers that do not fit into 32 bits.
inline std::vector<std::int32_t> integers(nanobind::handle list) {
  constexpr Py_ssize_t kAhead = 16;  // number of objects to prefetch ahead, since the objects are scattered in memory
  if (!PyList_Check(list.ptr())) throw nanobind::type_error("token ids and counts must be given as a list of integers");
  const Py_ssize_t size = NB_LIST_GET_SIZE(list.ptr());
  std::vector<std::int32_t> values(static_cast<std::size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    __builtin_prefetch(NB_LIST_GET_ITEM(list.ptr(), std::min(i + kAhead, size - 1)));
    values[static_cast<std::size_t>(i)] = fitting_integer<std::int32_t>(NB_LIST_GET_ITEM(list.ptr(), i));
  }
  if (PyErr_Occurred() != nullptr) throw nanobind::python_error();
  return values;
}

/// The fields of vLLM's CachedRequestData, and the counts of scheduled tokens. They are references to Python objects,
/// since converting all of them would take too long in a step with hundreds of running requests.
struct RunningRequests {
  const nanobind::list& ids;        // list[str]
  const nanobind::list& computed;   // list[int]
  const nanobind::list& blocks;     // list[tuple[list[int], ...] | None]: blocks to add, or the whole table
  const nanobind::set& resumed;     // set[str]: requests for which `blocks` has the whole table
  const nanobind::dict& scheduled;  // dict[str, int]: tokens to compute in this step, for all requests

  std::size_t size() const { return ids.size(); }
};

/// Reads a step's running requests. A request that ran in the step before, and is listed in the same order, is usually
/// recognised by the address of its id's str object, which this class keeps alive. Only the ids of requests that are
/// not recognised are converted and looked up.
class RunningReader {
 public:
  /// Overwrites step.running and step.block_changes. `step` must be the same object in each call, with step.running as
  /// the last call left it. handle_of(id) returns the handle of the request with this id.
  template <class HandleOf>
  void read(const RunningRequests& running, StepInput& step, HandleOf handle_of) {
    const std::size_t size = running.ids.size();
    if (running.computed.size() != size || running.blocks.size() != size)
      throw nanobind::value_error(fmt::format("the lists of ids, counts and blocks of running requests have {}, {} and "
                                              "{} entries; they must have the same length",
                                              size, running.computed.size(), running.blocks.size())
                                      .c_str());
    const bool has_resumed = running.resumed.size() > 0;
    std::vector<nanobind::object> ids = std::exchange(ids_, {});  // ids_ stays empty if this function throws
    if (has_resumed || !are_same(ids, running.ids)) ids = name(running, ids, step.running, handle_of);
    InOrder counts(running.scheduled);
    step.block_changes.clear();
    const Py_ssize_t last = static_cast<Py_ssize_t>(size) - 1;
    for (std::size_t i = 0; i < size; ++i) {
      const auto at = static_cast<Py_ssize_t>(i);
      __builtin_prefetch(NB_LIST_GET_ITEM(running.computed.ptr(), std::min(at + kAhead, last)));
      PyObject* const id = NB_LIST_GET_ITEM(running.ids.ptr(), at);
      RunningRequest& request = step.running[i];
      request.num_computed = fitting_integer<std::uint32_t>(NB_LIST_GET_ITEM(running.computed.ptr(), at));
      request.num_scheduled = fitting_integer<std::uint32_t>(counts.at(id));
      if ((request.num_computed == 0 || request.num_scheduled == 0) && PyErr_Occurred() != nullptr)
        throw nanobind::python_error();
      const nanobind::handle blocks = NB_LIST_GET_ITEM(running.blocks.ptr(), at);
      const bool is_resumed = has_resumed && running.resumed.contains(nanobind::handle(id));
      if (is_resumed || !blocks.is_none())
        step.block_changes.push_back({request.handle, nanobind::cast<BlockTable>(blocks), is_resumed});
    }
    ids_ = std::move(ids);
  }

 private:
  static constexpr Py_ssize_t kAhead = 16;  // number of integers to prefetch ahead

  static bool are_same(const std::vector<nanobind::object>& before, const nanobind::list& ids) {
    if (before.size() != ids.size()) return false;
    for (std::size_t i = 0; i < before.size(); ++i)
      if (before[i].ptr() != NB_LIST_GET_ITEM(ids.ptr(), static_cast<Py_ssize_t>(i))) return false;
    return true;
  }

  /// Replaces `requests`, which has the handles of the ids `before`, by entries with the handles of the running
  /// requests. Returns the running requests' ids.
  template <class HandleOf>
  static std::vector<nanobind::object> name(const RunningRequests& running, const std::vector<nanobind::object>& before,
                                            std::vector<RunningRequest>& requests, HandleOf handle_of) {
    std::vector<nanobind::object> ids(running.size());
    std::vector<RunningRequest> named(running.size());
    std::size_t next = 0;  // index in `before` after the last request that was found there
    for (std::size_t i = 0; i < ids.size(); ++i) {
      PyObject* const id = NB_LIST_GET_ITEM(running.ids.ptr(), static_cast<Py_ssize_t>(i));
      // A resumed request may have the id of an earlier request that has ended.
      const bool is_resumed = running.resumed.size() > 0 && running.resumed.contains(nanobind::handle(id));
      const std::size_t found = is_resumed ? before.size() : find(before, next, id);
      ids[i] = nanobind::borrow(id);
      if (found < before.size()) {
        named[i].handle = requests[found].handle;
        next = found + 1;
      } else {
        named[i].handle = handle_of(RequestId{nanobind::cast<std::string>(nanobind::handle(id))});
      }
    }
    requests = std::move(named);
    return ids;
  }

  /// Returns the index in `before` of the request with this id. Returns before.size() if the request is not among the
  /// first kMaxEnded from `next` on.
  static std::size_t find(const std::vector<nanobind::object>& before, std::size_t next, PyObject* id) {
    constexpr std::size_t kMaxEnded = 32;
    for (std::size_t i = next; i < std::min(next + kMaxEnded, before.size()); ++i)
      if (before[i].ptr() == id) return i;
    return before.size();
  }

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
  std::vector<nanobind::object> ids_;  // ids of the running requests of the step before
};

}  // namespace kvferry
