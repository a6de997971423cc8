// A fleet of real processes: controllers, etcd and Redis, which they use, workers and askers, with links between them.
// The test can break each of them.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "controller/api/client.h"
#include "cut_relay.h"
#include "program.h"
#include "truth.h"

namespace kvferry::faults {

struct FleetOptions {
  std::string kvferry;  // path of the kvferry binary
  std::string folder;   // folder for states and logs
  std::uint32_t num_replicas = 3;
  std::uint32_t num_workers = 8;
  std::uint32_t num_prefixes = 200;
  bool with_etcd = true, with_redis = true;
};

/// Threads: one. The links have threads of their own.
class Fleet {
 public:
  Fleet(const FleetOptions& options, std::uint64_t seed);

  /// Runs one turn of everything in this process: workers change what they hold (if `may_change`) and send messages;
  /// askers send lookups and check the answers. Faults are added to problems().
  void turn(bool may_change, TimeNs bound);
  /// Looks up every prefix at every replica. Returns the first difference in words; empty if all answers are right.
  std::string difference(TimeNs patience);

  std::uint32_t num_replicas() const { return static_cast<std::uint32_t>(replicas_.size()); }
  std::uint32_t num_workers() const { return static_cast<std::uint32_t>(workers_.size()); }
  Program& replica(std::uint32_t i) { return *replicas_[i].program; }
  Program* etcd() { return etcd_.get(); }
  Program* redis() { return redis_.get(); }
  CutRelay& link(std::uint32_t worker, std::uint32_t replica) { return *workers_[worker].links[replica]; }
  void kill_worker(std::uint32_t i);
  void start_worker(std::uint32_t i);

  const std::vector<std::string>& problems() const { return problems_; }
  TimeNs oldest_credit() const { return truth_.oldest_credit(); }
  std::uint64_t num_judged() const { return num_judged_; }
  std::uint64_t num_unanswered() const { return num_unanswered_; }
  std::uint64_t num_changes() const { return num_changes_; }

 private:
  struct Replica {
    std::uint16_t port = 0;
    std::unique_ptr<Program> program;
  };
  struct Worker {
    std::vector<std::unique_ptr<CutRelay>> links;  // [index of the replica]
    std::unique_ptr<controller::Client> client;    // nullptr: the worker is dead
  };
  struct Question {
    std::uint32_t prefix = 0;
    TimeNs asked = 0;
  };
  /// A node without chunks. For each replica there is one that asks only this replica; the last one asks all replicas,
  /// as clients do.
  struct Asker {
    std::unique_ptr<controller::Client> client;
    std::map<std::uint64_t, Question> open;
  };

  void start_engines(const FleetOptions& options);
  void publish_all(std::uint32_t worker);
  void change_something(std::uint32_t worker);
  void serve(std::uint32_t worker, TimeNs now);
  /// Calls `then(question, reply)` for each answer.
  void ask(Asker& asker, TimeNs now, const std::function<void(const Question&, const controller::LookupReply&)>& then);
  template <class Sweep>
  void sweep(Asker& asker, Sweep& sweep, TimeNs now);
  void wait();
  std::uint32_t draw(std::uint32_t below) { return static_cast<std::uint32_t>(random_() % below); }
  std::string endpoints_through_links(const Worker& worker) const;
  std::unique_ptr<controller::Client> make_node(const std::string& name, const std::string& controllers,
                                                std::uint64_t incarnation) const;

  FleetOptions options_;
  std::mt19937_64 random_;
  SteadyClock clock_;
  std::unique_ptr<Program> etcd_, redis_;
  std::vector<Replica> replicas_;
  std::vector<Worker> workers_;
  std::vector<Asker> askers_;                // [index of the replica], and one more, which asks all replicas
  std::vector<std::vector<ChunkKey>> keys_;  // [prefix] keys of the prefix
  Truth truth_;
  std::uint64_t last_incarnation_ = 0;
  std::uint64_t num_judged_ = 0, num_unanswered_ = 0, num_changes_ = 0;
  std::vector<std::string> problems_;
};

}  // namespace kvferry::faults
