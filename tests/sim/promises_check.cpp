#include "promises_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "sim_blocks.h"
#include "sim_text.h"

namespace kvferry::sim {
namespace {

template <class... Args>
void expect(bool holds, fmt::format_string<Args...> text, Args&&... args) {
  if (!holds) [[unlikely]]
    throw Broken(fmt::format(text, std::forward<Args>(args)...));
}

std::vector<BlockId> slice(const std::vector<BlockId>& blocks, std::uint32_t first, std::uint32_t end) {
  const auto last = std::min<std::size_t>(end, blocks.size());
  return {blocks.begin() + static_cast<std::ptrdiff_t>(std::min<std::size_t>(first, last)),
          blocks.begin() + static_cast<std::ptrdiff_t>(last)};
}

}  // namespace

void PromisesCheck::lookup_answered(const std::string& id, std::uint32_t num_local, const Answer& answer,
                                    std::uint32_t num_tokens, TimeNs pending_for) const {
  expect(!answer.pending || answer.num_external == 0, "sane-counts: lookup of {} pends with {} tokens", id,
         answer.num_external);
  expect(answer.num_external == 0 || num_local + answer.num_external < num_tokens,
         "sane-counts: lookup of {}: {} local + {} external leave nothing of {} to compute", id, num_local,
         answer.num_external, num_tokens);
  expect(!answer.pending || pending_for < config_.load_timeout, "bounded-hold: lookup of {} pends for {} ms", id,
         pending_for / kMillisecond);
}

void PromisesCheck::asked_again(const std::string& id, const Answer& first, const Answer& again,
                                std::size_t holds_before, std::size_t holds_after) const {
  expect(first.pending == again.pending && first.num_external == again.num_external,
         "idempotent-lookup: request {} was told {} tokens{}, now {}{}", id, first.num_external,
         first.pending ? " (pending)" : "", again.num_external, again.pending ? " (pending)" : "");
  expect(holds_before == holds_after, "idempotent-lookup: asking for {} again turns {} holds into {}", id, holds_before,
         holds_after);
}

void PromisesCheck::check_load(const SchedulerCore& core, const AdmittedLoad& admitted, const LoadJob& job) const {
  const std::uint32_t end = admitted.local + admitted.external;
  const std::uint32_t job_start = admitted.local - admitted.local % alignment_of(config_.groups);
  std::uint32_t next = admitted.local - job_start, num = 0;
  for (const LoadItem& item : job.items) {
    expect(item.first_token == next && item.skip_tokens + item.num_tokens <= item.chunk_tokens,
           "exact-load: the load of {} goes on at {} of its blocks, expected {}", job.request_id, item.first_token,
           next);
    next += item.num_tokens;
    num += item.num_tokens;
    const ChunkPool::Slot& slot = core.pool().slot(item.chunk.slot);
    expect(slot.ref == item.chunk && slot.pins > 0, "bounded-hold: the load of {} reads slot {}, which is not pinned",
           job.request_id, item.chunk.slot);
    expect(slot.state == ChunkPool::State::kReady || slot.state == ChunkPool::State::kRetired,
           "verified-only: the load of {} reads slot {} before it is whole", job.request_id, item.chunk.slot);
  }
  const std::uint32_t block = alignment_of(config_.groups);
  expect(!config_.whole_blocks || (admitted.local % block == 0 && admitted.external % block == 0),
         "exact-load: the load of {} after token {} has a part of a block: {} tokens", admitted.id, admitted.local,
         admitted.external);
  expect(num == admitted.external, "exact-load: request {} was allocated {} external tokens, the plan loads {}",
         admitted.id, admitted.external, num);
  expect(job.block_ids.size() == admitted.table.size(), "exact-load: the load of {} names {} KV groups of {}",
         admitted.id, job.block_ids.size(), admitted.table.size());
  for (std::size_t g = 0; g < job.block_ids.size(); ++g) {
    const KvGroup& group = config_.groups[g];
    const std::uint32_t first_block = job_start / group.block_tokens;
    std::vector<BlockId> expected = slice(admitted.table[g], first_block, blocks_for(group, end));
    const std::uint32_t needed = first_attended(group, end) / group.block_tokens;
    for (std::size_t b = 0; group.window > 0 && b < expected.size(); ++b)
      if (first_block + b < needed) expected[b] = kNoBlock;
    expect(job.block_ids[g] == expected, "exact-load: the load of {} names other blocks than it was given",
           admitted.id);
  }
  expect(job.is_async == (core.loads_async() || admitted.prepares), "exact-load: the load of {} is {} for the engine",
         admitted.id, job.is_async ? "asynchronous" : "synchronous");
}

void PromisesCheck::plan_built(const SchedulerCore& core, std::span<const AdmittedLoad> admitted,
                               std::span<const StepPlan* const> in_flight, std::span<const ChunkRef> late_saves) const {
  const StepPlan& plan = *in_flight.back();
  expect(core.num_open_lookups() == 0, "no-stale-spec: {} lookups are still open after step {}",
         core.num_open_lookups(), plan.step);
  for (const AdmittedLoad& load : admitted) {
    const auto is_its = [&](const LoadJob& job) { return job.request_id == load.id; };
    expect(std::count_if(plan.loads.begin(), plan.loads.end(), is_its) == 1,
           "exact-load: request {} was allocated {} external tokens, the plan has {} loads for it", load.id,
           load.external, std::count_if(plan.loads.begin(), plan.loads.end(), is_its));
    check_load(core, load, *std::find_if(plan.loads.begin(), plan.loads.end(), is_its));
  }
  expect(plan.loads.size() == admitted.size(), "exact-load: step {} loads for {} requests, {} were admitted to load",
         plan.step, plan.loads.size(), admitted.size());
  for (const auto& [id, pin] : core.pool().pins())
    expect(!pin.owner.starts_with("lookup of "), "no-stale-spec: the {} still pins chunks in step {}", pin.owner,
           plan.step);
  // Every slot that is marked as being written by a save must be in a plan whose report has not come yet, or that did
  // not tell the end of this save.
  const auto check_save = [&](ChunkRef chunk) {
    const ChunkPool::Slot& slot = core.pool().slot(chunk.slot);
    expect(slot.ref == chunk && slot.state == ChunkPool::State::kWriting,
           "fenced-reuse: step {} writes slot {} that is another's by now", plan.step, chunk.slot);
  };
  for (const ChunkRef chunk : late_saves) check_save(chunk);
  std::size_t num_saves = late_saves.size();
  for (const StepPlan* under_way : in_flight) {
    for (const auto* jobs : {&under_way->saves_before, &under_way->saves_after}) {
      for (const SaveJob& job : *jobs) {
        for (const SaveItem& item : job.items) {
          check_save(item.chunk);
          num_saves += 1;
        }
      }
    }
  }
  std::size_t num_writers = 0;
  for (std::uint32_t i = 0; core.pool().num_writing() > 0 && i < core.pool().num_slots(); ++i)
    num_writers += core.pool().slot(i).writer.starts_with("save of ");
  expect(num_writers == num_saves, "bounded-hold: {} slots wait for a save, {} saves are under way", num_writers,
         num_saves);
}

void PromisesCheck::save_planned(const SaveJob& job, const BlockTable& table, std::uint32_t computed,
                                 std::uint32_t known) const {
  // The core may leave out any block. If a whole table is left out, it matches at its start.
  const auto is_at = [&](std::uint32_t job_start) {
    for (std::size_t g = 0; g < table.size(); ++g) {
      const std::vector<BlockId>& blocks = job.block_ids.at(g);
      const std::uint32_t first_block = job_start / config_.groups[g].block_tokens;
      for (std::size_t b = 0; b < blocks.size(); ++b) {
        if (first_block + b >= table[g].size()) return false;
        const BlockId own = table[g][first_block + b];
        if (blocks[b] != kNoBlock && (blocks[b] != own || own == kNullBlock)) return false;
      }
    }
    return true;
  };
  const std::uint32_t alignment = alignment_of(config_.groups);
  const std::size_t num_tokens = table.at(0).size() * config_.groups[0].block_tokens;
  std::uint32_t job_start = 0;
  while (job_start < num_tokens && !is_at(job_start)) job_start += alignment;
  expect(job_start < num_tokens, "saved-is-computed: request {} saves from blocks that are not its own",
         job.request_id);
  for (const SaveItem& item : job.items) {
    const std::uint32_t end = job_start + item.first_token + item.num_tokens;
    expect(!config_.whole_blocks || (item.first_token % alignment == 0 && end % alignment == 0),
           "saved-is-computed: request {} saves a part of a block, up to token {}", job.request_id, end);
    expect(end <= std::min(computed, known),
           "saved-is-computed: request {} saves up to token {}, computed {}, known {}", job.request_id, end, computed,
           known);
  }
}

void PromisesCheck::after_step(const SchedulerCore& core, std::size_t loads_in_flight, TimeNs now) {
  std::size_t num_loads = 0;
  for (const auto& [id, pin] : core.pool().pins()) {
    TimeNs most = config_.order_ttl_max;
    if (pin.owner.starts_with("load for ")) most = config_.pin_ttl;
    if (pin.owner.starts_with("lease of ")) most = config_.lease_ttl;
    if (pin.owner.starts_with("handoff of ")) most = config_.handoff_ttl;
    if (pin.owner.starts_with("push of ")) most = config_.push_ttl + config_.push_grace;
    num_loads += pin.owner.starts_with("load for ");
    expect(!pin.owner.empty() && pin.deadline > now && pin.deadline - now <= most,
           "bounded-hold: the {} ends in {} ms, allowed are {}", pin.owner.empty() ? "pin without an owner" : pin.owner,
           (pin.deadline - now) / kMillisecond, most / kMillisecond);
  }
  expect(num_loads <= loads_in_flight, "bounded-hold: {} loads hold chunks, {} are under way", num_loads,
         loads_in_flight);
  expect(core.num_controller_pinned() <= config_.num_slots / 2 || core.num_controller_pinned() <= 1,
         "bounded-hold: {} of {} chunks are pinned for the controller", core.num_controller_pinned(),
         config_.num_slots);
  expect(core.num_reserved_chunks() <= config_.num_slots / 2, "bounded-hold: {} of {} slots are reserved",
         core.num_reserved_chunks(), config_.num_slots);

  std::uint32_t num_pushed_into = 0;
  std::map<TenantId, std::uint32_t> slots_of;
  for (std::uint32_t i = 0; i < core.pool().num_slots(); ++i) {
    const ChunkPool::Slot& slot = core.pool().slot(i);
    if (slot.state != ChunkPool::State::kFree) slots_of[slot.meta.tenant] += 1;
    expect(slot.state != ChunkPool::State::kReady || !core.provenance().is_purged(slot.givers),
           "purged-is-gone: slot {} has a chunk that a purged node gave", i);
    num_pushed_into += slot.writer.starts_with("push of ");
  }
  expect(num_pushed_into <= config_.num_slots * 3 / 4, "bounded-hold: peers may write into {} of {} slots",
         num_pushed_into, config_.num_slots);
  const TenantSlots& tenants = core.pool().tenants();
  std::uint32_t num_with_share = 0;
  tenants.for_each([&](const TenantSlots::Tenant& tenant) { num_with_share += !tenant.is_idle; });
  expect(tenants.num_tenants() == slots_of.size(), "fair-eviction: {} tenants are counted, {} have chunks",
         tenants.num_tenants(), slots_of.size());
  tenants.for_each([&](const TenantSlots::Tenant& tenant) {
    expect(slots_of[tenant.id] == tenant.num_slots, "fair-eviction: a tenant has {} slots, counted are {}",
           slots_of[tenant.id], tenant.num_slots);
    expect(tenant.is_idle || tenants.share(tenant.id) == config_.num_slots / num_with_share,
           "fair-eviction: the share of each of {} tenants is {} of {} slots", num_with_share, tenants.share(tenant.id),
           config_.num_slots);
  });

  const CoreCounters& counters = core.counters();
  const auto grows = [](const char* name, std::uint64_t before, std::uint64_t after) {
    expect(after >= before, "sane-counts: counter {} shrank from {} to {}", name, before, after);
  };
#define KVFERRY_SIM_GROWS(name) grows(#name, last_.name, counters.name);
  KVFERRY_CORE_COUNTERS(KVFERRY_SIM_GROWS)
#undef KVFERRY_SIM_GROWS
  expect(counters.lookup_hits <= counters.lookups && counters.loaded_tokens <= counters.hit_tokens &&
             counters.resumed_hit_tokens <= counters.hit_tokens && counters.hit_tokens >= counters.loads,
         "sane-counts: {} hits of {} lookups, {} tokens hit, {} loaded, {} resumed", counters.lookup_hits,
         counters.lookups, counters.hit_tokens, counters.loaded_tokens, counters.resumed_hit_tokens);
  last_ = counters;
}

void PromisesCheck::ended(const std::string& id, const FinishedRequest& done,
                          const std::map<std::uint32_t, ReportedLoad>& loads, bool was_known) const {
  expect(done.known == was_known, "exactly-once: the end of request {} was {}", id,
         was_known ? "not taken" : "taken twice");
  for (const Admission& admission : done.admissions) {
    const auto reported = loads.find(admission.attempt);
    const bool is_reported = reported != loads.end();
    const bool fits = admission.local + admission.to_load <= admission.hit && admission.loaded <= admission.to_load;
    // vLLM finishes a request before it passes on the report of the step, so a load without a report counts as 0
    // tokens.
    const bool is_as_reported = admission.loaded == (is_reported ? reported->second.loaded : 0);
    const bool is_whole = !is_reported || reported->second.found_damage || admission.loaded == admission.to_load;
    expect(fits && is_as_reported && is_whole,
           "sane-counts: request {} attempt {}: hit {}, local {}, to load {}, loaded {}, reported {}", id,
           admission.attempt, admission.hit, admission.local, admission.to_load, admission.loaded,
           is_reported ? fmt::to_string(reported->second.loaded) : "nothing");
  }
}

void PromisesCheck::offered(const SchedulerCore& core, const LeaseReply& reply, const LeaseRequest& request) {
  expect(reply.chunks.empty() || reply.lease != 0, "bounded-hold: {} chunks are leased without a lease",
         reply.chunks.size());
  for (const LeasedChunk& chunk : reply.chunks) {
    const ChunkPool::Slot& slot = core.pool().slot(chunk.chunk.slot);
    const bool is_as_told = chunk.is_growing
                                ? slot.state == ChunkPool::State::kWriting && chunk.checksums.empty() &&
                                      chunk.run_checksums.empty() && chunk.lacks_slots && request.push != 0 &&
                                      request.is_sure_of_frames
                                : slot.state == ChunkPool::State::kReady && slot.checksums == chunk.checksums;
    expect(chunk.index < request.keys.size() && slot.ref == chunk.chunk && is_as_told && slot.pins > 0,
           "verified-only: slot {} is leased as what it is not", chunk.chunk.slot);
  }
}

void PromisesCheck::idle(const SchedulerCore& core) {
  expect(core.num_requests() + core.num_fetches() + core.num_open_lookups() + core.num_replications() == 0,
         "bounded-hold: idle with {} requests, {} fetches, {} lookups, {} replications", core.num_requests(),
         core.num_fetches(), core.num_open_lookups(), core.num_replications());
  expect(core.num_preparations() == 0, "bounded-hold: idle with {} preparations", core.num_preparations());
  expect(core.num_pushes() + core.num_reservations() == 0, "bounded-hold: idle with {} pushes and {} reservations",
         core.num_pushes(), core.num_reservations());
  expect(core.pool().num_pins() + core.pool().num_pinned() + core.pool().num_writing() == 0,
         "bounded-hold: idle with {} holds on {} slots, {} slots being written", core.pool().num_pins(),
         core.pool().num_pinned(), core.pool().num_writing());
  for (std::uint32_t i = 0; i < core.pool().num_slots(); ++i)
    expect(core.pool().slot(i).state != ChunkPool::State::kRetired && core.pool().slot(i).ranks_in_frames == 0,
           "bounded-hold: idle with slot {} kept for {} ranks that have its chunk in a frame", i,
           core.pool().slot(i).ranks_in_frames);
}

std::string promise_of(const std::string& message) {
  constexpr std::array<std::string_view, 12> kNames = {
      "idempotent-lookup", "exact-load",  "no-stale-spec", "saved-is-computed", "fenced-reuse",  "exactly-once",
      "bounded-hold",      "sane-counts", "verified-only", "no-engine-death",   "fair-eviction", "purged-is-gone"};
  std::size_t first = std::string::npos;
  std::string promise = "no-engine-death";
  for (const std::string_view name : kNames) {
    const std::size_t at = message.find(std::string(name) + ":");
    if (at < first) {
      first = at;
      promise = name;
    }
  }
  return promise;
}

}  // namespace kvferry::sim
