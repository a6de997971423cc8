// The files of the state folder: frames, one after the other.
//
// A frame is a head of 16 bytes and a body. The head: XXH3-64 of all that follows in the frame, the magic number, and
// the length of the body in bytes; all numbers in these files are little-endian. A write that was cut short leaves a
// torn end, which no frame follows; a bad frame that good ones follow was damaged later.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "transport/base/result.h"

namespace kvferry::controller {

constexpr std::size_t kFrameHeadBytes = 16;
constexpr std::size_t kFrameBodyBytesMax = std::size_t{64} << 20;

/// `frame` becomes the head of one whose body is to be appended to it.
inline void begin_frame(std::string& frame) { frame.assign(kFrameHeadBytes, '\0'); }
/// Fills in the head. The body has at most kFrameBodyBytesMax.
void end_frame(std::string& frame);

struct FrameScan {
  std::size_t good_bytes = 0;  // all frames before the first bad one
  enum class End { kWhole, kTorn, kCorrupt } end = End::kWhole;
};
/// Shows the body of each good frame up to the first bad one. `see` may stop it by saying false: then that frame counts
/// as damaged.
FrameScan scan_frames(std::string_view file, const std::function<bool(std::string_view body)>& see);

/// A whole file to read.
class MappedFile {
 public:
  /// kNotFound: there is none; kUnavailable: it can't be read.
  static Result<MappedFile> open(const std::string& path);
  MappedFile(MappedFile&& other) noexcept { std::swap(bytes_, other.bytes_); }
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile();
  std::string_view bytes() const { return bytes_; }

 private:
  MappedFile() = default;
  std::string_view bytes_;
};

}  // namespace kvferry::controller
