// The connections of HTTP clients. One thread reads all requests and writes all answers, and other threads compute the
// answers, so that a client that sends or reads slowly occupies no thread. The hosts that clients connect from are
// answered in rotation, so that no host occupies all threads.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "controller/http/http_framing.h"
#include "controller/http/http_queues.h"
#include "controller/http/http_socket.h"
#include "transport/base/clock.h"
#include "transport/base/net/event_fd.h"
#include "transport/base/net/spare_fd.h"
#include "transport/base/net/tcp_socket.h"
#include "transport/base/owned_fd.h"

namespace kvferry::controller {

constexpr std::size_t kHttpThreads = 16;  // number of threads that compute answers
// Limit on connections. A further connection replaces one that waits for its client: of the host that has most
// connections, the one that has waited longest. The further connection is closed at once if no connection waits for its
// client.
constexpr std::size_t kHttpConnectionsMax = 1024;
constexpr TimeNs kHttpRequestMax = 10 * kSecond;  // limit on the time from the first byte of a request to its last
// Limit on the time that the client takes to read an answer, and on the time that it takes to close the connection
// after the connection's last answer.
constexpr TimeNs kHttpAnswerMax = 10 * kSecond;
constexpr TimeNs kHttpIdleMax = 5 * kSecond;       // limit on the time before the first request and between requests
constexpr std::size_t kHttpSmallBytes = 64 << 10;  // bytes that each connection may always have in memory
// Limit on the memory that all connections with more than kHttpSmallBytes use together.
constexpr std::size_t kHttpLargeBytesMax = 64 << 20;

class HttpConnections {
 public:
  /// Returns the bytes of the answer to a request; sets `is_last` if the connection must end after this answer.
  /// Threads: any.
  using Answer = std::function<std::string(std::string_view request, bool& is_last)>;

  /// Returns false if a request with this Authorization header must be refused without reading its body. Threads: the
  /// thread that reads requests.
  using MaySend = std::function<bool(const std::string& authorization)>;

  /// With a certificate, clients must use HTTPS.
  HttpConnections(Answer answer, MaySend may_send_body, std::optional<HttpCertificate> certificate)
      : answer_(std::move(answer)), may_send_body_(std::move(may_send_body)), certificate_(std::move(certificate)) {}
  ~HttpConnections();
  HttpConnections(const HttpConnections&) = delete;
  HttpConnections& operator=(const HttpConnections&) = delete;

  /// Listens and starts the threads; returns the port in use. Errors: kUnavailable, with the reason.
  Result<std::uint16_t> start(const net::HostPort& address);

 private:
  enum class State { kReading, kAnswering, kWriting, kDraining };
  struct Connection {
    HttpSocket socket;
    std::string host;  // address of the client's host
    State state = State::kReading;
    std::string in, out;
    std::size_t num_sent = 0;  // number of bytes of `out` that were sent
    HttpFraming framing;
    bool is_last = false;
    bool is_continued = false;
    std::size_t num_large = 0;  // bytes of this connection that are counted in large_bytes_
    TimeNs since = 0;           // start of the current wait for the client; see end_overdue()
  };
  struct Job {
    std::uint64_t connection = 0;
    std::string bytes;  // first the request, then the answer
    bool is_last = false;
  };
  using Connections = std::unordered_map<std::uint64_t, Connection>;

  void run();
  void work();
  void accept_all();
  void end_slowest();
  void end_overdue(TimeNs now);
  void take_answers();
  void close(Connections::iterator connection);
  // Each of the following functions returns false if the caller must close the connection.
  bool on_ready(std::uint64_t id, Connection& connection);
  bool read(std::uint64_t id, Connection& connection);
  bool parse(std::uint64_t id, Connection& connection);
  bool write(std::uint64_t id, Connection& connection);
  bool account(Connection& connection);
  bool arm(std::uint64_t id, const Connection& connection, std::uint32_t events);

  const Answer answer_;
  const MaySend may_send_body_;
  std::optional<HttpCertificate> certificate_;
  const SteadyClock clock_;
  net::SpareFd spare_;
  net::TcpListener listener_;
  OwnedFd epoll_;
  EventFd wake_up_{std::nothrow};
  Connections connections_;
  std::uint64_t last_id_ = 0;
  std::uint64_t num_ended_ = 0;  // number of connections that were closed to make room for others
  std::size_t large_bytes_ = 0;

  std::mutex mutex_;
  std::condition_variable wanted_;
  FairQueue<Job> jobs_;       // guarded by mutex_
  std::vector<Job> answers_;  // guarded by mutex_
  bool is_ending_ = false;    // guarded by mutex_
  std::vector<std::thread> threads_;
};

}  // namespace kvferry::controller
