#include "transport/address_secret.h"

#include "transport/backend.h"
#include "transport/base/net/derived_keys.h"

namespace kvferry {
namespace {

constexpr std::size_t kRootBytes = 16;
constexpr std::size_t kCurveKeyDigits = 64;
constexpr std::size_t kPersonalBytes = kCurveKeyDigits + sizeof(net::Bytes32);
constexpr std::string_view kPurpose = "kvferry address of ";

}  // namespace

AddressSecret::AddressSecret(std::optional<net::ClusterKey> key)
    : key_(std::move(key)), root_(random_bytes(kRootBytes)) {}

std::string AddressSecret::personal(std::string_view root, std::string_view curve_key) {
  const net::Bytes32 proof = net::derive(root, std::string(kPurpose).append(curve_key));
  return std::string(curve_key).append(net::text_of(proof));
}

SecretCheck AddressSecret::check(std::string_view shown) const {
  using Kind = SecretCheck::Kind;
  const bool is_root = is_same_secret(shown, root_);
  if (!key_ || !key_->content()->members) return {is_root ? Kind::kAccepted : Kind::kUnknown};
  // A process that was given the root secret before there was a list of members has to ask for the address again.
  if (is_root) return {Kind::kRevoked};
  if (shown.size() != kPersonalBytes) return {Kind::kUnknown};
  const std::string_view curve_key = shown.substr(0, kCurveKeyDigits);
  if (!is_same_secret(shown, personal(root_, curve_key))) return {Kind::kUnknown};
  std::optional<net::Identity> peer = key_->identity_of(curve_key);
  if (!peer || peer->role < net::Role::kWorker) return {Kind::kRevoked};
  return {Kind::kAccepted, std::move(peer->name)};
}

}  // namespace kvferry
