// Unwraps results that must be successful for a test to make sense. An error throws an exception with its message.
#pragma once

#include <stdexcept>
#include <utility>

#include "transport/base/result.h"

namespace kvferry {

template <class T>
T value_or_throw(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().what);
  return std::move(result).value();
}

inline void ok_or_throw(const Result<void>& result) {
  if (!result) throw std::runtime_error(result.error().what);
}

}  // namespace kvferry
