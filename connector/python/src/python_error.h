// Turns an Error into the exception KvFerryError.
#pragma once

#include <stdexcept>
#include <utility>

#include "transport/base/result.h"

class PythonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class T>
T unwrap(kvferry::Result<T> result) {
  if (!result) throw PythonError("kvferry: " + result.error().what);
  return std::move(result).value();
}
inline void unwrap(const kvferry::Result<void>& result) {
  if (!result) throw PythonError("kvferry: " + result.error().what);
}
