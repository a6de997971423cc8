// Tests what TLS sessions do with a socket that takes no bytes, and the texts of OpenSSL's errors.
#include "transport/base/net/tls.h"

#include <gmock/gmock.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <string>

#include "transport/base/net/tls/openssl_error.h"
#include "transport/base/owned_fd.h"

namespace kvferry::net {
namespace {

/// Two ends of a TLS connection. Each has a socket that a test can fill.
class TlsPair : public ::testing::TestWithParam<Encrypt> {
 protected:
  void SetUp() override {
    std::array<int, 2> ends{};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()), 0);
    here_ = OwnedFd(ends[0]);
    there_ = OwnedFd(ends[1]);
    client_.emplace(context_, here_.get(), false);
    server_.emplace(context_, there_.get(), true);
  }
  /// Sends bytes from one end until the socket takes no more. Returns their number.
  static std::size_t fill(const OwnedFd& end) {
    std::size_t num_sent = 0;
    while (::send(end.get(), "x", 1, MSG_NOSIGNAL) == 1) ++num_sent;
    EXPECT_EQ(errno, EAGAIN);
    return num_sent;
  }
  static void drain(const OwnedFd& end, std::size_t num_bytes) {
    std::string bytes(num_bytes, '\0');
    EXPECT_EQ(::recv(end.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(num_bytes));
    EXPECT_EQ(bytes, std::string(num_bytes, 'x'));
  }
  static bool is_done(std::optional<TlsSession>& session) {
    const Result<bool> done = session->handshake();
    EXPECT_TRUE(done) << done.error().what;
    return done && *done;
  }

  const TlsContext context_{ClusterKey(std::string(64, 'k')), GetParam()};
  OwnedFd here_, there_;
  std::optional<TlsSession> client_, server_;
};
INSTANTIATE_TEST_SUITE_P(Encrypt, TlsPair, ::testing::Values(Encrypt::kNever, Encrypt::kAlways),
                         [](const auto& test) { return test.param == Encrypt::kNever ? "Never" : "Always"; });

TEST_P(TlsPair, AHandshakeWaitsWhileTheSocketIsFull) {
  const std::size_t before_hello = fill(here_);
  EXPECT_FALSE(is_done(client_));
  drain(there_, before_hello);
  EXPECT_FALSE(is_done(client_));  // sends its hello

  const std::size_t before_answer = fill(there_);
  EXPECT_FALSE(is_done(server_));
  drain(here_, before_answer);
  EXPECT_FALSE(is_done(server_));

  const std::size_t before_last = fill(here_);
  EXPECT_FALSE(is_done(client_)) << "its last message is not sent yet, and would come after what the caller writes";
  drain(there_, before_last);
  EXPECT_TRUE(is_done(client_));
  EXPECT_TRUE(is_done(server_));
  EXPECT_EQ(client_->encrypts(), GetParam() == Encrypt::kAlways);
}

TEST(OpenSslError, IsTheFirstOne) {
  ::OPENSSL_init_ssl(OPENSSL_INIT_LOAD_SSL_STRINGS | OPENSSL_INIT_LOAD_CRYPTO_STRINGS, nullptr);
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
