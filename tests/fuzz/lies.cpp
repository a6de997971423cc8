#include "tests/fuzz/lies.h"

#include <limits>
#include <msgpack.hpp>
#include <set>

namespace kvferry::fuzz {
namespace {

using Packer = msgpack::packer<msgpack::sbuffer>;
constexpr std::size_t kNumLies = 19;

/// Packs lie number `lie` in place of the value `truth`.
void pack_lie(Packer& packer, const msgpack::object& truth, std::size_t lie) {
  const auto pack_text = [&](std::size_t num_bytes) { packer.pack(std::string(num_bytes, '\xff')); };
  const auto pack_blob = [&](std::size_t num_bytes) {
    const std::string zeros(num_bytes, '\0');
    packer.pack_bin(static_cast<std::uint32_t>(num_bytes));
    packer.pack_bin_body(zeros.data(), static_cast<std::uint32_t>(num_bytes));
  };
  const auto pack_array = [&](std::uint32_t num_truths) {
    packer.pack_array(num_truths);
    for (std::uint32_t i = 0; i < num_truths; ++i) packer.pack(truth);
  };
  constexpr std::uint64_t kNumbers[] = {0,
                                        1,
                                        2,
                                        255,
                                        std::uint64_t{1} << 31,
                                        0xffffffff,
                                        std::uint64_t{1} << 32,
                                        std::uint64_t{1} << 63,
                                        std::numeric_limits<std::uint64_t>::max()};
  if (lie < std::size(kNumbers)) return void(packer.pack(kNumbers[lie]));
  switch (lie - std::size(kNumbers)) {
    case 0:
      return void(packer.pack(std::int64_t{-1}));
    case 1:
      return void(packer.pack_nil());
    case 2:
      return pack_text(0);
    case 3:
      return pack_text(40'000);
    case 4:
      return pack_blob(16);
    case 5:
      return pack_blob(17);
    case 6:
      return pack_array(0);
    case 7:
      return pack_array(1'000);
    case 8:
      return void(packer.pack(1.5));
    default:  // the lie is an array with its elements twice, or a number plus one
      if (truth.type == msgpack::type::POSITIVE_INTEGER) return void(packer.pack(truth.via.u64 + 1));
      if (truth.type != msgpack::type::ARRAY) return pack_array(2);
      packer.pack_array(2 * truth.via.array.size);
      for (std::uint32_t i = 0; i < 2 * truth.via.array.size; ++i)
        packer.pack(truth.via.array.ptr[i % truth.via.array.size]);
  }
}

/// Packs `value` with a lie in place of one of the values inside it. `place` is the number of this value, counted from
/// the outside, and is decremented at each value.
void pack_with_lie(Packer& packer, const msgpack::object& value, std::size_t& place, std::size_t lie) {
  if (place-- == 0) return pack_lie(packer, value, lie);
  if (value.type != msgpack::type::ARRAY) return void(packer.pack(value));
  packer.pack_array(value.via.array.size);
  for (std::uint32_t i = 0; i < value.via.array.size; ++i) pack_with_lie(packer, value.via.array.ptr[i], place, lie);
}

std::size_t num_places(const msgpack::object& value) {
  std::size_t count = 1;
  if (value.type != msgpack::type::ARRAY) return count;
  for (std::uint32_t i = 0; i < value.via.array.size; ++i) count += num_places(value.via.array.ptr[i]);
  return count;
}

}  // namespace

std::vector<std::string> lies_about(std::string_view message) {
  const msgpack::object_handle handle = msgpack::unpack(message.data(), message.size());
  std::set<std::string> seen = {std::string(message)};
  std::vector<std::string> lies;
  for (std::size_t place = 0; place < num_places(handle.get()); ++place) {
    for (std::size_t lie = 0; lie < kNumLies; ++lie) {
      msgpack::sbuffer buffer;
      Packer packer(buffer);
      std::size_t countdown = place;
      pack_with_lie(packer, handle.get(), countdown, lie);
      std::string made(buffer.data(), buffer.size());
      if (seen.insert(made).second) lies.push_back(std::move(made));
    }
  }
  return lies;
}

}  // namespace kvferry::fuzz
