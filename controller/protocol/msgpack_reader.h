// Reads msgpack in place, without objects, allocation or recursion. Each read returns whether it succeeded; a failed
// read does not move the reader. msgpack-cxx would build an object for each value, and decoding is on the hot path.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace kvferry::controller {

class MsgpackReader {
 public:
  explicit MsgpackReader(std::string_view bytes)
      : at_(reinterpret_cast<const std::uint8_t*>(bytes.data())), end_(at_ + bytes.size()) {}

  std::size_t num_left() const { return static_cast<std::size_t>(end_ - at_); }
  const std::uint8_t* position() const { return at_; }
  bool next_is_nil() const { return at_ < end_ && *at_ == 0xc0; }
  bool next_is_map() const { return at_ < end_ && ((*at_ & 0xf0) == 0x80 || *at_ == 0xde || *at_ == 0xdf); }
  bool next_is_bytes() const { return at_ < end_ && *at_ >= 0xc4 && *at_ <= 0xc6; }

  /// Reads the header of an array or a map. Fails if fewer bytes remain than one for each element of the array, or two
  /// for each entry of the map, so that a header of five bytes can't claim billions of elements.
  bool read_array(std::uint32_t& count) { return read_count(0x90, 0xdc, 1, count); }
  bool read_map(std::uint32_t& count) { return read_count(0x80, 0xde, 2, count); }

  /// Reads any integer; a negative integer is read as its 64-bit two's complement.
  bool read_integer(std::uint64_t& value) {
    if (at_ == end_) return false;
    const std::uint8_t tag = *at_;
    if (tag < 0x80 || tag >= 0xe0) {
      value = static_cast<std::uint64_t>(std::int64_t{static_cast<std::int8_t>(tag)});
      ++at_;
      return true;
    }
    if (tag < 0xcc || tag > 0xd3) return false;
    const std::size_t size = std::size_t{1} << (tag & 3);
    if (num_left() < 1 + size) return false;
    value = big_endian(at_ + 1, size);
    if (tag >= 0xd0 && size < 8) {  // extends the sign, because the format is a signed one
      const unsigned shift = 64 - 8 * static_cast<unsigned>(size);
      value = static_cast<std::uint64_t>(static_cast<std::int64_t>(value << shift) >> shift);
    }
    at_ += 1 + size;
    return true;
  }
  /// Reads an integer. Fails for a negative number, and for any number in one of MessagePack's signed formats.
  bool read_unsigned(std::uint64_t& value) {
    return at_ < end_ && (*at_ < 0x80 || (*at_ & 0xfc) == 0xcc) && read_integer(value);
  }
  bool read_string(std::string_view& text) {
    if (at_ < end_ && (*at_ & 0xe0) == 0xa0) return read_body(1, *at_ & 0x1f, text);
    return read_sized(0xd9, text);
  }
  bool read_bytes(std::string_view& bytes) { return read_sized(0xc4, bytes); }

  /// Skips one value of any kind, including nested values.
  bool skip() {
    const std::uint8_t* begun = at_;
    for (std::uint64_t num_values = 1; num_values > 0; --num_values) {
      std::uint64_t num_inner = 0;
      if (num_values > num_left() || !skip_one(num_inner)) {
        at_ = begun;
        return false;
      }
      num_values += num_inner;
    }
    return true;
  }

  /// Reads `count` integers of 0 to 2^32 - 1, the elements of an array whose header was just read, into `values`.
  /// Returns false if an element is missing or is something else.
  bool read_small_integers(std::uint32_t* values, std::uint32_t count);

 private:
  static std::uint64_t big_endian(const std::uint8_t* from, std::size_t size) {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < size; ++i) value = value << 8 | from[i];
    return value;
  }
  bool read_count(std::uint8_t fix, std::uint8_t tag16, std::uint32_t values_each, std::uint32_t& count) {
    if (at_ == end_) return false;
    const std::uint8_t tag = *at_;
    std::size_t header = 1;
    std::uint64_t n = tag & 0x0f;
    if ((tag & 0xf0) != fix) {
      if (tag != tag16 && tag != tag16 + 1) return false;
      const std::size_t size = tag == tag16 ? 2 : 4;
      if (num_left() < 1 + size) return false;
      n = big_endian(at_ + 1, size);
      header += size;
    }
    if (n * values_each > num_left() - header) return false;
    count = static_cast<std::uint32_t>(n);
    at_ += header;
    return true;
  }
  bool read_sized(std::uint8_t tag8, std::string_view& body) {
    if (at_ == end_ || *at_ < tag8 || *at_ > tag8 + 2) return false;
    const std::size_t size = std::size_t{1} << (*at_ - tag8);
    if (num_left() < 1 + size) return false;
    return read_body(1 + size, big_endian(at_ + 1, size), body);
  }
  bool read_body(std::size_t header, std::uint64_t size, std::string_view& body) {
    if (num_left() < header || num_left() - header < size) return false;
    body = {reinterpret_cast<const char*>(at_ + header), static_cast<std::size_t>(size)};
    at_ += header + size;
    return true;
  }
  bool skip_one(std::uint64_t& num_inner);

  const std::uint8_t* at_;
  const std::uint8_t* end_;
};

}  // namespace kvferry::controller
