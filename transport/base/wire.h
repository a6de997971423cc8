// A msgpack codec for structs that processes send each other. A struct lists its fields once with KVFERRY_FIELDS and
// grows only at the end, so an old reader ignores what a newer writer added.
#pragma once

#include <msgpack.hpp>
#include <string>
#include <string_view>

#include "transport/base/chunk_key.h"
#include "transport/base/ids.h"
#include "transport/base/result.h"

/// Lists the fields of a wire struct, in wire order. Unlike msgpack's own macro, this macro needs a semicolon after it.
#define KVFERRY_FIELDS(...) MSGPACK_DEFINE_ARRAY(__VA_ARGS__) static_assert(true)

namespace kvferry {

template <class T>
std::string encode(const T& value) {
  msgpack::sbuffer buffer;
  msgpack::pack(buffer, value);
  return {buffer.data(), buffer.size()};
}

/// Returns why bytes are not a well-formed message. This function has a text for msgpack's type_error, whose own text
/// is only "std::bad_cast".
inline std::string why_malformed(const std::exception& failure) {
  const bool is_type_error = dynamic_cast<const msgpack::type_error*>(&failure) != nullptr;
  if (is_type_error) return "a field is missing or has another type";
  return fmt::format("its bytes are no complete msgpack value ({})", failure.what());
}

/// Decodes a T. kCorrupt: the bytes are not a well-formed T; the message names `what_it_is`. Never throws,
/// and allocates no more than a small multiple of the bytes.
template <class T>
Result<T> decode(std::string_view bytes, std::string_view what_it_is) {
  try {
    // A header of a few bytes can claim an array of billions of elements, but a well-formed message has no more
    // elements than bytes.
    const msgpack::unpack_limit limit(bytes.size(), bytes.size(), bytes.size(), bytes.size(), bytes.size(), 64);
    const msgpack::object_handle handle = msgpack::unpack(bytes.data(), bytes.size(), nullptr, nullptr, limit);
    return handle.get().as<T>();
  } catch (const std::exception& failure) {
    return Error{ErrorCode::kCorrupt,
                 fmt::format("malformed {} ({} bytes): {}", what_it_is, bytes.size(), why_malformed(failure))};
  }
}

}  // namespace kvferry

namespace msgpack {
MSGPACK_API_VERSION_NAMESPACE(MSGPACK_DEFAULT_API_NS) {
  namespace adaptor {

  template <>
  struct convert<kvferry::ChunkKey> {
    const msgpack::object& operator()(const msgpack::object& o, kvferry::ChunkKey& key) const {
      if (o.type != msgpack::type::BIN || o.via.bin.size != key.bytes.size()) throw msgpack::type_error();
      std::memcpy(key.bytes.data(), o.via.bin.ptr, key.bytes.size());
      return o;
    }
  };
  template <>
  struct pack<kvferry::ChunkKey> {
    template <class Stream>
    packer<Stream>& operator()(msgpack::packer<Stream>& o, const kvferry::ChunkKey& key) const {
      o.pack_bin(static_cast<std::uint32_t>(key.bytes.size()));
      o.pack_bin_body(reinterpret_cast<const char*>(key.bytes.data()), static_cast<std::uint32_t>(key.bytes.size()));
      return o;
    }
  };

  /// An id is encoded as its value.
  template <class Tag, class Value>
  struct convert<kvferry::StrongId<Tag, Value>> {
    const msgpack::object& operator()(const msgpack::object& o, kvferry::StrongId<Tag, Value>& id) const {
      return o >> id.value;
    }
  };
  template <class Tag, class Value>
  struct pack<kvferry::StrongId<Tag, Value>> {
    template <class Stream>
    packer<Stream>& operator()(msgpack::packer<Stream>& o, const kvferry::StrongId<Tag, Value>& id) const {
      return o << id.value;
    }
  };

  }  // namespace adaptor
}
}  // namespace msgpack
