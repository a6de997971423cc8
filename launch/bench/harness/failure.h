// Errors inside a benchmark are thrown, because almost every error ends the run. attempt() turns a thrown error back
// into a Result.
#pragma once

#include <stdexcept>
#include <type_traits>

#include "transport/base/result.h"

namespace kvferry::bench {

struct Failure : std::runtime_error {
  explicit Failure(Error reason) : std::runtime_error(reason.what), error(std::move(reason)) {}
  Error error;
};

/// Returns the value, or throws the error as a Failure.
template <class T>
T need(Result<T> result) {
  if (!result) throw Failure(std::move(result).error());
  if constexpr (!std::is_void_v<T>) return std::move(result).value();
}

/// Returns what `work` returns, or the error of the Failure that it throws.
template <class Work>
Result<std::invoke_result_t<Work>> attempt(const Work& work) {
  try {
    if constexpr (std::is_void_v<std::invoke_result_t<Work>>)
      return work(), Result<void>();
    else
      return work();
  } catch (const Failure& failure) {
    return failure.error;
  }
}

}  // namespace kvferry::bench
