// The connector's promises, which tests/PROOF.md lists and proves. Each promise here has a name and a check. The cores
// call the check wherever the promise could break, in release builds too.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "connector/core/core_config.h"
#include "connector/core/plan.h"
#include "transport/base/check.h"
#include "transport/base/clock.h"

namespace kvferry::promise {

/// The promise idempotent-lookup: in one attempt, lookups after the first answer find as many tokens as that answer.
inline void idempotent_lookup(std::uint32_t first_hit, std::uint32_t hit_now, const std::string& request) {
  KVFERRY_CHECK(first_hit == hit_now,
                "idempotent-lookup: the lookup of request {} found {} tokens, but its repetition found {}", request,
                first_hit, hit_now);
}

/// The promise sane-counts: if there are external tokens, local + external < num_tokens, because the engine must
/// compute at least one token itself.
inline void sane_counts(std::uint64_t local, std::uint64_t external, std::uint64_t num_tokens,
                        const std::string& request) {
  KVFERRY_CHECK(external == 0 || local + external < num_tokens,
                "sane-counts: request {} can't use {} local and {} external tokens: at least one of its {} tokens must "
                "be computed",
                request, local, external, num_tokens);
}

/// The promise exact-load: after an allocation with n > 0 external tokens, the items of the load job load exactly n
/// tokens from first_token on, in order. In each KV group the job has a block for every token from needed_from[group]
/// on; earlier blocks may be missing, because a window no longer reaches them. Tokens are counted from the start of the
/// job's first block. With CoreConfig::whole_blocks the load begins and ends at a multiple of `unit` tokens.
void exact_load(const LoadJob& job, std::uint32_t first_token, std::uint32_t n, std::span<const KvGroup> groups,
                std::span<const std::uint32_t> needed_from, std::uint32_t unit = 1);

/// The promise no-stale-spec: when a step is planned, no lookup that was made before is still open.
inline void no_stale_spec(std::size_t specs_left, std::uint64_t step) {
  KVFERRY_CHECK(specs_left == 0, "no-stale-spec: {} lookups of earlier steps are still open when step {} is planned",
                specs_left, step);
}

/// The promise saved-is-computed: a save covers only tokens that are computed and known, and the job's blocks contain
/// these tokens. `job_start` is the request's token at which the job's first blocks begin, `known` the number of tokens
/// in the request's chain. With CoreConfig::whole_blocks a save begins and ends at a multiple of `unit` tokens, because
/// the bytes of a block are computed only when all its tokens are.
void saved_is_computed(const SaveJob& job, std::uint32_t job_start, std::uint32_t computed, std::uint32_t known,
                       std::span<const KvGroup> groups, std::uint32_t unit = 1);

/// Also part of the promise saved-is-computed: a node with CoreConfig::only_reads saves no KV, because its blocks have
/// other KV than its fingerprint says.
inline void saved_is_computed_alike(bool only_reads, const std::string& request) {
  KVFERRY_CHECK(
      !only_reads,
      "saved-is-computed: request {} saves KV, but this node converts chunks (chunk_dtype) and must save none",
      request);
}

/// The promise fenced-reuse: a slot or frame is reused for another chunk only while nothing reads or writes it.
inline void fenced_reuse(std::uint32_t pins, bool idle, std::uint32_t slot) {
  KVFERRY_CHECK(pins == 0 && idle, "fenced-reuse: pool slot {} is reused while it has {} readers{}", slot, pins,
                idle ? "" : " and a write that has not ended, a chunk in a GPU frame, or a newer chunk");
}

/// The promise fair-eviction: a chunk is evicted for a chunk of another tenant only if its own tenant is idle or has
/// more slots than its share.
inline void fair_eviction(bool is_own_or_idle, std::uint32_t num_slots, std::uint32_t share) {
  KVFERRY_CHECK(is_own_or_idle || num_slots > share,
                "fair-eviction: a chunk of a tenant with {} slots, which is within its share of {}, is evicted for "
                "another tenant",
                num_slots, share);
}

/// The promise purged-is-gone: a chunk that a purged node or member gave, or that was computed from such a chunk, is
/// not offered to other nodes.
inline void purged_is_gone(bool is_purged, std::uint32_t slot) {
  KVFERRY_CHECK(!is_purged,
                "purged-is-gone: the chunk in pool slot {} is offered to other nodes, but it came, or was computed, "
                "from KV of a purged node or member",
                slot);
}

/// The promise exactly-once: every job, pull and pin that was requested ends exactly once, and nothing ends that was
/// not requested. `what` and `args` name the event; they are formatted only if the promise is broken.
template <class... Args>
void exactly_once(bool expected, fmt::format_string<const Args&...> what, const Args&... args) {
  KVFERRY_CHECK(expected, "exactly-once: {} came twice, or fits nothing that was requested",
                fmt::format(what, args...));
}

/// The promise bounded-hold: every pin of a slot, every pull and every push has an owner and, when it begins, a
/// deadline in the future.
inline void bounded_hold(TimeNs now, TimeNs deadline, const std::string& owner) {
  KVFERRY_CHECK(
      deadline > now && !owner.empty(),
      "bounded-hold: a pin, pull or push needs an owner and a deadline in the future, but has the owner '{}' and the "
      "deadline {} ns at time {} ns",
      owner, deadline, now);
}

/// The promise verified-only: only chunks that every rank has written, verified and reported are loaded or offered to
/// other nodes. A chunk that some rank does not have in its slot yet is offered only to nodes that read it from frames.
/// A chunk that is still being saved is offered, without checksums, only to the node that pulls it for a push, which
/// may read the layers that every rank has in its frame; it is complete there when it has the checksums told at the
/// end. The load of a preparation may begin before its chunks are verified, but is complete only afterwards.
inline void verified_only(bool ready, std::size_t checksums, std::size_t ranks, std::uint32_t slot) {
  KVFERRY_CHECK(ready && checksums == ranks,
                "verified-only: the chunk in pool slot {} is loaded or offered; it is {} and has checksums of {} of {} "
                "ranks",
                slot, ready ? "complete" : "incomplete or was replaced", checksums, ranks);
}
inline void verified_only_in_slots(std::uint32_t ranks_in_frames, std::uint32_t slot, bool reads_frames = false) {
  KVFERRY_CHECK(ranks_in_frames == 0 || reads_frames,
                "verified-only: pool slot {} is offered to other nodes, but {} ranks have its chunk in a frame of GPU "
                "memory only",
                slot, ranks_in_frames);
}
inline void verified_only_while_saved(bool reads_frames, std::uint64_t push, std::size_t checksums,
                                      std::uint32_t slot) {
  KVFERRY_CHECK(
      reads_frames && push != 0 && checksums == 0,
      "verified-only: the chunk in pool slot {}, which is still being saved, is offered {} checksums to a node "
      "that {} it from frames for push {}; allowed: without checksums, from frames, for a push",
      slot, checksums == 0 ? "without" : "with", reads_frames ? "reads" : "does not read", push);
}
inline void verified_only_in_all_frames(std::uint32_t told, std::span<const std::uint32_t> done, std::uint32_t slot) {
  for (std::size_t rank = 0; rank < done.size(); ++rank)
    KVFERRY_CHECK(
        done[rank] >= told,
        "verified-only: {} groups of layers of the chunk in pool slot {} are announced, but rank {} has {} of "
        "them in its frame",
        told, slot, rank, done[rank]);
}
inline void verified_only_when_settled(bool is_good, bool has_checksums, std::uint32_t slot) {
  KVFERRY_CHECK(!is_good || has_checksums,
                "verified-only: the chunk in pool slot {}, which was pulled while its holder saved it, is complete "
                "before its checksums are known",
                slot);
}
inline void verified_only_when_prepared(bool ended_in_order, const std::string& request) {
  KVFERRY_CHECK(
      ended_in_order,
      "verified-only: request {}, which prepares the load of a later one, was loaded completely before all of its "
      "chunks were verified",
      request);
}

}  // namespace kvferry::promise
