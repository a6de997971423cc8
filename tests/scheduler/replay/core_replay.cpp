#include "core_replay.h"

#include <fmt/format.h>

#include <stdexcept>

namespace kvferry::replay {
namespace {

template <class Ours>
void expect_same(const Json& recorded, const Ours& ours, const std::string& what) {
  if (recorded != Json(ours))
    throw std::runtime_error(fmt::format("{}: recorded {}, now {}", what, recorded.dump(), Json(ours).dump()));
}

std::pair<std::uint32_t, std::uint64_t> slot_of(const Json& chunk) { return {chunk.at(0), chunk.at(1)}; }

}  // namespace

CoreReplay::CoreReplay(const Trace& trace) : core_(core_config(trace.config)) {
  core_.set_directory_up(false);  // there was only one engine in the trace, so no other node had any chunks
}

void CoreReplay::play(const Json& call) {
  const std::string kind = call.at("call");
  if (kind.starts_with("vllm_")) return;  // these calls are only for the rules in engine_rules.h
  const TimeNs now = call.at("us").get<TimeNs>() * 1000;
  core_.tick(now);
  if (kind == "add") {
    std::vector<std::int32_t> tokens;
    core_.add_request(new_request(call, tokens), now);
  } else if (kind == "tokens") {
    const auto tokens = call.at("new").get<std::vector<std::int32_t>>();
    core_.update_tokens(RequestId{call.at("request")}, call.at("keep"), tokens);
  } else if (kind == "lookup") {
    lookup(call, now);
  } else if (kind == "allocated") {
    core_.allocated(RequestId{call.at("request")}, call.at("external"), call.at("blocks").get<BlockTable>(), now);
  } else if (kind == "step") {
    step(call, now);
  } else if (kind == "finished") {
    finish(call, now);
  } else if (kind == "report") {
    report(call, now);
  } else if (kind == "reset") {
    core_.reset_cache();
  } else {
    throw std::runtime_error(fmt::format("unknown call '{}'", kind));
  }
  core_.take_actions();
}

void CoreReplay::lookup(const Json& call, TimeNs now) {
  const RequestId id{call.at("request")};
  const Answer answer = core_.lookup(id, call.at("local"), now);
  const std::string what = fmt::format("lookup of {}", id);
  expect_same(call.at("answer"), answer.pending ? Json() : Json(answer.num_external), what);
  expect_same(call.at("async"), answer.is_async, what + ", asynchronous");
}

void CoreReplay::step(const Json& call, TimeNs now) {
  const auto told = call.value("tokens", Json::array());
  const auto tokens = [&](const RequestId& id, std::uint32_t known) -> std::vector<std::int32_t> {
    for (const Json& row : told)
      if (row.at("request") == id.value && row.at("keep") == known) return row.at("new");
    throw std::runtime_error(fmt::format("tokens of {} after {} are asked for, which were not then", id, known));
  };
  const StepPlan plan = core_.build_step(step_input(call), now, tokens);
  const Json& recorded = call.at("plan");
  expect_same(recorded.at("step"), plan.step, "step");
  compare_saves(recorded.at("before"), plan.saves_before, plan.step);
  compare_loads(recorded.at("loads"), plan.loads, plan.step);
  compare_saves(recorded.at("after"), plan.saves_after, plan.step);
}

/// The core may choose any slot. But a slot that holds one chunk in the trace must be one slot here.
void CoreReplay::same_slot(const Json& recorded, ChunkRef planned, std::uint64_t step) {
  const auto [known, is_new] = slots_.emplace(slot_of(recorded), planned);
  if (!is_new && known->second != planned)
    throw std::runtime_error(fmt::format("step {}: another chunk than the recorded {}", step, recorded.dump()));
}

void CoreReplay::compare_saves(const Json& recorded, const std::vector<SaveJob>& planned, std::uint64_t step) {
  expect_same(recorded.size(), planned.size(), fmt::format("step {}: number of saves", step));
  for (std::size_t i = 0; i < planned.size(); ++i) {
    const SaveJob& job = planned[i];
    const std::string what = fmt::format("step {}: save {} of {}", step, i, job.request_id);
    expect_same(recorded[i].at("request"), job.request_id, what);
    expect_same(recorded[i].at("blocks"), job.block_ids, what);
    const Json& items = recorded[i].at("items");
    expect_same(items.size(), job.items.size(), what);
    for (std::size_t k = 0; k < job.items.size(); ++k) {
      expect_same(items[k].at("first"), job.items[k].first_token, what);
      expect_same(items[k].at("tokens"), job.items[k].num_tokens, what);
      same_slot(items[k].at("slot"), job.items[k].chunk, step);
    }
  }
}

void CoreReplay::compare_loads(const Json& recorded, const std::vector<LoadJob>& planned, std::uint64_t step) {
  expect_same(recorded.size(), planned.size(), fmt::format("step {}: number of loads", step));
  for (std::size_t i = 0; i < planned.size(); ++i) {
    const LoadJob& job = planned[i];
    const std::string what = fmt::format("step {}: load {} of {}", step, i, job.request_id);
    expect_same(recorded[i].at("request"), job.request_id, what);
    expect_same(recorded[i].at("attempt"), job.attempt, what);
    expect_same(recorded[i].at("async"), job.is_async, what);
    expect_same(recorded[i].at("blocks"), job.block_ids, what);
    const Json& items = recorded[i].at("items");
    expect_same(items.size(), job.items.size(), what);
    for (std::size_t k = 0; k < job.items.size(); ++k) {
      const LoadItem& item = job.items[k];
      expect_same(items[k].at("chunk_tokens"), item.chunk_tokens, what);
      expect_same(items[k].at("skip"), item.skip_tokens, what);
      expect_same(items[k].at("first"), item.first_token, what);
      expect_same(items[k].at("tokens"), item.num_tokens, what);
      same_slot(items[k].at("slot"), item.chunk, step);
    }
  }
}

void CoreReplay::finish(const Json& call, TimeNs now) {
  const RequestId id{call.at("request")};
  const FinishedRequest done =
      core_.finished(id, call.at("computed"), call.at("blocks").get<BlockTable>(), call.at("aborted"), now);
  const std::string what = fmt::format("request {} finished", id);
  expect_same(call.at("handoff_tokens"), done.handoff ? Json(done.handoff_tokens) : Json(), what);
  const Json& admissions = call.at("admissions");
  expect_same(admissions.size(), done.admissions.size(), what);
  for (std::size_t i = 0; i < done.admissions.size(); ++i) {
    const Admission& admission = done.admissions[i];
    expect_same(admissions[i].at("hit"), admission.hit, what);
    expect_same(admissions[i].at("local"), admission.local, what);
    expect_same(admissions[i].at("to_load"), admission.to_load, what);
    expect_same(admissions[i].at("loaded"), admission.loaded, what);
    expect_same(admissions[i].at("resumed"), admission.resumed, what);
  }
}

void CoreReplay::report(const Json& call, TimeNs now) {
  const auto ours = [&](const Json& chunk) {
    const auto found = slots_.find(slot_of(chunk));
    if (found == slots_.end()) throw std::runtime_error(fmt::format("a report of an unknown chunk {}", chunk.dump()));
    return found->second;
  };
  WorkerReport report;
  report.rank = call.at("rank");
  report.step = call.at("step");
  for (const Json& save : call.at("saves")) report.saves.push_back({ours(save.at("slot")), save.at("ok"), 1});
  for (const Json& load : call.at("loads")) {
    LoadDone& done = report.loads.emplace_back();
    done.request_id = load.at("request");
    done.attempt = load.at("attempt");
    done.tokens_loaded = load.at("loaded");
    for (const Json& chunk : load.at("corrupt")) done.corrupt.push_back(ours(chunk));
  }
  core_.worker_report(report, now);
}

}  // namespace kvferry::replay
