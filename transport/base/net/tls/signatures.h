// Signatures with Ed25519 by the keys of certificates. OpenSSL's headers are included only by the source.
#pragma once

#include <string>
#include <string_view>

#include "transport/base/net/derived_keys.h"

namespace kvferry::net {

/// Returns the signature of a text, 64 bytes. The text must begin so that it can't be a certificate or a message of
/// TLS, which are signed with the same key.
std::string signature_of(const Bytes32& certificate_secret, std::string_view text);
bool is_signed_by(const Bytes32& certificate, std::string_view text, std::string_view signature);

}  // namespace kvferry::net
