// Each kind of id in this file except BlockId has its own type, so that ids of two kinds can't be swapped by accident.
#pragma once

#include <fmt/format.h>

#include <compare>
#include <cstdint>
#include <functional>
#include <string>

namespace kvferry {

template <class Tag, class Value>
struct StrongId {
  Value value{};
  auto operator<=>(const StrongId&) const = default;
};

using RequestId = StrongId<struct RequestIdTag, std::string>;        // vLLM's request_id, unchanged
using EngineId = StrongId<struct EngineIdTag, std::string>;          // vLLM's engine_id
using Incarnation = StrongId<struct IncarnationTag, std::uint64_t>;  // number of a process's life; larger is newer
using Attempt = StrongId<struct AttemptTag, std::uint32_t>;          // number of a request's admission, from 1
using Generation = StrongId<struct GenerationTag, std::uint64_t>;    // counts the uses of a slot
using BlockId = std::int32_t;                                        // vLLM's block id within its KV group

constexpr BlockId kNoBlock = -1;  // in a list of blocks: no block, e.g. because the engine has dropped it

}  // namespace kvferry

template <class Tag, class Value>
struct std::hash<kvferry::StrongId<Tag, Value>> {
  std::size_t operator()(const kvferry::StrongId<Tag, Value>& id) const noexcept {
    return std::hash<Value>{}(id.value);
  }
};

template <class Tag, class Value>
struct fmt::formatter<kvferry::StrongId<Tag, Value>> : fmt::formatter<Value> {
  template <class Context>
  auto format(const kvferry::StrongId<Tag, Value>& id, Context& ctx) const {
    return fmt::formatter<Value>::format(id.value, ctx);
  }
};
