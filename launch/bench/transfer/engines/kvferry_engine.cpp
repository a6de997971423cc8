// kvferry's transport, used as a worker node uses it: submit, wait, poll.
#include "launch/bench/harness/interrupt.h"
#include "launch/bench/harness/line_link.h"
#include "launch/bench/transfer/engine.h"
#include "transport/make_transport.h"

namespace kvferry::bench {
namespace {

class KvferryEngine final : public Engine {
 public:
  Result<nlohmann::json> start(const WorkerSpec& spec, BenchMemory& memory) override {
    const Result<Path> path = parse_path(spec.path);
    if (!path) return path.error();
    TransportOptions options;
    options.path = *path;
    Result<std::unique_ptr<Transport>> made = make_transport(options);
    if (!made) return std::move(made).error();
    transport_ = std::move(*made);
    const Result<RegionId> region = transport_->register_region(memory.region());
    if (!region) return region.error();
    region_ = *region;
    const Result<std::string> exported = transport_->export_region(region_);
    if (!exported) return exported.error();
    return nlohmann::json{{"address", to_hex(transport_->address())}, {"region", to_hex(*exported)}};
  }

  Result<void> connect(const nlohmann::json& peer) override {
    const Result<std::string> address = from_hex(peer.value("address", ""));
    Result<std::string> region = from_hex(peer.value("region", ""));
    if (!address) return address.error();
    if (!region) return region.error();
    remote_region_ = std::move(*region);
    const Result<PeerId> id = transport_->connect(*address);
    if (!id) return id.error();
    peer_ = *id;
    return {};
  }

  std::string describe() const override { return transport_->describe(); }

  Result<void> transfer() override {
    std::vector<CopyRange> ranges;
    ranges.reserve(own_.size());
    for (std::size_t i = 0; i < own_.size(); ++i) ranges.push_back({own_[i], others_[i], job_.block_bytes});
    if (Result<void> ok = submit(std::move(ranges)); !ok) return ok;
    return wait_for(1, 1);
  }

  Result<void> answer() override {
    if (Result<void> ok = wait_for(1, 0); !ok) return ok;
    if (Result<void> ok = submit({}); !ok) return ok;
    return wait_for(0, 1);
  }

  Result<void> ping() override {
    if (Result<void> ok = submit({{own_[0], others_[0], job_.block_bytes}}); !ok) return ok;
    return wait_for(1, 1);
  }

  Result<void> pong() override {
    if (Result<void> ok = wait_for(1, 0); !ok) return ok;
    if (Result<void> ok = submit({{own_[0], others_[0], job_.block_bytes}}); !ok) return ok;
    return wait_for(0, 1);
  }

 private:
  Result<void> submit(std::vector<CopyRange> ranges) {
    const Result<TransferId> id = transport_->submit({.peer = peer_,
                                                      .direction = job_.is_push ? Direction::kPush : Direction::kPull,
                                                      .local = region_,
                                                      .remote_region = remote_region_,
                                                      .ranges = std::move(ranges),
                                                      .notification = "moved"});
    if (!id) return id.error();
    return {};
  }

  /// Waits until so many notifications and completions have arrived, and takes them.
  Result<void> wait_for(int notifications, int completions) {
    const Deadline deadline(kPatience);
    notifications_ -= notifications;
    completions_ -= completions;
    while (true) {
      for (const Completion& done : transport_->poll()) {
        if (done.code != ErrorCode::kOk) return Error{done.code, done.what};
        ++completions_;
      }
      notifications_ += static_cast<int>(transport_->poll_notifications().size());
      if (notifications_ >= 0 && completions_ >= 0) return {};
      if (Result<void> ok = deadline.check("a completion or notification"); !ok) return ok;
      transport_->wait(100 * kMillisecond);
    }
  }

  std::unique_ptr<Transport> transport_;
  RegionId region_;
  PeerId peer_;
  std::string remote_region_;
  int notifications_ = 0;  // arrived and not yet taken
  int completions_ = 0;
};

}  // namespace

std::unique_ptr<Engine> make_kvferry_engine() { return std::make_unique<KvferryEngine>(); }

}  // namespace kvferry::bench
