// Certificates in TLS handshakes. Only the key in a certificate counts: it must be in the list of members, or be that
// of the holders of the cluster key. Each certificate is signed with its own key.
#pragma once

#include <string>

#include "transport/base/net/derived_keys.h"

struct ssl_st;
struct x509_store_ctx_st;

namespace kvferry::net {

/// Makes a certificate for this Ed25519 key, of which `secret` is the secret part, and lets the connection use it.
void use_certificate(ssl_st* ssl, const Bytes32& secret);
/// Returns the 32 bytes of the public key in the certificate that OpenSSL is about to verify, or "" if its key is not
/// one of Ed25519. OpenSSL itself verifies that the peer has the secret key.
std::string key_in_certificate(x509_store_ctx_st* verified);

}  // namespace kvferry::net
