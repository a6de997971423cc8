// The format of the files in the state folder: a sequence of batches.
//
// A batch is a head of 16 bytes and a body. The head holds a chunk_checksum() of all bytes of the batch after the
// checksum, a magic number, and the length of the body in bytes; numbers are little-endian. An interrupted write leaves
// a torn (incomplete) batch, with no batch after it. A bad batch before a good one means that the file was damaged.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "transport/base/result.h"

namespace kvferry::controller {

constexpr std::size_t kBatchHeadBytes = 16;
constexpr std::size_t kBatchBodyBytesMax = std::size_t{64} << 20;

/// Sets `batch` to an empty head. The caller then appends the body to `batch`.
inline void begin_batch(std::string& batch) { batch.assign(kBatchHeadBytes, '\0'); }
/// Fills in the head of a complete batch. The body must have at most kBatchBodyBytesMax bytes.
void end_batch(std::string& batch);

struct BatchScan {
  std::size_t good_bytes = 0;  // size of all batches before the first bad batch
  enum class End { kWhole, kTorn, kCorrupt } end = End::kWhole;
};
/// Calls `see` with the body of each batch up to the first bad one. If `see` returns false, the scan ends and that
/// batch counts as damaged.
BatchScan scan_batches(std::string_view file, const std::function<bool(std::string_view body)>& see);

/// A file mapped for reading.
class MappedFile {
 public:
  /// Maps a file. kNotFound: the file does not exist; kUnavailable: the file cannot be read.
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
