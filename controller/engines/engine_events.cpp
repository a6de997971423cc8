#include "controller/engines/engine_events.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <utility>

#include "controller/protocol/msgpack_reader.h"

namespace kvferry::controller {
namespace {

enum class Kind { kUnknown, kStored, kRemoved, kCleared };

Kind kind_of(std::string_view tag) {
  if (tag == "BlockStored" || tag == "stored") return Kind::kStored;
  if (tag == "BlockRemoved" || tag == "removed") return Kind::kRemoved;
  if (tag == "AllBlocksCleared" || tag == "cleared") return Kind::kCleared;
  return Kind::kUnknown;
}

/// Fields of a stored event, in the order of the array form.
enum Field : std::uint32_t {
  kHashes,
  kParent,
  kTokens,
  kBlockSize,
  kLoraId,
  kMedium,
  kLoraName,
  kExtraKeys,
  kGroup,
  kGroupKind,
  kWindow,
  kLocality,
  kOther,
  kCacheSalt,  // only the map form has this field
};
constexpr Field kRemovedFields[] = {kHashes, kMedium, kGroup, kLocality};

struct Name {
  std::string_view name;
  Field field;
};
constexpr Name kNames[] = {{"block_hashes", kHashes},          {"parent_block_hash", kParent}, {"token_ids", kTokens},
                           {"block_size", kBlockSize},         {"lora_id", kLoraId},           {"medium", kMedium},
                           {"lora_name", kLoraName},           {"extra_keys", kExtraKeys},     {"group_idx", kGroup},
                           {"kv_cache_spec_kind", kGroupKind}, {"locality", kLocality},        {"seq_hashes", kHashes},
                           {"parent_hash", kParent},           {"cache_salt", kCacheSalt}};

Field field_of(std::string_view name) {
  const auto* found = std::find_if(std::begin(kNames), std::end(kNames), [&](const Name& n) { return n.name == name; });
  return found == std::end(kNames) ? kOther : found->field;
}

bool is_tag_name(std::string_view name) { return name == "type" || name == "event_type"; }

bool read_hash(MsgpackReader& reader, ShortKey& hash) {
  if (!reader.next_is_bytes()) return reader.read_integer(hash);
  std::string_view bytes;
  if (!reader.read_bytes(bytes)) return false;
  bytes = bytes.substr(bytes.size() - std::min<std::size_t>(8, bytes.size()));
  hash = 0;
  for (const char byte : bytes) hash = hash << 8 | static_cast<std::uint8_t>(byte);
  return true;
}

/// Reads a field into `value`, which stays unchanged if the field is nil.
template <class T>
bool read_optional(MsgpackReader& reader, T& value) {
  if (reader.next_is_nil()) return reader.skip();
  if constexpr (std::is_same_v<T, std::string_view>) {
    return reader.read_string(value);
  } else {
    std::uint64_t number = 0;
    if (!reader.read_integer(number)) return false;
    if constexpr (std::is_same_v<T, std::optional<std::uint32_t>>) {
      if (number > 0xffffffff) return false;
      value = static_cast<std::uint32_t>(number);
    } else {
      value = number;
    }
    return true;
  }
}

GroupKind group_kind_of(std::string_view kind) {
  if (kind == "full_attention" || kind == "mla_attention" || kind == "sink_full_attention")
    return GroupKind::kFullAttention;
  return kind.empty() || kind == "unknown" ? GroupKind::kUnknown : GroupKind::kOther;
}

Error broken(const MsgpackReader& reader, std::string_view payload, std::string_view what) {
  return Error{ErrorCode::kCorrupt, fmt::format("a batch of KV events can't be read: {} was expected at byte {} of {}",
                                                what, payload.size() - reader.num_left(), payload.size())};
}

}  // namespace

/// Fields of an event that are not passed to the sink. The tier and the group kind are derived from the three texts.
struct EngineEventDecoder::Fields {
  std::string_view medium, locality, group_kind;
  bool has_hashes = false;
  Tier tier() const { return locality == "REMOTE" ? Tier::kRemote : tier_of_medium(medium); }
};

Tier tier_of_medium(std::string_view medium) {
  const auto is = [&](std::string_view name) {
    return std::equal(medium.begin(), medium.end(), name.begin(), name.end(),
                      [](char a, char b) { return std::toupper(static_cast<unsigned char>(a)) == b; });
  };
  if (medium.empty() || is("GPU") || is("HBM") || is("NPU") || is("DEVICE")) return Tier::kGpu;
  if (is("CPU") || is("CPU_PINNED") || is("DRAM") || is("HOST") || is("CPU_TIER1") || is("CPU_TIER2"))
    return Tier::kHost;
  if (is("DISK") || is("STORAGE") || is("SSD") || is("FS") || is("FILE") || is("NVME")) return Tier::kDisk;
  return Tier::kRemote;
}

std::optional<std::uint32_t> rank_of_batch(std::string_view payload) {
  MsgpackReader reader(payload);
  std::uint32_t num_fields = 0;
  if (!reader.read_array(num_fields) || num_fields < 3) return std::nullopt;
  // The rank is the last of three fields, and msgpack encodes ranks below 128 in one byte. But a last byte below 128
  // may also end a longer integer: such an integer begins two bytes earlier with 0xcd, or four bytes earlier with 0xce.
  const auto from_end = [&](std::size_t i) {
    return payload.size() > i ? static_cast<std::uint8_t>(payload[payload.size() - 1 - i]) : std::uint8_t{0};
  };
  if (num_fields == 3 && from_end(0) < 0x80 && from_end(2) != 0xcd && from_end(4) != 0xce) return from_end(0);
  std::optional<std::uint32_t> rank;
  if (!reader.skip() || !reader.skip() || !read_optional(reader, rank)) return std::nullopt;
  return rank;
}

bool EngineEventDecoder::read_hashes(MsgpackReader& reader) {
  std::uint32_t count = 0;
  if (!reader.read_array(count)) return false;
  hashes_.resize(count);
  return std::all_of(hashes_.begin(), hashes_.end(), [&](ShortKey& hash) { return read_hash(reader, hash); });
}

/// Reads one field of an event. Returns false if the field is malformed; then the reader may have stopped anywhere in
/// the field.
bool EngineEventDecoder::read_stored_field(MsgpackReader& reader, std::uint32_t field, BlocksStored& blocks,
                                           Fields& more) {
  switch (field) {
    case kHashes:
      more.has_hashes = true;
      return read_hashes(reader);
    case kParent: {
      ShortKey parent = 0;
      if (reader.next_is_nil()) return reader.skip();
      if (!read_hash(reader, parent)) return false;
      blocks.parent = parent;
      return true;
    }
    case kTokens: {
      if (reader.next_is_nil()) return reader.skip();
      const MsgpackReader begun = reader;
      std::uint32_t count = 0;
      if (!reader.read_array(count)) return false;
      tokens_.resize(std::max<std::size_t>(tokens_.size(), count));
      if (reader.read_small_integers(tokens_.data(), count)) {
        blocks.tokens = {tokens_.data(), count};
        return true;
      }
      // The tokens are not plain integers: some speculative decoders send pairs, from which no block key can be made.
      reader = begun;
      return reader.skip();
    }
    case kBlockSize: {
      std::optional<std::uint32_t> size;
      if (!read_optional(reader, size)) return false;
      blocks.block_size = size.value_or(0);
      return true;
    }
    case kLoraId:
      return read_optional(reader, blocks.lora_id);
    case kMedium:
      return read_optional(reader, more.medium);
    case kLoraName:
      return read_optional(reader, blocks.lora_name);
    case kExtraKeys: {
      if (reader.next_is_nil()) return reader.skip();
      const auto* begin = reinterpret_cast<const char*>(reader.position());
      if (!reader.skip()) return false;
      blocks.extra_keys = {begin, static_cast<std::size_t>(reinterpret_cast<const char*>(reader.position()) - begin)};
      return true;
    }
    case kCacheSalt:
      return read_optional(reader, blocks.cache_salt);
    case kGroup:
      return read_optional(reader, blocks.group);
    case kGroupKind:
      return read_optional(reader, more.group_kind);
    case kLocality:
      return read_optional(reader, more.locality);
    default:
      return reader.skip();
  }
}

/// Passes the next event to `sink`, or counts and skips the event if its kind is unknown or it is malformed. Returns
/// false if the batch is truncated or its next value is no event.
bool EngineEventDecoder::read_event(MsgpackReader& reader, EngineEventSink& sink, EngineBatch& batch) {
  const MsgpackReader begun = reader;
  const bool is_map = reader.next_is_map();
  std::uint32_t num_fields = 0;
  std::string_view tag;
  if (is_map) {
    if (!reader.read_map(num_fields)) return false;
    MsgpackReader ahead = reader;
    // The type is the first field unless the encoder sorts the names.
    for (std::uint32_t i = 0; i < num_fields && tag.empty(); ++i) {
      std::string_view name;
      if (!ahead.read_string(name)) break;
      if (!(is_tag_name(name) ? ahead.read_string(tag) : ahead.skip())) break;
    }
  } else {
    if (!reader.read_array(num_fields)) return false;
    if (num_fields > 0 && reader.read_string(tag)) --num_fields;
  }
  const Kind kind = kind_of(tag);
  const auto skip_event = [&](std::uint32_t& counter) {
    ++counter;
    reader = begun;
    return reader.skip();
  };
  if (kind == Kind::kUnknown) return skip_event(batch.num_unknown);

  BlocksStored blocks;
  Fields more;
  bool is_valid = true;
  for (std::uint32_t i = 0; i < num_fields && is_valid; ++i) {
    std::uint32_t field = std::min<std::uint32_t>(i, kOther);
    if (is_map) {
      std::string_view name;
      is_valid = reader.read_string(name);
      field = is_tag_name(name) ? kOther : field_of(name);
    } else if (kind == Kind::kRemoved) {
      field = i < std::size(kRemovedFields) ? kRemovedFields[i] : kOther;
    } else if (kind == Kind::kCleared) {
      field = kOther;
    }
    is_valid = is_valid && read_stored_field(reader, field, blocks, more);
  }
  if (!is_valid || (kind != Kind::kCleared && !more.has_hashes)) return skip_event(batch.num_malformed);
  ++batch.num_events;
  if (kind == Kind::kStored) {
    blocks.hashes = hashes_;
    blocks.tier = more.tier();
    blocks.kind = group_kind_of(more.group_kind);
    sink.stored(blocks);
  } else if (kind == Kind::kRemoved) {
    sink.removed({.hashes = hashes_, .tier = more.tier(), .group = blocks.group});
  } else {
    sink.all_cleared();
  }
  return true;
}

Result<EngineBatch> EngineEventDecoder::decode(std::string_view payload, EngineEventSink& sink) {
  MsgpackReader reader(payload);
  EngineBatch batch;
  std::uint32_t num_fields = 0, num_events = 0;
  if (!reader.read_array(num_fields) || num_fields < 2)
    return broken(reader, payload, "an array of at least two fields");
  if (!reader.skip()) return broken(reader, payload, "a timestamp");
  if (!reader.read_array(num_events)) return broken(reader, payload, "an array of events");
  for (std::uint32_t i = 0; i < num_events; ++i) {
    if (!read_event(reader, sink, batch)) return broken(reader, payload, "an event");
  }
  for (std::uint32_t i = 2; i < num_fields; ++i) {
    const bool is_read = i == 2 ? read_optional(reader, batch.dp_rank) : reader.skip();
    if (!is_read) return broken(reader, payload, i == 2 ? "a data parallel rank" : "another field");
  }
  return batch;
}

}  // namespace kvferry::controller
