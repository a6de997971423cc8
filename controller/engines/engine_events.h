// Decodes the KV cache events that vLLM and SGLang publish: one msgpack batch in each message.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "controller/api/tier.h"
#include "controller/index/key_log.h"
#include "transport/base/result.h"

namespace kvferry::controller {

/// Kind of attention of a layer group (in vLLM: KV cache group). A prefix is usable only if the groups with full
/// attention have all of its blocks.
enum class GroupKind { kUnknown, kFullAttention, kOther };

/// Blocks that the engine stored. The views and spans in this struct and in BlocksRemoved point into the batch and the
/// decoder; they are valid only during the call of the sink.
struct BlocksStored {
  std::span<const ShortKey> hashes;
  std::optional<ShortKey> parent;         // none: the first block starts a prompt
  std::span<const std::uint32_t> tokens;  // empty: the event has no tokens, or they are not plain integers
  std::uint32_t block_size = 0;           // number of tokens in a block
  std::string_view lora_name;             // name of the LoRA adapter; empty: the event names none
  std::optional<std::uint64_t> lora_id;
  Tier tier = Tier::kGpu;
  std::string_view extra_keys;  // msgpack: an array with nil or an array for each block; empty: no extra keys
  std::string_view cache_salt;  // cache salt as SGLang sends it (vLLM puts it in extra_keys); empty: no salt
  std::optional<std::uint32_t> group;
  GroupKind kind = GroupKind::kUnknown;
};

struct BlocksRemoved {
  std::span<const ShortKey> hashes;
  Tier tier = Tier::kGpu;
  std::optional<std::uint32_t> group;
};

class EngineEventSink {
 public:
  virtual ~EngineEventSink() = default;
  virtual void stored(const BlocksStored& blocks) = 0;
  virtual void removed(const BlocksRemoved& blocks) = 0;
  virtual void all_cleared() = 0;
};

struct EngineBatch {
  std::optional<std::uint32_t> dp_rank;  // data-parallel rank of the sender
  std::uint32_t num_events = 0;          // events passed to the sink
  std::uint32_t num_unknown = 0;         // events skipped because their kind is unknown
  std::uint32_t num_malformed = 0;       // events skipped because a field is malformed or the hashes are missing
};

/// Reads both event forms, [tag, fields in order] and {"type": tag, name: field}, with hashes as integers or bytes, and
/// skips unknown fields. Of a hash in bytes, only the last eight bytes count, as a big-endian integer: vLLM derives its
/// integer hashes in the same way, so a block's hash is the same in both forms. A block counts as in the slowest tier
/// if its locality is REMOTE or its medium is unknown; otherwise, a missing medium counts as the GPU. Threads: one at a
/// time.
class EngineEventDecoder {
 public:
  /// Passes the events of a batch to `sink`; skips malformed events and events of an unknown kind. kCorrupt: `payload`
  /// is not a batch, or is truncated; the message names the bad byte, and the sink has received the events before it.
  Result<EngineBatch> decode(std::string_view payload, EngineEventSink& sink);

 private:
  struct Fields;
  bool read_hashes(class MsgpackReader& reader);
  bool read_stored_field(MsgpackReader& reader, std::uint32_t field, BlocksStored& blocks, Fields& more);
  bool read_event(MsgpackReader& reader, EngineEventSink& sink, EngineBatch& batch);

  std::vector<ShortKey> hashes_;
  std::vector<std::uint32_t> tokens_;
};

/// Returns the rank in a batch, usually without parsing the events before it; returns nullopt if the rank is missing or
/// malformed.
std::optional<std::uint32_t> rank_of_batch(std::string_view payload);

/// Returns the tier for an engine's name of a medium, such as GPU, CPU_PINNED or STORAGE, in upper or lower case.
Tier tier_of_medium(std::string_view medium);

}  // namespace kvferry::controller
