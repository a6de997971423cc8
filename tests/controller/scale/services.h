// Real etcd and Redis for tests. Each has a free port and a folder of its own, and can be killed, stopped and emptied.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/free_port.h"
#include "transport/base/owned_fd.h"

namespace kvferry::controller::scale {

constexpr std::chrono::seconds kServiceDeadline{30};  // much longer than anything in these tests takes

inline bool wait_until(const std::function<bool()>& reached, std::chrono::milliseconds limit = kServiceDeadline) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!reached()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

inline sockaddr_in local_address(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  return address;
}

inline bool answers(int port) {
  const OwnedFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in address = local_address(port);
  return ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
}

inline bool is_installed(const std::string& program) {
  return ::system(("command -v " + program + " >/dev/null 2>&1").c_str()) == 0;
}

/// A program that listens on `port`. It ends with this object, and with the test's process.
class Service {
 public:
  Service(std::vector<std::string> command, int port) : command_(std::move(command)), port_(port) {}
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;
  ~Service() { kill(); }

  void start() {
    std::vector<char*> words;
    for (std::string& word : command_) words.push_back(word.data());
    words.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      const int nowhere = ::open("/dev/null", O_RDWR);
      for (const int fd : {0, 1, 2}) ::dup2(nowhere, fd);
      ::execvp(words[0], words.data());
      ::_exit(127);
    }
    ASSERT_TRUE(wait_until([&] { return answers(port_); })) << command_[0] << " does not listen on port " << port_;
  }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  void stop() const { ::kill(pid_, SIGSTOP); }
  void go_on() const { ::kill(pid_, SIGCONT); }
  int port() const { return port_; }

 private:
  std::vector<std::string> command_;
  int port_;
  pid_t pid_ = 0;
};

class TempFolder {
 public:
  TempFolder() {
    char path[] = "/tmp/kvferry_scaleXXXXXX";
    path_ = ::mkdtemp(path);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

class EtcdService {
 public:
  static bool is_here() { return is_installed("etcd"); }
  EtcdService() { service_.start(); }
  std::string url() const { return client_url_; }
  Service& process() { return service_; }
  void restart() {
    service_.kill();
    service_.start();
  }
  /// Restarts the program without its data, as after the loss of its disk.
  void restart_empty() {
    service_.kill();
    std::filesystem::remove_all(folder_.path() + "/data");
    service_.start();
  }

 private:
  TempFolder folder_;
  int port_ = free_port();
  std::string client_url_ = "http://127.0.0.1:" + std::to_string(port_);
  std::string peer_url_ = "http://127.0.0.1:" + std::to_string(free_port());
  Service service_{
      {"etcd", "--data-dir", folder_.path() + "/data", "--listen-client-urls", client_url_, "--advertise-client-urls",
       client_url_, "--listen-peer-urls", peer_url_, "--initial-advertise-peer-urls", peer_url_, "--initial-cluster",
       "default=" + peer_url_, "--log-level", "error"},
      port_};
};

class RedisService {
 public:
  static bool is_here() { return is_installed("redis-server"); }
  explicit RedisService(std::vector<std::string> more = {}) : service_(command(std::move(more)), port_) {
    service_.start();
  }
  std::string url() const { return "redis://127.0.0.1:" + std::to_string(port_); }
  Service& process() { return service_; }
  void restart() {
    service_.kill();
    service_.start();
  }
  void restart_empty() {
    service_.kill();
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path()))
      std::filesystem::remove_all(entry.path());
    service_.start();
  }

 private:
  std::vector<std::string> command(std::vector<std::string> more) const {
    std::vector<std::string> words = {
        "redis-server", "--port", std::to_string(port_), "--bind", "127.0.0.1", "--dir", folder_.path(),
        "--appendonly", "yes",    "--appendfsync",       "always", "--save",    ""};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  TempFolder folder_;
  int port_ = free_port();
  Service service_;
};

}  // namespace kvferry::controller::scale
