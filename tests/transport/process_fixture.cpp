#include "tests/transport/process_fixture.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <sstream>

#include "tests/transport/backends.h"
#include "tests/transport/hex.h"
#include "transport/base/check.h"
#include "transport/shared_memory.h"

extern char** environ;

namespace kvferry {
namespace {

class RemoteProcess final : public Remote {
 public:
  RemoteProcess(std::string backend, std::uint64_t bytes) : memory_(SharedMemory::create("test", bytes).value()) {
    int to_child[2];
    int from_child[2];
    KVFERRY_CHECK(::pipe2(to_child, O_CLOEXEC) == 0 && ::pipe2(from_child, O_CLOEXEC) == 0, "no pipes");
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, to_child[0], STDIN_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions, from_child[1], STDOUT_FILENO);
    std::string program = KVFERRY_REMOTE_PROCESS;
    std::string segment = memory_.name();
    char* arguments[] = {program.data(), segment.data(), backend.data(), nullptr};
    const int code = ::posix_spawn(&pid_, program.c_str(), &actions, nullptr, arguments, environ);
    KVFERRY_CHECK(code == 0, "cannot start {}: {}", program, code);
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(to_child[0]);
    ::close(from_child[1]);
    to_child_ = to_child[1];
    from_child_ = from_child[0];
    std::istringstream words(read_line());
    std::string ready;
    words >> ready >> address_ >> region_;
    KVFERRY_CHECK(ready == "ready", "the remote process said '{}'", ready);
  }
  ~RemoteProcess() override {
    kill();
    ::close(to_child_);
    ::close(from_child_);
  }

  std::string address() const override { return from_hex(address_); }
  std::string region() const override { return from_hex(region_); }
  std::span<std::byte> memory() override { return memory_.span(); }

  std::vector<Notification> wait_notifications(std::size_t num_notifications) override {
    while (notes_.size() < num_notifications) {
      if (std::string line = read_line(); !keep_note(line)) {
        KVFERRY_CHECK(line.empty(), "the remote process said '{}'", line);
        break;
      }
    }
    const auto end = notes_.begin() + static_cast<std::ptrdiff_t>(std::min(num_notifications, notes_.size()));
    std::vector<Notification> taken(notes_.begin(), end);
    notes_.erase(notes_.begin(), end);
    return taken;
  }

  RemoteGrant grant(std::uint64_t offset, std::uint64_t bytes, const GrantTerms& terms) override {
    std::istringstream words(
        ask(fmt::format("grant {} {} {:d} {:d} {}", offset, bytes, terms.reads, terms.writes, terms.lasts_ns)));
    RemoteGrant granted;
    std::string exported;
    words >> granted.id.value >> exported;
    granted.exported = from_hex(exported);
    return granted;
  }
  ErrorCode revoke(GrantId grant) override { return code_from(ask(fmt::format("revoke {}", grant))); }
  std::uint64_t num_refused() override { return std::stoull(ask("refused")); }
  ErrorCode unregister() override { return code_from(ask("unregister")); }
  void shut_down() override {
    const std::string answer = ask("quit");
    KVFERRY_CHECK(answer == "bye", "the remote process said '{}'", answer);
  }
  void kill() override {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  void stop() override {
    ::kill(pid_, SIGSTOP);
    int status = 0;
    ::waitpid(pid_, &status, WUNTRACED);  // returns when the process has stopped
  }
  void go_on() override { ::kill(pid_, SIGCONT); }

 private:
  static ErrorCode code_from(const std::string& answer) { return static_cast<ErrorCode>(std::stoi(answer)); }
  bool keep_note(const std::string& line) {
    std::istringstream words(line);
    std::string kind;
    std::string from;
    std::string body;
    words >> kind >> from >> body;
    if (kind != "note") return false;
    notes_.push_back({from_hex(from), from_hex(body)});
    return true;
  }
  /// Returns the answer to one line. Keeps notifications that arrive before the answer.
  std::string ask(const std::string& line) {
    const std::string text = line + '\n';
    KVFERRY_CHECK(::write(to_child_, text.data(), text.size()) > 0, "the remote process does not listen");
    std::string answer = read_line();
    while (keep_note(answer)) answer = read_line();
    KVFERRY_CHECK(!answer.empty(), "the remote process did not answer '{}'", line);
    return answer;
  }
  /// Returns the next line; empty if no line comes in time or the process has ended.
  std::string read_line() {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (std::chrono::steady_clock::now() < deadline) {
      if (const std::size_t end = heard_.find('\n'); end != std::string::npos) {
        std::string line = heard_.substr(0, end);
        heard_.erase(0, end + 1);
        return line;
      }
      if (!is_readable(from_child_, std::chrono::milliseconds(100))) continue;
      char buffer[4096];
      const ssize_t got = ::read(from_child_, buffer, sizeof(buffer));
      if (got <= 0) break;
      heard_.append(buffer, static_cast<std::size_t>(got));
    }
    return "";
  }

  SharedMemory memory_;
  pid_t pid_ = -1;
  int to_child_ = -1;
  int from_child_ = -1;
  std::string heard_;
  std::vector<Notification> notes_;  // notifications that no caller has waited for yet
  std::string address_;
  std::string region_;
};

}  // namespace

std::unique_ptr<Remote> make_remote_process(const std::string& backend, std::uint64_t bytes) {
  return std::make_unique<RemoteProcess>(backend, bytes);
}

}  // namespace kvferry
