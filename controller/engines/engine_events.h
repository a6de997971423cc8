// What vLLM and SGLang tell about their KV cache, as they send it: one msgpack batch of events.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "controller/index/key_log.h"
#include "controller/api/tier.h"
#include "transport/base/result.h"

namespace kvferry::controller {

/// What kind of attention a group of layers does decides whether its blocks say what a prefix is worth.
enum class GroupKind { kUnknown, kFullAttention, kOther };

/// Views and spans point into the batch and the decoder: valid during the call only.
struct BlocksStored {
  std::span<const ShortKey> hashes;
  std::optional<ShortKey> parent;         // none: the first block is the first of a prompt
  std::span<const std::uint32_t> tokens;  // empty: not told, or no plain numbers
  std::uint32_t block_size = 0;           // tokens a block
  std::string_view lora_name;             // empty: none
  std::optional<std::uint64_t> lora_id;
  Tier tier = Tier::kGpu;
  std::string_view extra_keys;  // msgpack: an array of nil or an array a block; empty: none
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
  double ts = 0;                         // seconds, the engine's clock
  std::optional<std::uint32_t> dp_rank;  // who of a data-parallel engine speaks
  std::uint32_t num_events = 0;          // told to the sink
  std::uint32_t num_unknown = 0;         // of a kind that this version doesn't know: skipped
  std::uint32_t num_malformed = 0;       // of a known kind with a field of another type: skipped
};

/// Both forms, [tag, fields in order] and {"type": tag, names: fields}, with integers or bytes for hashes. Fields that
/// it doesn't know are skipped. Of hashes as bytes the last eight count, big-endian: what vLLM itself makes of them
/// where it sends integers, so that both settings of one cluster name a block alike.
/// A medium that nobody knows is taken for the slowest tier, none for the GPU. Threads: one at a time. Allocates only
/// while its scratch memory grows.
class EngineEventDecoder {
 public:
  /// The sink hears nothing of an event that is malformed. kCorrupt: not a batch, or broken off; the sentence says
  /// where, and the sink has heard of the events before.
  Result<EngineBatch> decode(std::string_view payload, EngineEventSink& sink);

 private:
  struct Fields;
  bool read_hashes(class MsgpackReader& reader);
  bool read_stored_field(MsgpackReader& reader, std::uint32_t field, BlocksStored& blocks, Fields& more);
  bool read_event(MsgpackReader& reader, EngineEventSink& sink, EngineBatch& batch);

  std::vector<ShortKey> hashes_;
  std::vector<std::uint32_t> tokens_;
};

/// Who speaks in a batch, mostly without a look at its events, which lie before it; none: not told, or broken.
std::optional<std::uint32_t> rank_of_batch(std::string_view payload);

/// Of the names that engines use, in any case: GPU, CPU, CPU_PINNED, DISK, STORAGE ...
Tier tier_of_medium(std::string_view medium);

}  // namespace kvferry::controller
