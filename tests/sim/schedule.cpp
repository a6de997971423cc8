#include "schedule.h"

#include <fmt/format.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "schedule_log.h"
#include "sim_world.h"

namespace kvferry::sim {
namespace {

constexpr int kStepsOfTrouble = 2000;  // steps of about 10 ms in which things go wrong; few schedules take so many
constexpr int kStepsOfCalm = 10000;    // enough for the lookups of each request to reach their timeouts once more

/// Sends requests to the world, and follows each request from its prefill to its answer.
class Clients {
 public:
  Clients(const SimOptions& options, World& world, Dice& dice)
      : options_(options), world_(world), dice_(dice), prompts_(dice, options.max_tokens_total, options.num_tenants) {}

  bool all_served() const {
    return num_asked_ >= options_.num_requests && waiting_.empty() && world_.num_unfinished() == 0;
  }
  Tally tally() const { return tally_; }

  void step() {
    const bool may_ask = num_asked_ < options_.num_requests && (!options_.asks_alone || waiting_.empty());
    if (may_ask && dice_.chance(options_.asks)) ask();
    hand_over();
    if (dice_.chance(options_.aborts)) abort();
    hand_over();
    end_preparations();
  }
  /// Checks that the decode node computed only the last token of each prompt or, where chunks are whole blocks, only
  /// what follows the last full block, unless there was a mishap to the first chunk that it lacks.
  void check_handoffs() {
    for (const auto& [id, handoff] : handed_off_) {
      const FinishedRequest* done = world_.finished(handoff.to, id);
      if (done == nullptr || done->admissions.empty()) {
        tally_.handoffs_unseen += 1;
        continue;
      }
      if (world_.engine(handoff.to).is_rekeyed(id)) {
        tally_.excused_updated += 1;
        tally_.handoffs_excused += 1;
        continue;
      }
      const std::uint32_t hit = done->admissions[0].hit, chunk_tokens = options_.core.chunk_tokens;
      const bool has_blocks_only = options_.core.keeps_state || options_.core.whole_blocks;
      const std::uint32_t after_block =
          has_blocks_only ? (handoff.num_tokens - 1) % alignment_of(options_.core.groups) : 0;
      const TimeNs when = world_.engine(handoff.to).first_admitted(id);
      if (hit + after_block + 1 >= handoff.num_tokens) {
        tally_.handoffs_whole += 1;
        for (std::size_t chunk = 0; chunk < handoff.chunks.size(); ++chunk) {
          if (world_.mishaps().excuse(handoff, chunk, when) == nullptr) continue;
          tally_.handoffs_whole_anyway += 1;
          break;
        }
        continue;
      }
      // The pool's chunks count from the first chunk on. If the engine's own cache had a longer hit, any chunk before
      // its end may be missing.
      const Admission& admission = done->admissions[0];
      std::uint32_t chunk = admission.hit > admission.local ? hit / chunk_tokens : 0;
      Mishaps::Kind kind = world_.mishaps().excuse(handoff, chunk, when);
      while (kind == nullptr && chunk < hit / chunk_tokens) kind = world_.mishaps().excuse(handoff, ++chunk, when);
      if (kind == nullptr)
        throw Broken(fmt::format("exact-load: request {} finds {} of {} tokens that were handed off", id, hit,
                                 handoff.num_tokens));
      tally_.*kind += 1;
      tally_.handoffs_excused += 1;
    }
  }

 private:
  struct Job {
    std::size_t node = 0;
    RequestSpec spec;
    std::size_t decode = 0;
    TimeNs asked = 0;
    TimeNs due = 0;  // time at which the request goes to its decode node; 0: its prefill has not ended
  };

  std::size_t decode_node() {
    return options_.num_prefill + (options_.num_decode > 1 ? dice_.between(0, options_.num_decode - 1) : 0);
  }

  void ask() {
    num_asked_ += 1;
    std::string id = "r" + std::to_string(num_asked_);
    if (!gone_.empty() && dice_.chance(options_.ids_again)) {
      id = *gone_.begin();
      gone_.erase(gone_.begin());
      handed_off_.erase(id);
    }
    const RequestSpec spec = prompts_.draw(id);
    send_off(spec);
    if (!dice_.chance(options_.siblings)) return;
    RequestSpec sibling = spec;
    sibling.id += "-sibling";
    if (ids_.contains(sibling.id)) return;
    tally_.siblings += 1;
    send_off(sibling);
  }

  void send_off(RequestSpec spec) {
    ids_.insert(spec.id);
    std::size_t node = 0;
    if (world_.num_nodes() > 1 && dice_.chance(0.2)) {
      node = dice_.between(0, static_cast<std::uint32_t>(world_.num_nodes()) - 1);
    } else if (world_.num_nodes() > 1) {
      node = options_.num_prefill > 1 ? dice_.between(0, options_.num_prefill - 1) : 0;
      const std::size_t decode = decode_node();
      waiting_[spec.id] = {node, spec, decode, world_.now(), 0};
      if (dice_.chance(options_.pushes)) spec.push_to = world_.push_target(dice_.chance(0.9) ? decode : decode_node());
      spec.max_tokens = 1;
      const bool fits = spec.prompt.size() + 2 <= options_.max_tokens_total;
      if (spec.push_to && fits && options_.core.prepared_tokens_max > 0 && dice_.chance(0.8)) prepare(spec, decode);
      spec.handoff = true;
    }
    at_[spec.id] = node;
    world_.add(node, spec);
  }

