// Many small blocks in one message: its layout, the messages that are not answered yet, and how a receiver serves a
// message. Private to this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/transfer_table.h"
#include "transport/ucx/messages.h"

namespace kvferry::ucx {

/// Returns the encoded message, preceded by its length; the caller appends the payload.
template <class Message>
std::string begin_packed(const Message& message, std::uint64_t payload_bytes) {
  const std::string head = encode(message);
  const std::uint64_t head_bytes = head.size();
  std::string packed;
  packed.reserve(sizeof(head_bytes) + head.size() + payload_bytes);
  packed.append(reinterpret_cast<const char*>(&head_bytes), sizeof(head_bytes));
  return packed.append(head);
}

template <class Message>
Result<std::pair<Message, std::string_view>> read_packed(std::string_view packed, std::string_view what_it_is) {
  std::uint64_t head_bytes = 0;
  if (packed.size() < sizeof(head_bytes))
    return Error{ErrorCode::kCorrupt, fmt::format("malformed {}: {} bytes, at least {} are needed", what_it_is,
                                                  packed.size(), sizeof(head_bytes))};
  packed.copy(reinterpret_cast<char*>(&head_bytes), sizeof(head_bytes));
  packed.remove_prefix(sizeof(head_bytes));
  if (head_bytes > packed.size())
    return Error{ErrorCode::kCorrupt, fmt::format("malformed {}: its fields should have {} bytes, but only {} arrived",
                                                  what_it_is, head_bytes, packed.size())};
  Message message = KVFERRY_TRY(decode<Message>(packed.substr(0, head_bytes), what_it_is));
  return std::pair(std::move(message), packed.substr(head_bytes));
}

/// Copies the blocks that a peer's message names, to or from this node's memory. Returns the packed BlocksAnswer,
/// followed by the bytes of a pull. Sets `is_served` to whether everything was copied. `member`: whose node asks.
std::string serve(TransferTable& transfer_table, const BlocksMessage& message, std::string_view payload,
                  AskingMember member, bool& is_served);
/// Returns the packed answer to a message that is not served.
std::string refuse(const BlocksMessage& message, ErrorCode code, std::string what);

/// Consecutive bytes of one copy of a transfer, in the initiator's memory.
struct LocalPiece {
  std::size_t copy = 0;
  std::byte* local = nullptr;
  std::uint64_t bytes = 0;
};

class UcxTransfer;

/// BlocksMessages that peers have not answered yet, by token. Used by the progress thread only.
class PendingMessages {
 public:
  struct Pending {
    UcxTransfer* transfer = nullptr;
    std::vector<LocalPiece> pieces;
  };
  /// Returns a random token for a message. Only the peer that receives the message learns the token, so no other peer
  /// can answer.
  std::uint64_t next_token() { return (std::uint64_t{random_()} << 32) | random_(); }
  void add(std::uint64_t token, Pending message) { pending_.emplace(token, std::move(message)); }
  /// Removes and returns a message. Returns nullopt if none with this token is pending, for example because its
  /// transfer has ended.
  std::optional<Pending> take(std::uint64_t token) {
    auto found = pending_.extract(token);
    return found ? std::optional(std::move(found.mapped())) : std::nullopt;
  }
  void remove(const UcxTransfer* transfer) {
    std::erase_if(pending_, [&](const auto& entry) { return entry.second.transfer == transfer; });
  }

 private:
  std::random_device random_;
  std::unordered_map<std::uint64_t, Pending> pending_;
};

}  // namespace kvferry::ucx
