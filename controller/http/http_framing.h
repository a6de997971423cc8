// Finds the end of an HTTP request in the bytes of a connection. Pure.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace kvferry::controller {

constexpr std::size_t kHttpHeadBytesMax = std::size_t{64} << 10;
constexpr std::size_t kHttpBodyBytesMax = std::size_t{16} << 20;

/// Reads one request while its bytes arrive, only as far as needed to find its end.
class HttpFraming {
 public:
  enum class State {
    kIncomplete,
    kComplete,  // the whole request has arrived; it has size() bytes
    kBad,       // too long, or its end can't be determined; the caller must close the connection after the answer
  };
  /// Continues to read the request. `bytes`: everything that has arrived since the request's first byte.
  State read(std::string_view bytes);
  std::size_t size() const { return end_; }
  /// Returns true if the head has arrived and the client waits for "100 Continue" before it sends the body.
  bool awaits_continue() const { return awaits_continue_; }
  bool has_head() const { return body_at_ > 0; }
  /// Returns the value of the Authorization header, or an empty text if the head has none or is incomplete.
  const std::string& authorization() const { return authorization_; }

 private:
  void read_head(std::string_view head);
  State read_chunks(std::string_view bytes);

  std::size_t num_searched_ = 0;  // number of leading bytes that were searched for the end of the head
  std::size_t body_at_ = 0;       // offset of the body; 0: the head is incomplete
  std::size_t end_ = 0;           // offset of the end of the request, or of the chunks read so far
  bool is_chunked_ = false;
  bool has_length_ = false;
  bool is_bad_ = false;
  bool awaits_continue_ = false;
  std::string authorization_;
};

}  // namespace kvferry::controller
