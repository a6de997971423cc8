// Measures kvferry's transport, called as a worker node calls it: submit(), wait() and poll().
#include <filesystem>
#include <fstream>
#include <optional>

#include "launch/bench/harness/interrupt.h"
#include "launch/bench/harness/line_link.h"
#include "launch/bench/harness/programs.h"
#include "launch/bench/transfer/engine.h"
#include "transport/make_transport.h"

namespace kvferry::bench {
namespace {

constexpr const char* kKey = "a key that everybody may know: the bench's bytes are no secret";
constexpr const char* kMember = "bench";
constexpr TimeNs kGrantLasts = 3600 * kSecond;

/// Writes a list of members and the key of its only member, and returns the key. Both sides are that member.
net::ClusterKey member_key(const std::string& folder) {
  net::MemberKey key{{kMember, net::Role::kWorker}, {}, net::shared_with(net::Role::kWorker, {kKey})};
  key.secret.fill(1);
  const std::string file = folder + "/bench.key";
  std::ofstream(net::members_file_of(file)) << net::format_members({net::public_of(key)});
  std::ofstream(file) << net::format_member_key(key);
  using std::filesystem::perms;
  std::filesystem::permissions(file, perms::owner_read | perms::owner_write);
  return need(net::read_cluster_key(file)).value();
}

class KvferryEngine final : public Engine {
 public:
  nlohmann::json start(const WorkerSpec& spec, BenchMemory& memory) override {
    TransportOptions options;
    options.path = need(parse_path(spec.path));
    if (spec.setting == "1 thread") options.shm.copy_threads = 1;
    const bool has_member = spec.setting == "member, granted";
    if (spec.setting == "with key" || spec.setting == "encrypted") options.common.key = net::ClusterKey(kKey);
    if (has_member) options.common.key = member_key(folder_.emplace().path());
    if (options.common.key)
      options.tcp.encrypt = spec.setting == "encrypted" ? net::Encrypt::kAlways : net::Encrypt::kNever;
    transport_ = need(make_transport(options));
    region_ = need(transport_->register_region(memory.region()));
    std::string exported = need(transport_->export_region(region_));
    if (has_member || spec.setting == "granted") {
      const GrantTerms terms{.lasts_ns = kGrantLasts, .member = has_member ? kMember : ""};
      exported = need(transport_->export_grant(need(transport_->grant(region_, 0, memory.region().bytes, terms))));
    }
    std::string address = transport_->address();
    if (has_member) {
      const net::Member own = net::public_of(*options.common.key->content()->own);
      address = need(address_for(address, hex_of(net::text_of(own.curve))));
    }
    return {{"address", to_hex(address)}, {"region", to_hex(exported)}};
  }

  void connect(const nlohmann::json& peer) override {
    remote_region_ = need(from_hex(peer.value("region", "")));
    peer_ = need(transport_->connect(need(from_hex(peer.value("address", "")))));
  }

  std::string describe() const override { return transport_->describe(); }

  void transfer() override {
    std::vector<CopyRange> ranges;
    ranges.reserve(own_.size());
    for (std::size_t i = 0; i < own_.size(); ++i) ranges.push_back({own_[i], others_[i], job_.block_bytes});
    submit(std::move(ranges));
    wait_for(1, 1);
  }
  void answer() override {
    wait_for(1, 0);
    submit({});
    wait_for(0, 1);
  }
  void ping() override {
    submit({{own_[0], others_[0], job_.block_bytes}});
    wait_for(1, 1);
  }
  void pong() override {
    wait_for(1, 0);
    submit({{own_[0], others_[0], job_.block_bytes}});
    wait_for(0, 1);
  }

 private:
  void submit(std::vector<CopyRange> ranges) {
    need(transport_->submit({.peer = peer_,
                             .direction = job_.is_push ? Direction::kPush : Direction::kPull,
                             .local = region_,
                             .remote_region = remote_region_,
                             .ranges = std::move(ranges),
                             .notification = "moved"}));
  }

  /// Waits until this many notifications and this many completions have arrived, and consumes them.
  void wait_for(int notifications, int completions) {
    const Deadline deadline(kPatience);
    notifications_ -= notifications;
    completions_ -= completions;
    while (true) {
      for (const Completion& done : transport_->poll()) {
        if (done.code != ErrorCode::kOk) throw Failure({done.code, done.what});
        ++completions_;
      }
      notifications_ += static_cast<int>(transport_->poll_notifications().size());
      if (notifications_ >= 0 && completions_ >= 0) return;
      need(deadline.check("the end of a transfer or the other side's notification"));
      transport_->wait(100 * kMillisecond);
    }
  }

  std::optional<TemporaryFolder> folder_;  // has the file of the member's key, which the transport watches for changes
  std::unique_ptr<Transport> transport_;
  RegionId region_;
  PeerId peer_;
  std::string remote_region_;
  int notifications_ = 0;  // number that arrived minus number that wait_for() consumed
  int completions_ = 0;
};

}  // namespace

std::unique_ptr<Engine> make_kvferry_engine() { return std::make_unique<KvferryEngine>(); }

}  // namespace kvferry::bench
