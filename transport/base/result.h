// Result<T>: an operational failure (peer lost, timed out, full, bad input) is a value with a code and a message.
// A broken invariant of kvferry's own code fails a KVFERRY_CHECK (check.h) instead.
#pragma once

#include <fmt/format.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace kvferry {

enum class ErrorCode : int {
  kOk = 0,
  kInvalidArgument,  // the caller's input is wrong; nothing was done
  kNotFound,
  kFull,         // there is no room or memory now, or something is still in use; a later try may succeed
  kTimeout,      // a deadline passed
  kCancelled,    // the caller cancelled the operation, or the object that runs it was shut down
  kPeerLost,     // the peer is gone or silent, or was restarted, or its connection failed
  kCorrupt,      // a checksum, generation or format did not match
  kRefused,      // the other side refused what was asked for, or it is not allowed
  kUnavailable,  // a resource, service or function is not available: port in use, server not reachable
  kInternal,     // a failure that no other code describes
};

std::string_view name_of(ErrorCode code);

/// The source line that made an Error. Replaces std::source_location, which clang 14 lacks on libstdc++ 12.
struct SourceLine {
  const char* file;
  int line;
  static constexpr SourceLine current(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

struct [[nodiscard]] Error {
  ErrorCode code = ErrorCode::kInternal;
  std::string what;
  SourceLine where = SourceLine::current();

  /// Prepends what the caller was doing: "pulling 4 chunks: peer lost".
  Error&& with(std::string_view context) && {
    what = fmt::format("{}: {}", context, what);
    return std::move(*this);
  }
  /// Returns the message and the source line, for logs. Commands show `what` only.
  std::string str() const;
};

/// Returns the error for a peer's message that the protocol does not allow.
inline Error protocol_error(std::string what, SourceLine where = SourceLine::current()) {
  return {ErrorCode::kCorrupt, std::move(what), where};
}

/// Either a T or an Error. Code branches on error().code; error().what is a text for people.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}      // NOLINT(google-explicit-constructor)
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT(google-explicit-constructor)
  explicit operator bool() const { return state_.index() == 0; }
  T& value() & { return std::get<0>(state_); }
  const T& value() const& { return std::get<0>(state_); }
  T&& value() && { return std::get<0>(std::move(state_)); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  Error& error() & { return std::get<1>(state_); }
  const Error& error() const& { return std::get<1>(state_); }
  Error&& error() && { return std::get<1>(std::move(state_)); }

 private:
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}  // NOLINT(google-explicit-constructor)
  explicit operator bool() const { return !error_; }
  Error& error() & { return *error_; }
  const Error& error() const& { return *error_; }
  Error&& error() && { return std::move(*error_); }

 private:
  std::optional<Error> error_;
};

template <class T>
T value_of(Result<T>&& result) {
  return *std::move(result);
}
inline void value_of(Result<void>&&) {}

}  // namespace kvferry

/// Yields the value of a Result, or returns its error from the enclosing function. Use it only at the beginning of a
/// statement, as an initializer or as the only argument of a call, so that no half-made object is left behind.
#define KVFERRY_TRY(...)                                         \
  __extension__({                                                \
    auto&& result_of_try = (__VA_ARGS__);                        \
    if (!result_of_try) return std::move(result_of_try).error(); \
    ::kvferry::value_of(std::move(result_of_try));               \
  })
