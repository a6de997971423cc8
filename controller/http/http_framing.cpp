#include "controller/http/http_framing.h"

#include <algorithm>
#include <charconv>

namespace kvferry::controller {
namespace {

constexpr std::string_view kLineEnd = "\r\n";

bool is_same_word(std::string_view left, std::string_view lower_case) {
  return std::ranges::equal(left, lower_case,
                            [](char l, char r) { return (l >= 'A' && l <= 'Z' ? l + ('a' - 'A') : l) == r; });
}

std::string_view trimmed(std::string_view text) {
  const auto is_space = [](char c) { return c == ' ' || c == '\t'; };
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

/// Parses a number of bytes. Returns false if `text` is not a number, or if a body of this size would be too long.
bool parse_bytes(std::string_view text, int base, std::size_t& bytes) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), bytes, base);
  return error == std::errc() && end == text.data() + text.size() && bytes <= kHttpBodyBytesMax;
}

}  // namespace

HttpFraming::State HttpFraming::read(std::string_view bytes) {
  if (body_at_ == 0) {
    constexpr std::string_view kHeadEnd = "\r\n\r\n";
    const std::size_t found = bytes.find(kHeadEnd, num_searched_);
    if (std::min(found, bytes.size()) > kHttpHeadBytesMax) is_bad_ = true;
    if (is_bad_) return State::kBad;
    if (found == std::string_view::npos) {
      num_searched_ = bytes.size() - std::min(bytes.size(), kHeadEnd.size() - 1);
      return State::kIncomplete;
    }
    body_at_ = end_ = found + kHeadEnd.size();
    read_head(bytes.substr(0, found));
    is_bad_ |= is_chunked_ && has_length_;
  }
  if (is_bad_) return State::kBad;
  if (is_chunked_) return read_chunks(bytes);
  return bytes.size() < end_ ? State::kIncomplete : State::kComplete;
}

void HttpFraming::read_head(std::string_view head) {
  while (!head.empty()) {
    const std::size_t end = std::min(head.find(kLineEnd), head.size());
    const std::string_view line = head.substr(0, end);
    head.remove_prefix(std::min(end + kLineEnd.size(), head.size()));
    const std::size_t colon = line.find(':');
    if (colon == std::string_view::npos) continue;
    const std::string_view name = line.substr(0, colon), value = trimmed(line.substr(colon + 1));
    if (is_same_word(name, "content-length")) {
      std::size_t bytes = 0;
      is_bad_ |= has_length_ || !parse_bytes(value, 10, bytes);
      has_length_ = true;
      end_ += bytes;
    }
    if (is_same_word(name, "transfer-encoding")) is_chunked_ = true;
    if (is_same_word(name, "expect")) awaits_continue_ = is_same_word(value, "100-continue");
    if (is_same_word(name, "authorization")) authorization_ = value;
  }
}

HttpFraming::State HttpFraming::read_chunks(std::string_view bytes) {
  constexpr std::size_t kSizeLineBytesMax = 64;
  for (;;) {
    const std::size_t line_end = bytes.find(kLineEnd, end_);
    if (line_end == std::string_view::npos) {
      is_bad_ = bytes.size() > end_ + kSizeLineBytesMax;
      return is_bad_ ? State::kBad : State::kIncomplete;
    }
    std::size_t chunk_bytes = 0;
    if (!parse_bytes(bytes.substr(end_, line_end - end_), 16, chunk_bytes)) is_bad_ = true;
    const std::size_t next = line_end + 2 * kLineEnd.size() + chunk_bytes;
    if (next - body_at_ > kHttpBodyBytesMax) is_bad_ = true;
    if (is_bad_) return State::kBad;
    if (bytes.size() < next) return State::kIncomplete;
    end_ = next;
    // A line end must follow each chunk. So the request is bad if trailers follow the last chunk, which is empty.
    if (bytes.substr(next - kLineEnd.size(), kLineEnd.size()) != kLineEnd) is_bad_ = true;
    if (is_bad_) return State::kBad;
    if (chunk_bytes == 0) return State::kComplete;
  }
}

}  // namespace kvferry::controller
