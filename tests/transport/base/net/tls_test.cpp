// Tests the texts of OpenSSL's errors.
#include <gmock/gmock.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#include <cerrno>
#include <string>

#include "transport/base/net/tls/openssl_error.h"

namespace kvferry::net {
namespace {

TEST(OpenSslError, IsTheFirstOne) {
  ::ERR_clear_error();
  EXPECT_EQ(openssl_error("nothing"), "nothing");
  ERR_raise(ERR_LIB_SSL, SSL_R_DECRYPTION_FAILED_OR_BAD_RECORD_MAC);
  ERR_raise(ERR_LIB_SSL, ERR_R_SSL_LIB);
  EXPECT_EQ(openssl_error("nothing"), "decryption failed or bad record mac");
  ::ERR_clear_error();
  ERR_raise(ERR_LIB_SYS, ENOENT);
  ERR_raise(ERR_LIB_SSL, ERR_R_SYS_LIB);
  EXPECT_EQ(openssl_error("nothing"), "No such file or directory");
  ::ERR_clear_error();
}

}  // namespace
}  // namespace kvferry::net
