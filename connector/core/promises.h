// The connector's promises (README: "Promises"), each with its name and its check, all in this file. The cores call
// them at the moment a promise could break, in release builds too; tests and simulators call the whole-state ones.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "connector/core/plan.h"
#include "transport/base/check.h"
#include "transport/base/clock.h"

namespace kvferry::promise {

/// Asking again in the same attempt gives the same hit.
inline void idempotent_lookup(std::uint32_t first_hit, std::uint32_t hit_now, const std::string& request) {
  KVFERRY_CHECK(first_hit == hit_now, "idempotent-lookup: request {} was told {} tokens, now {}", request, first_hit,
                hit_now);
}

/// 0 <= external <= cached <= num_tokens - 1: a synchronous load leaves one token to compute.
inline void sane_counts(std::uint64_t local, std::uint64_t external, std::uint64_t num_tokens,
                        const std::string& request) {
  KVFERRY_CHECK(external == 0 || local + external < num_tokens,
                "sane-counts: request {} would have {} local + {} external of {} tokens", request, local, external,
                num_tokens);
}

/// After an allocation with n > 0 external tokens the plan loads exactly those n tokens, in order, into blocks that the
/// job names. `first_token`: of the load, `needed_from`: [KV group] of what is attended to later, both counted from the
/// job's first block.
void exact_load(const LoadJob& job, std::uint32_t first_token, std::uint32_t n, std::uint32_t block_tokens,
                std::span<const std::uint32_t> needed_from);

/// A look-up whose allocation failed leaves nothing behind when the step is planned.
inline void no_stale_lookup(std::size_t specs_left, std::uint64_t step) {
  KVFERRY_CHECK(specs_left == 0, "no-stale-lookup: {} look-ups outlive step {}", specs_left, step);
}

/// A save covers only computed tokens: end <= min(computed, known), and blocks that hold them.
void saved_is_computed(const SaveJob& job, std::uint32_t first_block, std::uint32_t computed, std::uint32_t known,
                       std::uint32_t block_tokens);

/// A slot is written only while it has one writer and no reader.
inline void fenced_reuse(std::uint32_t pins, bool idle, std::uint32_t slot) {
  KVFERRY_CHECK(pins == 0 && idle, "fenced-reuse: slot {} is reused with {} readers{}", slot, pins,
                idle ? "" : " and a writer");
}

/// Every job, pull and report is answered once: never unknown, late or twice.
inline void exactly_once(bool expected, const std::string& what) {
  KVFERRY_CHECK(expected, "exactly-once: {} was reported twice or never asked for", what);
}

/// Every hold has a deadline in the future when it is made, and an owner.
inline void bounded_pin(TimeNs now, TimeNs deadline, const std::string& owner) {
  KVFERRY_CHECK(deadline > now && !owner.empty(), "bounded-pin: hold of '{}' ends at {}, now {}", owner, deadline,
                now);
}

/// Only chunks that every rank wrote, checked and reported are offered.
inline void verified_only(bool ready, std::size_t checksums, std::size_t ranks, std::uint32_t slot) {
  KVFERRY_CHECK(ready && checksums == ranks, "verified-only: slot {} is offered with {} of {} checksums", slot,
                checksums, ranks);
}

}  // namespace kvferry::promise
