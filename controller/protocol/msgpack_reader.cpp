#include "controller/protocol/msgpack_reader.h"

#include <array>

namespace kvferry::controller {
namespace {

/// How to read an unsigned integer of up to 32 bits, by its tag: the eight bytes from the tag on, as one big-endian
/// number, are shifted right by `shift` and masked.
struct SmallInteger {
  std::uint8_t num_bytes;  // size with the tag; 0: the tag begins another kind of value
  std::uint8_t shift;
  std::uint32_t mask;
};

constexpr std::array<SmallInteger, 256> kSmallIntegers = [] {
  std::array<SmallInteger, 256> table{};
  for (unsigned tag = 0; tag < 0x80; ++tag) table[tag] = {1, 56, 0x7f};
  table[0xcc] = {2, 48, 0xff};
  table[0xcd] = {3, 40, 0xffff};
  table[0xce] = {5, 24, 0xffffffff};
  return table;
}();

/// Returns the number of bytes after the tag of a float or of an extension of fixed size, and 0 for all other tags.
constexpr std::size_t fixed_size(std::uint8_t tag) {
  switch (tag) {
    case 0xca:
      return 4;  // float
    case 0xcb:
      return 8;
    case 0xd4:
      return 2;  // the type and the data of an extension, like the next cases
    case 0xd5:
      return 3;
    case 0xd6:
      return 5;
    case 0xd7:
      return 9;
    case 0xd8:
      return 17;
    default:
      return 0;  // nil, false and true have only a tag
  }
}

}  // namespace

bool MsgpackReader::read_small_integers(std::uint32_t* values, std::uint32_t count) {
  // A token id takes one to five bytes. A branch on the size would often be mispredicted, so the loop has no such
  // branch.
  const std::uint8_t* at = at_;
  std::uint32_t i = 0;
  for (; i < count && end_ - at >= 8; ++i) {
    const SmallInteger form = kSmallIntegers[*at];
    if (form.num_bytes == 0) break;
    std::uint64_t word = 0;
    std::memcpy(&word, at, 8);
    if constexpr (std::endian::native == std::endian::little) word = __builtin_bswap64(word);
    values[i] = static_cast<std::uint32_t>(word >> form.shift) & form.mask;
    at += form.num_bytes;
  }
  MsgpackReader rest = *this;
  for (rest.at_ = at; i < count; ++i) {  // reads the rest: fewer than eight bytes are left, or a value has another form
    std::uint64_t value = 0;
    if (!rest.read_integer(value) || value > 0xffffffff) return false;
    values[i] = static_cast<std::uint32_t>(value);
  }
  at_ = rest.at_;
  return true;
}

bool MsgpackReader::skip_one(std::uint64_t& num_inner) {
  std::uint32_t count = 0;
  std::uint64_t number = 0;
  std::string_view body;
  if (read_integer(number) || read_string(body) || read_bytes(body)) return true;
  if (read_array(count)) {
    num_inner = count;
    return true;
  }
  if (read_map(count)) {
    num_inner = std::uint64_t{2} * count;
    return true;
  }
  if (at_ == end_) return false;
  const std::uint8_t tag = *at_;
  if (tag >= 0xc7 && tag <= 0xc9) {  // an extension of any size: its length, its type and its data follow the tag
    const std::size_t size = std::size_t{1} << (tag - 0xc7);
    if (num_left() < 2 + size) return false;
    return read_body(2 + size, big_endian(at_ + 1, size), body);
  }
  const bool is_known = tag == 0xc0 || tag == 0xc2 || tag == 0xc3 || fixed_size(tag) > 0;
  if (!is_known || num_left() < 1 + fixed_size(tag)) return false;
  at_ += 1 + fixed_size(tag);
  return true;
}

}  // namespace kvferry::controller
