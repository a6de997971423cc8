"""One-line breaks of connector/core, each of which some test has to catch.

name, the promise it breaks, the file, a line (or a part of one) as it reads, and what stands there instead.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    promise: str
    file: str
    line: str
    broken: str


ADMISSION, CORE = "scheduler/scheduler_admission.cpp", "scheduler/scheduler_core.cpp"
STEPS, SAVES = "scheduler/scheduler_steps.cpp", "scheduler/scheduler_saves.cpp"
FETCH, PEERS = "scheduler/scheduler_fetch.cpp", "scheduler/scheduler_peers.cpp"
ORDERS = "scheduler/scheduler_orders.cpp"
POOL, WORKER, CHAIN = "chunk_pool.cpp", "worker_core.cpp", "token_chain.cpp"
SENDER, RECEIVER = "push/push_sender.cpp", "push/push_receiver.cpp"

MUTANTS = [Mutant(*row) for row in (
    # idempotent-lookup
    ("another-answer-when-asked-again", "idempotent-lookup", ADMISSION,
     "open.num_external = usable > num_local ? usable - num_local : 0;\n    return",
     "open.num_external = usable > num_local ? usable - num_local - 1 : 0;\n    return"),
    ("a-pin-for-each-lookup", "idempotent-lookup", ADMISSION,
     "request.open_lookup = std::move(open);", "request.open_lookup.reset();"),
    ("nothing-held-where-nothing-is-needed", "idempotent-lookup", ADMISSION,
     "if (hit > 0) {", "if (open.num_external > 0) {"),
    # exact-load
    ("no-load-after-a-preemption", "exact-load", ADMISSION,
     "loads_next_.push_back(std::move(job));", "if (!admission.resumed) loads_next_.push_back(std::move(job));"),
    ("loads-into-the-first-blocks", "exact-load", ADMISSION,
     "job.block_ids.push_back(blocks_of(blocks, group, first_block, end_block, end));",
     "job.block_ids.push_back(blocks_of(blocks, group, 0, end_block, end));"),
    ("loads-a-chunk-from-its-start", "exact-load", ADMISSION,
     "from - chunk_start, from - job_start, to - from});", "0, from - job_start, to - from});"),
    ("resumed-looks-up-its-prompt-alone", "exact-load", ADMISSION,
     "for (; i < chain.num_full_chunks(); ++i) {",
     "for (; i < request.num_prompt_tokens / chain.chunk_tokens(); ++i) {"),
    ("windows-are-not-asked-for", "exact-load", ADMISSION, "if (fits == hit) break;", "break;"),
    # no-stale-spec
    ("refused-lookups-stay", "no-stale-spec", STEPS,
     "for (const RequestId& id : refused) end_attempt(requests_.at(id));", "(void)refused;"),
    ("refused-lookups-keep-their-pin", "no-stale-spec", STEPS,
     "for (const RequestId& id : refused) end_attempt(requests_.at(id));",
     "for (const RequestId& id : refused) open_lookups_.erase(id);"),
    ("the-old-answer-is-kept", "no-stale-spec", ADMISSION, "request.open_lookup.reset();", ";"),
    ("the-lookups-pin-is-kept", "no-stale-spec", ADMISSION, "pool_.unpin(request.open_lookup->pin);", ";"),
    # saved-is-computed
    ("saves-beyond-computed", "saved-is-computed", SAVES,
     "std::min(request.computed, request.chain.size());", "request.chain.size();"),
    ("saves-a-rejected-draft", "saved-is-computed", STEPS,
     "request.computed = std::min(request.computed, request.chain.size() - 1);", ""),
    ("decoded-tokens-are-never-saved", "saved-is-computed", SAVES,
     "if (!config_.save_decode_cache) savable", "savable"),
    ("saves-what-rests-on-a-failed-load", "saved-is-computed", STEPS,
     "for (const ChunkRef chunk : saving_) pool_.fail_write(chunk);", ""),
    ("a-failed-requests-blocks-are-saved", "saved-is-computed", CORE,
     "if (request.running && !aborted) {", "if (request.running) {"),
    ("a-reset-trusts-what-is-planned", "saved-is-computed", CORE,
     "invalidate_planned_saves();\n  receiver_.invalidate();", "receiver_.invalidate();"),
    ("tokens-taken-back-count-as-computed", "saved-is-computed", CORE,
     "request->computed = std::min(request->computed, keep);", ""),
    # fenced-reuse
    ("evicts-under-a-reader", "fenced-reuse", POOL, "return slots_[i].pins == 0; });", "return true; });"),
    ("frees-under-a-reader", "fenced-reuse", POOL,
     "slot.state = slot.pins == 0 ? State::kFree : State::kRetired;", "slot.state = State::kFree;"),
    ("generations-stand-still", "fenced-reuse", POOL, "slot.ref.generation += 1;", ""),
    ("block-lists-are-appended-to", "fenced-reuse", STEPS,
     "if (scheduled.block_ids) request->blocks = *scheduled.block_ids;",
     "if (scheduled.block_ids) for (std::size_t g = 0; g < request->blocks.size(); ++g) request->blocks[g].insert("
     "request->blocks[g].end(), (*scheduled.block_ids)[g].begin(), (*scheduled.block_ids)[g].end());"),
    ("saves-of-a-preemption-read-the-new-blocks", "fenced-reuse", STEPS,
     "&& request->admitted_in <= step_) release_blocks", ") release_blocks"),
    ("a-doubled-answer-ends-the-lease-that-is-read", "fenced-reuse", FETCH,
     "if (std::any_of(pulls_.begin(), pulls_.end(), is_in_use)) return;", ""),
    ("a-worker-writes-where-it-writes", "fenced-reuse", WORKER,
     "promise::fenced_reuse(0, !target.writing && chunk.generation > target.generation, chunk.slot);", ""),
    # exactly-once
    ("a-load-is-reported-twice", "exactly-once", STEPS,
     "found->second.ranks_done.insert(report.rank).second,", "(found->second.ranks_done.insert(report.rank), true),"),
    ("a-rank-reports-its-write-twice", "exactly-once", POOL,
     "rank < num_ranks_ && !slot.written[rank],", "rank < num_ranks_,"),
    ("a-pull-is-answered-twice", "exactly-once", WORKER, "pulls_.erase(found);", ""),
    ("an-unknown-lease-ends-a-pin", "exactly-once", PEERS,
     "if (found == leases_.end()) return;", "if (found == leases_.end()) return void(pool_.unpin(PinId{lease}));"),
    ("saves-of-the-gone-are-never-sent", "exactly-once", STEPS,
     "plan.saves_before = std::exchange(saves_before_next_, {});", "saves_before_next_.clear();"),
    # bounded-hold
    ("pins-never-expire", "bounded-hold", POOL,
     "const bool expired = it->second.deadline <= now;", "const bool expired = false;"),
    ("deadlines-are-not-checked", "bounded-hold", CORE,
     "counters_.pins_expired += pool_.expire_pins(now).size();", ""),
    ("a-load-keeps-its-pin", "bounded-hold", STEPS, "pool_.unpin(load.pin);", ""),
    ("a-lease-is-too-long", "bounded-hold", PEERS, "now + config_.lease_ttl);", "now + 3 * config_.lease_ttl);"),
    ("a-lease-is-not-given-back", "bounded-hold", FETCH,
     "if (pull.lease != 0) actions_.push_back(ReleaseLease{pull.endpoint, pull.lease});", ""),
    ("fetches-have-no-end", "bounded-hold", CORE, "request.fetch->try_deadline <= now) overdue", "false) overdue"),
    ("lookups-wait-for-ever", "bounded-hold", ADMISSION,
     "if (now < request.wait_deadline) return {true, 0};", "return {true, 0};"),
    ("the-whole-pool-may-be-pinned", "bounded-hold", ORDERS,
     "if (num_controller_pinned_ + chunks.size() < num_allowed)", "if (num_allowed + 1 > 0)"),
    # sane-counts
    ("a-full-hit-is-given-whole", "sane-counts", ADMISSION,
     "const std::uint32_t hit = std::min(coverage.tokens, request.chain.size() - 1);",
     "const std::uint32_t hit = coverage.tokens;"),
    ("hits-are-counted-at-each-lookup", "sane-counts", ADMISSION,
     "if (open.num_external > 0) counters_.lookup_hits += 1;",
     "if (open.num_external > 0) counters_.lookup_hits += 1, counters_.hit_tokens += open.num_external;"),
    ("a-counter-shrinks", "sane-counts", ADMISSION,
     "counters_.resumed_hit_tokens += num_external;", "counters_.resumed_hit_tokens -= num_external;"),
    ("loads-count-what-the-best-rank-has", "sane-counts", STEPS,
     "admission.loaded = std::min(admission.loaded, done.tokens_loaded);", ""),
    ("two-admissions-with-one-number", "sane-counts", ADMISSION,
     "if (!request.attempt_open) request.attempt.value += 1;", ""),
    # verified-only
    ("offers-what-is-not-ready", "verified-only", PEERS,
     "if (slot == nullptr || slot->state != ChunkPool::State::kReady) continue;", "if (slot == nullptr) continue;"),
    ("other-models-are-served", "verified-only", PEERS,
     "if (request.fingerprint != config_.fingerprint) {", "if (false) {"),
    ("pulled-bytes-are-taken-as-they-are", "verified-only", FETCH,
     "pool_.rank_written(item.local, rank, is_ok, checksum)", "pool_.rank_written(item.local, rank, true, checksum)"),
    ("what-is-put-together-gets-no-checksum", "verified-only", FETCH,
     "has_checksums ? item.checksums[rank] : is_ok ? checksums[i] : 0;", "has_checksums ? item.checksums[rank] : 0;"),
    ("a-failed-write-is-ready", "verified-only", POOL, "slot.write_failed |= !ok;", ""),
    ("ready-when-the-first-rank-wrote", "verified-only", POOL,
     "if (++slot.ranks_done < num_ranks_) return false;", "if (++slot.ranks_done > 1) return false;"),
    ("a-damaged-chunk-is-offered-again", "verified-only", STEPS,
     "pool_.invalidate(chunk);  // a damaged chunk is never offered again", ""),
    ("a-worker-reads-any-generation", "verified-only", WORKER,
     "return source.complete && !source.writing && source.generation == chunk.generation;",
     "return source.complete && !source.writing;"),
    ("a-tail-longer-than-its-slot", "verified-only", ORDERS,
     "std::erase_if(replication.remaining, "
     "[&](const ChunkMeta& chunk) { return chunk.num_tokens > config_.chunk_tokens; });", ""),
    ("keys-of-tokens-taken-back", "verified-only", CHAIN,
     "if (keys_.size() > num_full_chunks()) keys_.resize(num_full_chunks());", ""),
    # no-engine-death
    ("an-answer-that-no-fetch-awaits", "no-engine-death", FETCH,
     "if (found == fetches_.end()) return;", ""),
    ("an-answer-after-the-request-left", "no-engine-death", CORE,
     "fetches_.erase(request.fetch->id);  // a pull", "// a pull"),
    ("checksums-of-too-few-ranks", "no-engine-death", FETCH,
     "const bool has_checksums = leased.checksums.size() == config_.num_ranks;",
     "const bool has_checksums = !leased.checksums.empty();"),
    ("an-answer-about-what-was-not-asked", "no-engine-death", FETCH,
     "if (leased.index >= wanted.size()) continue;", ""),
    # pushes
    ("a-push-is-told-before-its-save", "verified-only", SENDER,
     "if (!item.failed && !item.is_ready) return;", ""),
    ("a-failed-save-is-pushed", "verified-only", SENDER,
     "const bool is_good = !item.failed && !push.is_dropped", "const bool is_good = !push.is_dropped"),
    ("an-invalidated-chunk-is-pushed", "verified-only", SENDER,
     " && slot.state == ChunkPool::State::kReady;\n  if (push.is_answered)", ";\n  if (push.is_answered)"),
    ("one-rank-pushes-for-all", "verified-only", SENDER,
     "if (item.ranks_done.size() < parts_.config.num_ranks) return;", "if (item.ranks_done.empty()) return;"),
    ("a-slot-is-pushed-unpinned", "fenced-reuse", SENDER,
     "if (item.state == State::kTransferring) parts_.pool.unpin(item.pin);", ""),
    ("a-dropped-push-is-never-erased", "bounded-hold", SENDER,
     "if (push.items[index].state == State::kTransferring) finish(id, push, index);", ";"),
    ("an-unanswered-push-stays", "bounded-hold", SENDER,
     "push.is_answered = true;  // an overdue answer is not waited for any longer", ""),
    ("a-finished-request-settles-nothing", "bounded-hold", SENDER,
     "if (is_waiting && parts_.pool.find(item.meta.key) == nullptr) fail(id, push, index);", "(void)is_waiting;"),
    ("a-granted-slot-is-ready-at-once", "fenced-reuse", RECEIVER,
     "if (--chunk.ranks_left > 0) continue;", ""),
    ("a-settlement-is-taken-twice", "exactly-once", RECEIVER,
     "if (found == reservation.chunks.end() || !found->second.is_granted) continue;",
     "if (found == reservation.chunks.end()) continue;"),
    ("a-pushed-window-is-lost", "exact-load", RECEIVER,
     "if (ok) parts_.pool.set_window_from(chunk.slot, settled.window_from);", ""),
    ("a-reservation-without-an-end", "bounded-hold", RECEIVER,
     "if (reservation.deadline > now) continue;", "continue;"),
    ("a-reset-cache-takes-old-pushes", "verified-only", RECEIVER, "parts_.pool.fail_write(chunk.slot);", ";"),
    ("more-than-half-is-granted", "bounded-hold", RECEIVER,
     "if (ticket_of_.size() >= parts_.pool.num_slots() / 2) continue;", ""),
)]
