// Keys and tails as columns, the form in which messages carry them.
#pragma once

#include <cstdint>
#include <msgpack.hpp>
#include <span>
#include <vector>

#include "controller/api/client.h"
#include "transport/base/result.h"
#include "transport/base/wire.h"

namespace kvferry::controller::wire {

/// Keys that are serialised as one binary with 16 bytes for each key, because an array of a thousand small binaries
/// takes ten times as long to parse.
struct KeyBlob {
  std::vector<ChunkKey> keys;
};

/// Tails as three columns of equal length. A group of 16 zero bytes means that the tail has no group.
struct TailColumns {
  KeyBlob keys{};
  KeyBlob groups{};
  std::vector<std::uint32_t> num_tokens{};
  KVFERRY_FIELDS(keys, groups, num_tokens);
};

/// Appends full chunks and tails to separate columns; num_tokens of full chunks is not transmitted.
void split_entries(std::span<const ChunkEntry> chunks, KeyBlob& full, TailColumns& tails);
TailColumns to_columns(std::span<const ChunkEntry> tails);
/// The reverse of split_entries(). The result has the tails first. kCorrupt: the columns differ in length.
Result<std::vector<ChunkEntry>> join_entries(const KeyBlob& full, const TailColumns& tails);

}  // namespace kvferry::controller::wire

namespace msgpack {
MSGPACK_API_VERSION_NAMESPACE(MSGPACK_DEFAULT_API_NS) {
  namespace adaptor {

  template <>
  struct convert<kvferry::controller::wire::KeyBlob> {
    const msgpack::object& operator()(const msgpack::object& o, kvferry::controller::wire::KeyBlob& blob) const;
  };
  template <>
  struct pack<kvferry::controller::wire::KeyBlob> {
    packer<sbuffer>& operator()(packer<sbuffer>& o, const kvferry::controller::wire::KeyBlob& blob) const;
  };

  /// The tails of a Holder are serialised as columns. A tier that this release doesn't know is read as the slowest one.
  template <>
  struct convert<kvferry::controller::Holder> {
    const msgpack::object& operator()(const msgpack::object& o, kvferry::controller::Holder& holder) const;
  };
  template <>
  struct pack<kvferry::controller::Holder> {
    packer<sbuffer>& operator()(packer<sbuffer>& o, const kvferry::controller::Holder& holder) const;
  };

  }  // namespace adaptor
}
}  // namespace msgpack
