// Counts how often everything happened in many schedules, because a simulation in which nothing happens proves nothing.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::sim {

// Each counter has the text that the report prints.
#define KVFERRY_SIM_TALLY(X)                                                       \
  X(steps, "engine steps")                                                         \
  X(requests, "requests")                                                          \
  X(siblings, "requests with a sibling of the same prompt")                        \
  X(ids_again, "ids used again after their request was gone")                      \
  X(uncacheable, "requests whose KV may not be cached")                            \
  X(salted, "requests with a cache_salt")                                          \
  X(chunked_prefills, "prefills cut into chunks")                                  \
  X(prefix_hits, "hits in the engine's own prefix cache")                          \
  X(lookups_again, "lookups asked again in their attempt")                         \
  X(lookups_pending, "lookups answered `ask again`")                               \
  X(sync_loads, "loads from the pool, synchronous")                                \
  X(several_groups, "requests of models with several KV groups")                   \
  X(unlike_blocks, "requests of models whose KV groups have unlike blocks")        \
  X(unlike_windows, "requests of models whose windows have unlike sizes")          \
  X(restarting_windows, "requests of models with chunked local attention")         \
  X(whole_blocks, "requests of models whose chunks are whole blocks")              \
  X(async_loads, "loads from the pool, asynchronous")                              \
  X(async_failed, "asynchronous loads that failed")                                \
  X(preparations, "preparations that began")                                       \
  X(prepared, "preparations whose end was ordered")                                \
  X(state_loads, "loads of models with state")                                     \
  X(window_chunks, "chunks without the start of their window")                     \
  X(preemptions, "preemptions for lack of blocks")                                 \
  X(preempted_by_reset, "preemptions by reset_prefix_cache")                       \
  X(stale_outputs, "outputs that came after their request's preemption")           \
  X(dropped_outputs, "outputs dropped")                                            \
  X(resumed_hits, "resumed requests with an external hit")                         \
  X(local_and_external, "admissions with a local and an external hit")             \
  X(resets_running, "reset_prefix_cache with running requests")                    \
  X(resets_idle, "reset_prefix_cache without running requests")                    \
  X(resets_connector, "reset_cache of the connector")                              \
  X(sleeps, "engine sleeps and wakes")                                             \
  X(weight_updates, "updates of the weights")                                      \
  X(rekeyed, "requests that got other keys by an update")                          \
  X(drafts, "speculative tokens")                                                  \
  X(drafts_rejected, "speculative tokens rejected")                                \
  X(stops, "requests ended by a stop token")                                       \
  X(abort_before_lookup, "aborts before the first lookup")                         \
  X(abort_while_pending, "aborts while a fetch was pending")                       \
  X(abort_after_refusal, "aborts between a lookup and its allocation")             \
  X(abort_running, "aborts while running")                                         \
  X(abort_preempted, "aborts while preempted")                                     \
  X(abort_while_loading, "aborts while an asynchronous load was under way")        \
  X(abort_again, "aborts of requests that were gone")                              \
  X(abort_unknown, "aborts of ids that never were")                                \
  X(exit_encoder_pending, "allocation given up: encoder outputs not there yet")    \
  X(exit_prefills_deferred, "allocation given up: prefills deferred")              \
  X(exit_drafts_padded, "allocation given up: padded drafts over the budget")      \
  X(exit_unchunked, "allocation given up: prompt over the budget, not chunked")    \
  X(exit_aligned_split, "allocation given up: nothing left after alignment")       \
  X(exit_encoder_budget, "allocation given up: encoder budget spent")              \
  X(exit_no_blocks, "allocation given up: no free blocks")                         \
  X(answer_dropped, "answers that the engine dropped and computed itself")         \
  X(answer_trimmed, "answers that the engine took only a part of")                 \
  X(bad_loads, "loads that found a damaged chunk")                                 \
  X(loads_unreported, "loads whose request ended before their report")             \
  X(loads_cut, "loads that brought less, since they found damage")                 \
  X(garbage_rows, "rows of a step that computed on a failed load")                 \
  X(failed_by_policy, "requests ended by kv_load_failure_policy fail")             \
  X(recovered_by_policy, "requests taken back by the policy recompute")            \
  X(leases_after_saves, "times a lease's answer waited for a save")                \
  X(frame_leases, "leases whose chunks are pinned in frames")                      \
  X(in_frames, "chunks pulled from frame to frame")                                \
  X(saved_in_frames, "saves reported in a frame, before they are in a slot")       \
  X(asked_in_frames, "of both, ones that a node asked for at once")                \
  X(leased_in_frames, "chunks leased that were in frames only")                    \
  X(lacked_slots, "of these, ones whose frame a rank could not reach")             \
  X(frames_lost, "frames whose copy to their slot failed")                         \
  X(unlike_leases, "leases for a node of another shape")                           \
  X(unlike_pulls, "chunks put together from runs of another shape's")              \
  X(unlike_damaged, "damaged chunks found before a lease of another shape")        \
  X(unlike_late, "chunks not hashed in time for a node of another shape")          \
  X(unlike_states, "leases of chunks with states for a node of another shape")     \
  X(states_joined, "ranks' chunks with states read from ranks with smaller parts") \
  X(states_split, "ranks' chunks with states read from ranks with larger parts")   \
  X(states_declined, "pushes of states to a node of another shape, which pulls")   \
  X(states_pushed, "ranks' chunks with states pushed to a node of one shape")      \
  X(lies, "wrong parts told to a node of another shape")                           \
  X(lies_refused, "of these, ones that were refused")                              \
  X(misled, "chunks not read since other wrong parts were told")                   \
  X(saves_of_lost, "saves of blocks that their request had just lost")             \
  X(saves_failed, "saves that failed")                                             \
  X(published_damaged, "chunks published after they were damaged")                 \
  X(evictions, "chunks evicted")                                                   \
  X(evicted_for_tenants, "of these, chunks of a tenant above its share")           \
  X(pool_full, "chunks without a slot")                                            \
  X(pulled_chunks, "chunks pulled from another node")                              \
  X(pull_failures, "chunks not pulled")                                            \
  X(unleased_reads, "reads of slots that no lease holds")                          \
  X(other_replica, "chunks that a second holder gave after a first one failed")    \
  X(purges, "orders to purge what a node gave, or to take KV from it again")       \
  X(purges_of_members, "of these, orders to purge what a member gave")             \
  X(purged_chunks, "chunks purged")                                                \
  X(handoffs_whole, "handoffs that left one token to compute")                     \
  X(handoffs_whole_anyway, "of these, ones on whose way something went wrong")     \
  X(handoffs_excused, "handoffs that left more, each for one reason:")             \
  X(excused_updated, "- the decode node's weights were updated")                   \
  X(excused_died, "- its prefill or decode node was killed")                       \
  X(excused_lost, "- a message about the chunk was lost")                          \
  X(excused_late, "- the chunk or the word of it came too late")                   \
  X(excused_blocked, "- the link, or its bytes, were cut off")                     \
  X(excused_damaged, "- the chunk was damaged")                                    \
  X(excused_unhashed, "- the chunk was hashed late for another shape")             \
  X(excused_in_frame, "- the chunk was long in a frame only, or was lost")         \
  X(excused_garbage, "- a forged answer came first")                               \
  X(excused_forged, "- another chunk was pushed under its key")                    \
  X(excused_save_failed, "- the save of the chunk failed")                         \
  X(excused_evicted, "- the chunk was evicted")                                    \
  X(excused_purged, "- one of the nodes had purged what a node gave")              \
  X(excused_no_slot, "- no slot was free for the chunk")                           \
  X(excused_pulled, "- a pull wrote the chunk at the prefill node")                \
  X(excused_suspected, "- the prefill node was left alone as silent")              \
  X(excused_time_over, "- the chunk was on its way when the wait was over")        \
  X(excused_behind, "- another chunk of the prompt came too late")                 \
  X(excused_parts, "- wrong parts were told for it")                               \
  X(handoffs_unseen, "handoffs whose decode was never admitted")                   \
  X(reservations, "reservations of slots to a node that pushes")                   \
  X(pushed_chunks, "chunks pushed to another node")                                \
  X(announced_pushes, "pushes whose chunks the other node pulls")                  \
  X(announced_layers, "announcements of layers of chunks that are being saved")    \
  X(growing_saves, "saves that grew in a frame, by groups of layers")              \
  X(growing_leases, "chunks leased while they grew")                               \
  X(growth_begun, "pulls of growing chunks, by a rank")                            \
  X(growth_whole, "of these, ones whose bytes had the checksum at the end")        \
  X(growth_mismatched, "of these, ones whose bytes had another one")               \
  X(growth_lost, "of these, ones whose save failed")                               \
  X(growth_paused, "of these, ones of which nothing was announced for long")       \
  X(growth_without_frame, "growing chunks that found no path or frame")            \
  X(layers_pulled, "groups of layers pulled while others were packed")             \
  X(layers_disordered, "groups of layers told after later ones")                   \
  X(layers_told_early, "groups of layers told before they were packed")            \
  X(layers_read_early, "groups of layers read before they were packed")            \
  X(layers_unleased, "groups of layers read after their lease had ended")          \
  X(growth_aborted, "requests aborted while a chunk of theirs grew")               \
  X(growth_preempted, "requests preempted while a chunk of theirs grew")           \
  X(growth_reset, "caches reset while a chunk grew")                               \
  X(growth_holder_died, "nodes killed while they saved a growing chunk")           \
  X(growth_reader_died, "nodes killed while they pulled a growing chunk")          \
  X(announced_chunks, "chunks announced to another node, which pulls them")        \
  X(push_failures, "chunks wanted and not pushed")                                 \
  X(received_chunks, "chunks that another node pushed here")                       \
  X(reservations_failed, "reserved slots revoked empty")                           \
  X(stalled, "slots that their writer left late")                                  \
  X(writes_abandoned, "chunks given up because their writer did not leave")        \
  X(fetch_timeouts, "fetches that ran out of time")                                \
  X(leases, "leases given out")                                                    \
  X(pins_expired, "holds ended by their deadline")                                 \
  X(messages, "messages")                                                          \
  X(lost, "messages lost")                                                         \
  X(doubled, "messages doubled")                                                   \
  X(reordered, "messages that overtook an earlier one")                            \
  X(partitions, "links cut")                                                       \
  X(slow_peers, "slow nodes")                                                      \
  X(blocked, "pairs of nodes whose bytes a firewall dropped")                      \
  X(suspected, "holders left alone because nothing arrived from them")             \
  X(damaged_on_wire, "chunks damaged on the wire")                                 \
  X(damaged_at_rest, "chunks damaged in a pool")                                   \
  X(crashes, "nodes killed")                                                       \
  X(prefill_crashes, "of these, prefill nodes")                                    \
  X(crashed_while_read, "nodes killed while somebody pulled from them")            \
  X(crashed_while_down, "messages to a dead node")                                 \
  X(controller_losses, "losses of the controller")                                 \
  X(stale_offers, "controller answers from the past")                              \
  X(garbage, "garbage from the network")                                           \
  X(forged, "chunks pushed under a key of another length")                         \
  X(mislabeled, "such chunks, or offers of them, found out")                       \
  X(orders, "orders of the controller")

struct Tally {
#define KVFERRY_SIM_FIELD(name, what) std::uint64_t name = 0;
  KVFERRY_SIM_TALLY(KVFERRY_SIM_FIELD)
#undef KVFERRY_SIM_FIELD

  struct Line {
    std::string name, what;
    std::uint64_t count = 0;
  };
  std::vector<Line> lines() const;
  void add(const Tally& other);
};

}  // namespace kvferry::sim
