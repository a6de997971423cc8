#include "fleet.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <filesystem>
#include <span>

#include "tests/free_port.h"

namespace kvferry::faults {
namespace {

using controller::ClientEvent;

constexpr std::size_t kProblemsMax = 20;
constexpr std::size_t kOpenMax = 8;  // limit on the open questions of an asker
constexpr TimeNs kAnswerPatience = 2 * kSecond;

std::vector<controller::ChunkEntry> chunks_of(std::span<const ChunkKey> keys) {
  std::vector<controller::ChunkEntry> chunks;
  for (const ChunkKey& key : keys) chunks.push_back({key, 256, false, {}});
  return chunks;
}

}  // namespace

Fleet::Fleet(const FleetOptions& options, std::uint64_t seed)
    : options_(options), random_(seed), truth_(options.num_workers, options.num_prefixes) {
  for (std::uint32_t i = 0; i < options.num_prefixes; ++i) keys_.push_back(keys_of_prefix(i));
  start_engines(options);
  workers_.resize(options.num_workers);
  for (std::uint32_t i = 0; i < options.num_workers; ++i) {
    for (const Replica& replica : replicas_) workers_[i].links.push_back(std::make_unique<CutRelay>(replica.port));
    start_worker(i);
  }
  std::string all;
  for (const Replica& replica : replicas_) {
    const std::string endpoint = fmt::format("tcp://127.0.0.1:{}", replica.port);
    askers_.push_back({make_node(fmt::format("asker-{}", askers_.size()), endpoint, 1), {}});
    all += (all.empty() ? "" : ",") + endpoint;
  }
  askers_.push_back({make_node("asker-all", all, 1), {}});
}

void Fleet::start_engines(const FleetOptions& options) {
  const auto file = [&](const std::string& name) { return (std::filesystem::path(options.folder) / name).string(); };
  std::vector<std::string> more;
  if (options.with_etcd) {
    const std::uint16_t port = free_port(), peer_port = free_port();
    const std::string url = fmt::format("http://127.0.0.1:{}", port);
    const std::string peer = fmt::format("http://127.0.0.1:{}", peer_port);
    etcd_ = std::make_unique<Program>(
        std::vector<std::string>{"etcd", "--data-dir", file("etcd"), "--listen-client-urls", url,
                                 "--advertise-client-urls", url, "--listen-peer-urls", peer,
                                 "--initial-advertise-peer-urls", peer, "--initial-cluster", "default=" + peer},
        file("etcd.log"));
    etcd_->start();
    more.insert(more.end(), {"--etcd", url});
  }
  if (options.with_redis) {
    const std::uint16_t port = free_port();
    redis_ = std::make_unique<Program>(std::vector<std::string>{"redis-server", "--port", std::to_string(port), "--dir",
                                                                options.folder, "--save", "", "--appendonly", "no"},
                                       file("redis.log"));
    redis_->start();
    more.insert(more.end(), {"--event-log", fmt::format("redis://127.0.0.1:{}", port)});
  }
  for (std::uint32_t i = 0; i < options.num_replicas; ++i) {
    Replica replica{free_port(), nullptr};
    std::vector<std::string> words{options.kvferry, "controller",
                                   "--bind",        fmt::format("tcp://127.0.0.1:{}", replica.port),
                                   "--state",       file(fmt::format("state-{}", i))};
    words.insert(words.end(), more.begin(), more.end());
    replica.program = std::make_unique<Program>(std::move(words), file(fmt::format("controller-{}.log", i)));
    replica.program->start();
    replicas_.push_back(std::move(replica));
  }
}

std::unique_ptr<controller::Client> Fleet::make_node(const std::string& name, const std::string& controllers,
                                                     std::uint64_t incarnation) const {
  controller::ClientOptions options;
  options.controller = controllers;
  options.node = {EngineId{name}, Incarnation{incarnation}, "kv_both", "tcp://127.0.0.1:1", "faults", "model=a"};
  return controller::make_client(std::move(options)).value();
}

std::string Fleet::endpoints_through_links(const Worker& worker) const {
  std::string all;
  for (const auto& link : worker.links)
    all += fmt::format("{}tcp://127.0.0.1:{}", all.empty() ? "" : ",", link->port());
  return all;
}

void Fleet::kill_worker(std::uint32_t i) {
  if (!workers_[i].client) return;
  // The links are removed first. A process that is killed sends no goodbye, so the destructor of this client must not
  // send one either.
  for (auto& link : workers_[i].links) link = nullptr;
  truth_.die(i, clock_.now());
  workers_[i].client.reset();
  for (const Replica& replica : replicas_) {
    auto& links = workers_[i].links;
    links[static_cast<std::size_t>(&replica - replicas_.data())] = std::make_unique<CutRelay>(replica.port);
  }
}

void Fleet::start_worker(std::uint32_t i) {
  if (workers_[i].client) return;
  workers_[i].client = make_node(Truth::name_of(i), endpoints_through_links(workers_[i]), ++last_incarnation_);
  truth_.live(i, last_incarnation_);
}

void Fleet::publish_all(std::uint32_t worker) {
  for (std::uint32_t prefix = 0; prefix < options_.num_prefixes; ++prefix) {
    const std::uint32_t depth = truth_.depth(worker, prefix);
    if (depth > 0) workers_[worker].client->publish(chunks_of(std::span(keys_[prefix]).first(depth)));
  }
  workers_[worker].client->end_snapshot();
}

void Fleet::change_something(std::uint32_t worker) {
  const std::uint32_t prefix = draw(options_.num_prefixes);
  const std::uint32_t depth = truth_.depth(worker, prefix);
  const std::uint32_t next = draw(3) == 0 ? draw(depth + 1) : std::min(kPrefixKeys, depth + draw(16));
  if (next == depth) return;
  const auto keys = std::span(keys_[prefix]);
  // A real node reports an eviction before it uses the memory again. So the keys in `truth_` are removed after the
  // report.
  if (next < depth)
    workers_[worker].client->evict({keys.begin() + next, keys.begin() + depth});
  else
    workers_[worker].client->publish(chunks_of(keys.subspan(depth, next - depth)));
  truth_.set(worker, prefix, next, clock_.now());
  ++num_changes_;
}

void Fleet::serve(std::uint32_t worker, TimeNs now) {
  for (const ClientEvent& event : workers_[worker].client->process(now)) {
    if (std::holds_alternative<controller::SnapshotWanted>(event)) publish_all(worker);
    if (const auto* refused = std::get_if<controller::Refused>(&event))
      problems_.push_back(fmt::format("worker-{} is refused: {}", worker, refused->reason));
  }
}

void Fleet::ask(Asker& asker, TimeNs now,
                const std::function<void(const Question&, const controller::LookupReply&)>& then) {
  for (const ClientEvent& event : asker.client->process(now)) {
    if (std::holds_alternative<controller::SnapshotWanted>(event)) asker.client->end_snapshot();
    if (std::holds_alternative<controller::Lost>(event)) {  // the answers to its open questions will not come
      num_unanswered_ += asker.open.size();
      asker.open.clear();
    }
    const auto* reply = std::get_if<controller::LookupReply>(&event);
    if (reply == nullptr) continue;
    const auto question = asker.open.find(reply->token);
    if (question == asker.open.end()) continue;
    then(question->second, *reply);
    asker.open.erase(question);
  }
  num_unanswered_ +=
      std::erase_if(asker.open, [&](const auto& entry) { return now - entry.second.asked > kAnswerPatience; });
}

void Fleet::wait() {
  std::vector<pollfd> fds;
  for (const Worker& worker : workers_)
    if (worker.client) fds.push_back({worker.client->fd(), POLLIN, 0});
  for (const Asker& asker : askers_) fds.push_back({asker.client->fd(), POLLIN, 0});
  ::poll(fds.data(), fds.size(), 2);
}

void Fleet::turn(bool may_change, TimeNs bound) {
  wait();
  for (std::uint32_t i = 0; i < num_workers(); ++i) {
    if (!workers_[i].client) continue;
    serve(i, clock_.now());
    if (may_change && draw(4) == 0) change_something(i);
  }
  for (Asker& asker : askers_) {
    const TimeNs now = clock_.now();
    ask(asker, now, [&](const Question& question, const controller::LookupReply& reply) {
      ++num_judged_;
      const std::string wrong = truth_.stale(question.prefix, reply.holders, question.asked, now, bound);
      if (!wrong.empty() && problems_.size() < kProblemsMax)
        problems_.push_back(fmt::format("asker {}: {}", &asker - askers_.data(), wrong));
    });
    while (asker.open.size() < kOpenMax) {
      const std::uint32_t prefix = draw(options_.num_prefixes);
      const Result<std::uint64_t> token = asker.client->lookup({keys_[prefix], {}, {}});
      if (!token) break;
      asker.open[*token] = {prefix, clock_.now()};
    }
  }
  for (const Replica& replica : replicas_)
    if (const std::string how = replica.program->died(); !how.empty()) problems_.push_back(how);
}

std::string Fleet::difference(TimeNs patience) {
  struct Sweep {
    std::uint32_t num_right = 0, next = 0;
    std::string last = "nobody answered";
  };
  std::vector<Sweep> sweeps(askers_.size());
  const auto is_done = [&](const Sweep& sweep) { return sweep.num_right == options_.num_prefixes; };
  for (Asker& asker : askers_) asker.open.clear();
  for (const TimeNs deadline = clock_.now() + patience;;) {
    const TimeNs now = clock_.now();
    for (std::uint32_t i = 0; i < num_workers(); ++i)
      if (workers_[i].client) serve(i, now);
    for (std::size_t i = 0; i < askers_.size(); ++i) sweep(askers_[i], sweeps[i], now);
    const auto behind = std::find_if_not(sweeps.begin(), sweeps.end(), is_done);
    if (behind == sweeps.end()) return {};
    if (now > deadline) {
      const auto number = static_cast<std::size_t>(behind - sweeps.begin());
      return fmt::format("{} is asked: {}",
                         number < replicas_.size() ? fmt::format("controller {}", number) : "any of them",
                         behind->last);
    }
    wait();
  }
}

/// Repeats lookups of all prefixes until all answers of one pass are right.
template <class Sweep>
void Fleet::sweep(Asker& asker, Sweep& sweep, TimeNs now) {
  bool has_differed = false;
  ask(asker, now, [&](const Question& question, const controller::LookupReply& reply) {
    const std::string wrong = truth_.differs(question.prefix, reply.holders);
    if (wrong.empty()) {
      ++sweep.num_right;
    } else {
      sweep.last = wrong;
      has_differed = true;
    }
  });
  if (sweep.num_right == options_.num_prefixes) return;
  if (has_differed) asker.open.clear();
  if (has_differed || (asker.open.empty() && sweep.next > sweep.num_right)) sweep.num_right = sweep.next = 0;
  while (asker.open.size() < kOpenMax && sweep.next < options_.num_prefixes) {
    const Result<std::uint64_t> token = asker.client->lookup({keys_[sweep.next], {}, {}});
    if (!token) {
      sweep.last = token.error().what;
      break;
    }
    asker.open[*token] = {sweep.next++, now};
  }
}

}  // namespace kvferry::faults
