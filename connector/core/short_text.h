// A short text that is stored in place, for the records of the flight recorder.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "transport/base/wire.h"

namespace kvferry {

/// A text of at most kSize bytes, stored in place. Longer texts are cut off, but not inside a UTF-8 character, because
/// Python takes no part of a character: it would raise an error in the engine for the long id of a client's request.
template <std::size_t kSize>
class ShortText {
 public:
  ShortText() = default;
  ShortText& operator=(std::string_view text) {
    std::size_t size = std::min(text.size(), kSize);
    const auto is_inside = [&](std::size_t at) { return (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80; };
    while (size > 0 && size < text.size() && is_inside(size)) --size;
    size_ = static_cast<std::uint8_t>(size);
    std::copy_n(text.data(), size, bytes_.data());
    return *this;
  }
  std::string_view view() const { return {bytes_.data(), size_}; }
  template <class Packer>
  void msgpack_pack(Packer& packer) const {
    packer.pack(view());
  }
  void msgpack_unpack(const msgpack::object& object) { *this = object.as<std::string_view>(); }

 private:
  static_assert(kSize < 256);
  std::uint8_t size_ = 0;
  std::array<char, kSize> bytes_{};
};

}  // namespace kvferry
