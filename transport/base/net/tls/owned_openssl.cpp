#include "transport/base/net/tls/owned_openssl.h"

#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

namespace kvferry::net {

void FreeOpenSsl::operator()(SSL_CTX* context) const { ::SSL_CTX_free(context); }
void FreeOpenSsl::operator()(SSL* session) const { ::SSL_free(session); }
void FreeOpenSsl::operator()(EVP_PKEY* key) const { ::EVP_PKEY_free(key); }
void FreeOpenSsl::operator()(EVP_MD_CTX* digest) const { ::EVP_MD_CTX_free(digest); }
void FreeOpenSsl::operator()(X509* certificate) const { ::X509_free(certificate); }

}  // namespace kvferry::net
