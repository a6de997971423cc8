#include "controller/protocol/wire_lookup.h"

namespace kvferry::controller::wire {
namespace {

/// Reads msgpack elements from the front of some bytes. After the first unexpected element all further reads fail.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  bool is_at_end() const { return is_good_ && rest_.empty(); }

  /// `size`: up to 15.
  void array_of(unsigned size) { expect(byte() == (0x90U | size)); }

  std::uint64_t number() {
    const unsigned kind = byte();
    if (kind < 0x80) return kind;
    if (kind < 0xcc || kind > 0xcf) return expect(false), 0;
    return big_endian(std::size_t{1} << (kind - 0xcc));
  }

  std::span<const ChunkKey> keys() {
    const unsigned kind = byte();
    if (kind < 0xc4 || kind > 0xc6) return expect(false), std::span<const ChunkKey>{};
    const std::uint64_t size = big_endian(std::size_t{1} << (kind - 0xc4));
    if (size > rest_.size() || size % sizeof(ChunkKey) != 0) return expect(false), std::span<const ChunkKey>{};
    static_assert(alignof(ChunkKey) == 1 && sizeof(ChunkKey) == 16, "keys are read at any address");
    const std::span found(reinterpret_cast<const ChunkKey*>(rest_.data()), size / sizeof(ChunkKey));
    rest_.remove_prefix(size);
    return found;
  }

 private:
  void expect(bool is_so) {
    if (is_so) return;
    is_good_ = false;
    rest_ = {};
  }
  unsigned byte() { return static_cast<unsigned>(big_endian(1)); }
  std::uint64_t big_endian(std::size_t num_bytes) {
    if (rest_.size() < num_bytes) return expect(false), 0;
    std::uint64_t number = 0;
    for (std::size_t i = 0; i < num_bytes; ++i) number = number << 8 | static_cast<unsigned char>(rest_[i]);
    rest_.remove_prefix(num_bytes);
    return number;
  }

  std::string_view rest_;
  bool is_good_ = true;
};

void write_tails(msgpack::packer<msgpack::sbuffer>& packer, std::span<const ChunkEntry> tails) {
  if (!tails.empty()) {
    packer.pack(to_columns(tails));
    return;
  }
  packer.pack_array(3);  // to_columns() would allocate
  packer.pack_bin(0);
  packer.pack_bin(0);
  packer.pack_array(0);
}

}  // namespace

std::optional<LookupFields> read_lookup(std::string_view bytes, VersionRange versions) {
  Reader reader(bytes);
  LookupFields lookup;
  reader.array_of(6);
  reader.array_of(2);
  const std::uint64_t version = reader.number();
  if (version < versions.oldest || version > versions.newest || reader.number() != Lookup{}.header.type)
    return std::nullopt;
  lookup.version = static_cast<std::uint32_t>(version);
  lookup.incarnation = reader.number();
  lookup.token = reader.number();
  lookup.query.keys = reader.keys();
  lookup.query.tail_groups = reader.keys();
  lookup.query.exact_tails = reader.keys();
  return reader.is_at_end() ? std::optional(lookup) : std::nullopt;
}

void write_reply(msgpack::sbuffer& buffer, std::uint32_t version, std::uint64_t token,
                 std::span<const HolderView> holders, std::uint64_t index_version) {
  buffer.clear();
  msgpack::packer packer(buffer);
  packer.pack_array(4);
  packer.pack(Header{version, LookupReply{}.header.type});
  packer.pack(token);
  packer.pack_array(static_cast<std::uint32_t>(holders.size()));
  for (const HolderView& holder : holders) {
    packer.pack_array(7);
    packer.pack(holder.info->engine_id.value);
    packer.pack(holder.info->incarnation.value);
    packer.pack(holder.info->endpoint);
    packer.pack(holder.num_full_chunks);
    write_tails(packer, holder.tails);
    packer.pack(static_cast<std::uint32_t>(holder.tier));
    packer.pack(holder.confirmed);
  }
  packer.pack(index_version);
}

}  // namespace kvferry::controller::wire
