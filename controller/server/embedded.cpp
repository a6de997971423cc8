#include "controller/server/embedded.h"

#include <deque>
#include <mutex>
#include <unordered_map>

#include "controller/client/client_link.h"
#include "controller/directory/sessions.h"
#include "controller/protocol/wire.h"
#include "transport/base/net/event_fd.h"

namespace kvferry::controller {
namespace {

class SharedSessions final : public EmbeddedController,
                             public std::enable_shared_from_this<SharedSessions>,
                             private ReplySender {
 public:
  SharedSessions(const DirectoryOptions& options, const Clock& clock)
      : clock_(clock), sessions_(options, clock.now()) {}

  std::unique_ptr<Client> connect(ClientOptions options) override;
  Status status() override {
    const std::lock_guard lock(mutex_);
    return sessions_.status(clock_.now());
  }

  /// Messages to one client.
  struct Mailbox {
    std::deque<std::string> messages;
    EventFd wake_up{std::nothrow};  // raised while `messages` is not empty
  };

  ConnectionId open(Mailbox* mailbox) {
    const std::lock_guard lock(mutex_);
    const ConnectionId id = sessions_.open();
    mailboxes_[id] = mailbox;
    return id;
  }
  void close(ConnectionId id) {
    const std::lock_guard lock(mutex_);
    mailboxes_.erase(id);
    sessions_.disconnected(id);
  }
  void receive(ConnectionId from, std::string_view bytes) {
    const std::lock_guard lock(mutex_);
    sessions_.receive(from, bytes, clock_.now(), *this);
  }
  void expire() {
    const std::lock_guard lock(mutex_);
    sessions_.expire(clock_.now());
  }
  std::optional<std::string> next_message(Mailbox& mailbox) {
    const std::lock_guard lock(mutex_);
    mailbox.wake_up.clear();
    if (mailbox.messages.empty()) return std::nullopt;
    std::string message = std::move(mailbox.messages.front());
    mailbox.messages.pop_front();
    if (!mailbox.messages.empty()) mailbox.wake_up.set();
    return message;
  }

 private:
  static constexpr std::size_t kMessagesMax = 16'384;  // bound for a client whose owner does not call process()

  bool send(ConnectionId to, std::string_view bytes) override {
    const auto mailbox = mailboxes_.find(to);
    if (mailbox == mailboxes_.end() || mailbox->second->messages.size() >= kMessagesMax) return false;
    mailbox->second->messages.emplace_back(bytes);
    mailbox->second->wake_up.set();
    return true;
  }

  const Clock& clock_;
  std::mutex mutex_;
  Sessions sessions_;
  std::unordered_map<ConnectionId, Mailbox*> mailboxes_;
};

/// A connection whose messages are function calls.
class EmbeddedLink final : public ClientLink {
 public:
  explicit EmbeddedLink(std::shared_ptr<SharedSessions> controller)
      : controller_(std::move(controller)), connection_(controller_->open(&mailbox_)) {}
  ~EmbeddedLink() override { controller_->close(connection_); }

  int fd() const override { return mailbox_.wake_up.fd(); }
  void process(TimeNs) override {}
  std::optional<std::string_view> receive() override {
    std::optional<std::string> message = controller_->next_message(mailbox_);
    if (!message) {
      controller_->expire();  // after this turn's messages, so that heartbeats count before leases expire
      return std::nullopt;
    }
    message_ = std::move(*message);
    return message_;
  }
  bool send(std::string_view message) override {
    if (message.size() > wire::kMessageBytesMax) return false;
    controller_->receive(connection_, message);
    return true;
  }
  void set_corked(bool) override {}
  void reconnect() override {
    controller_->close(connection_);
    connection_ = controller_->open(&mailbox_);
  }
  bool has_broken() override { return false; }
  void linger(int) override {}

 private:
  std::shared_ptr<SharedSessions> controller_;
  SharedSessions::Mailbox mailbox_;
  ConnectionId connection_;
  std::string message_;
};

std::unique_ptr<Client> SharedSessions::connect(ClientOptions options) {
  options.lookup_timeout_ms = 0;
  return make_client_over(std::make_unique<EmbeddedLink>(shared_from_this()), std::move(options));
}

}  // namespace

std::shared_ptr<EmbeddedController> EmbeddedController::make(const DirectoryOptions& options, const Clock& clock) {
  return std::make_shared<SharedSessions>(options, clock);
}

}  // namespace kvferry::controller
