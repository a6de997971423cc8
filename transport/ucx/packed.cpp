#include "transport/ucx/packed.h"

#include <cstring>

namespace kvferry::ucx {
namespace {

/// Returns the number of bytes of all extents, or nullopt for a message that no correct peer sends.
std::optional<std::uint64_t> total_of(const BlocksMessage& message, std::string_view payload) {
  if (message.extents.size() % 2 != 0 || message.extents.size() > 2 * kMessageExtentsMax) return std::nullopt;
  std::uint64_t total = 0;
  for (std::size_t index = 1; index < message.extents.size(); index += 2) {
    if (message.extents[index] > kMessageBytesMax - total) return std::nullopt;
    total += message.extents[index];
  }
  if (payload.size() != (message.is_pull ? 0 : total)) return std::nullopt;
  return total;
}

}  // namespace

std::string refuse(const BlocksMessage& message, ErrorCode code, std::string what) {
  return begin_packed(BlocksAnswer{message.token, static_cast<std::int32_t>(code), std::move(what)}, 0);
}

std::string serve(TransferTable& transfer_table, const BlocksMessage& message, std::string_view payload,
                  AskingMember member, bool& is_served) {
  is_served = false;
  const std::optional<std::uint64_t> total = total_of(message, payload);
  if (!total)
    return refuse(
        message, ErrorCode::kInvalidArgument,
        fmt::format("the peer received a malformed message with {} numbers for its blocks and {} bytes; allowed: an "
                    "offset and a length for each of at most {} blocks of at most {} bytes in all",
                    message.extents.size(), payload.size(), kMessageExtentsMax, kMessageBytesMax));
  const RegionId region{message.region};
  const GrantId grant{message.grant};
  std::string answer = begin_packed(BlocksAnswer{message.token, 0, ""}, message.is_pull ? *total : 0);
  for (std::size_t index = 0; index < message.extents.size(); index += 2) {
    const std::uint64_t bytes = message.extents[index + 1];
    Result<std::byte*> memory =
        transfer_table.begin_access(region, grant, message.extents[index], bytes, !message.is_pull, member);
    if (!memory) return refuse(message, memory.error().code, std::move(memory.error().what));
    if (message.is_pull) {
      answer.append(reinterpret_cast<const char*>(*memory), bytes);
    } else {
      std::memcpy(*memory, payload.data(), bytes);
      payload.remove_prefix(bytes);
    }
    transfer_table.end_access(region, grant);
  }
  is_served = true;
  return answer;
}

}  // namespace kvferry::ucx