  /// Sends the decode node a preparation of the prompt.
  void prepare(RequestSpec spec, std::size_t decode) {
    // As in vLLM, no request has the id of an earlier one, whose load may not have ended.
    const std::string of = std::exchange(spec.id, fmt::format("{}-prepare-{}", spec.id, num_prepared_));
    if (preparing_.contains(of)) return;
    num_prepared_ += 1;
    spec.prompt.push_back(spec.prompt.back());
    spec.push_to.reset();
    spec.prepares = true;
    preparing_[of] = {decode, spec.id};
    world_.add(decode, spec);
  }

  /// Aborts the preparations whose requests have ended, and now and then another one.
  void end_preparations() {
    for (auto entry = preparing_.begin(); entry != preparing_.end();) {
      const auto& [id, preparation] = *entry;
      const bool is_over = !waiting_.contains(id) && !at_.contains(id);
      if (!is_over && !dice_.chance(options_.aborts / 10)) {
        ++entry;
        continue;
      }
      world_.abort(preparation.node, preparation.id);
      entry = preparing_.erase(entry);
    }
  }

  /// Sends requests whose prefill has ended to their decode node.
  void hand_over() {
    for (auto job = waiting_.begin(); job != waiting_.end();) {
      const std::optional<End> end = world_.end_of(job->second.node, job->first);
      if (!end) {
        ++job;
        continue;
      }
      if (options_.hands_over_within > 0 && job->second.due == 0)
        job->second.due = world_.now() + dice_.between(0, options_.hands_over_within) * kMillisecond;
      if (world_.now() < job->second.due) {
        ++job;
        continue;
      }
      const auto [id, from] = *job;  // a copy, because the entry is erased before the last use of its id
      job = waiting_.erase(job);
      RequestSpec spec = from.spec;
      const FinishedRequest* prefilled = world_.finished(from.node, id);
      const std::size_t node = from.decode;
      // Nodes whose weights differ hand nothing over.
      const bool is_same_model =
          prefilled != nullptr && world_.engine(from.node).weights_at_end(id) == world_.weights(node);
      if (is_same_model && prefilled->handoff) spec.source = world_.source(from.node, *prefilled);
      if (spec.source && spec.cacheable) handed_off_[id] = world_.handoff(from.node, node, spec, from.asked);
      tell("{} goes from node {} to node {}", id, from.node, node);
      at_[id] = node;
      if (*end == End::kAborted) {
        gone_.insert(id);
      } else {
        world_.add(node, spec);
      }
    }
    for (const auto& [id, node] : at_)
      if (!waiting_.contains(id) && world_.end_of(node, id)) gone_.insert(id);
    std::erase_if(at_, [&](const auto& entry) { return gone_.contains(entry.first); });
  }

  void abort() {
    const auto node =
        world_.num_nodes() == 1 ? 0 : dice_.between(0, static_cast<std::uint32_t>(world_.num_nodes()) - 1);
    if (dice_.chance(0.1)) return world_.abort(node, "nobody");
    if (dice_.chance(0.1) && !gone_.empty()) return world_.abort(node, *gone_.begin());
    if (at_.empty()) return;
    auto victim = at_.begin();
    std::advance(victim, dice_.raw() % at_.size());
    const auto [id, at] = *victim;
    world_.abort(at, id);
    if (dice_.chance(0.3)) world_.abort(at, id);
  }

  const SimOptions& options_;
  World& world_;
  Dice& dice_;
  Prompts prompts_;
  Tally tally_;
  std::uint32_t num_asked_ = 0;
  std::set<std::string> ids_, gone_;
  std::map<std::string, std::size_t> at_;  // the node that has the request now
  std::map<std::string, Job> waiting_;     // requests that wait for the end of their prefill
  struct Prepared {
    std::size_t node = 0;
    std::string id;
  };
  std::map<std::string, Prepared> preparing_;  // [request] its preparation
  std::size_t num_prepared_ = 0;
  std::map<std::string, Handoff> handed_off_;
};

}  // namespace

Tally run_schedule(std::uint64_t seed) {
  Dice dice(seed);
  const SimOptions options = draw_options(dice);
  tell(
      "{} prefill and {} decode nodes; chunks of {}, blocks of {}, {} KV groups, {} slots, {} ranks; {} blocks, {} "
      "tokens a step, "
      "{}{}",
      options.num_prefill, options.num_decode, options.core.chunk_tokens, options.core.groups[0].block_tokens,
      options.core.groups.size(), options.core.num_slots, options.core.num_ranks, options.engine.num_blocks - 1,
      options.engine.token_budget, options.engine.async ? "async" : "sync",
      options.engine.num_drafts > 0 ? ", drafts" : "");
  World world(options, dice);
  Clients clients(options, world, dice);
  for (int steps = 0; !clients.all_served(); ++steps) {
    if (steps == kStepsOfTrouble) world.calm_down();
    if (steps > kStepsOfTrouble + kStepsOfCalm)
      throw Broken(fmt::format("bounded-hold: {} requests make no progress", world.num_unfinished()));
    clients.step();
    world.step();
  }
  clients.check_handoffs();
  world.settle();
  Tally tally = world.tally();
  tally.add(clients.tally());
  return tally;
}

}  // namespace kvferry::sim
