#include "trace.h"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <memory>
#include <sstream>
#include <stdexcept>

namespace kvferry::replay {
namespace {

std::string unpacked(const std::filesystem::path& path) {
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzopen(path.c_str(), "rb"), gzclose);
  if (!file) throw std::runtime_error(fmt::format("cannot open {}", path.string()));
  std::string text;
  std::array<char, 65536> buffer;
  int count = 0;
  while ((count = gzread(file.get(), buffer.data(), buffer.size())) > 0)
    text.append(buffer.data(), static_cast<std::size_t>(count));
  if (count < 0) throw std::runtime_error(fmt::format("{} is damaged", path.string()));
  return text;
}

}  // namespace

std::vector<Trace> read_traces(const std::string& folder) {
  std::vector<Trace> traces;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string file = entry.path().filename().string();
    constexpr std::string_view kEnding = ".jsonl.gz";
    if (!file.ends_with(kEnding)) continue;
    Trace trace;
    trace.name = file.substr(0, file.size() - kEnding.size());
    std::istringstream lines(unpacked(entry.path()));
    for (std::string line; std::getline(lines, line);) trace.calls.push_back(Json::parse(line));
    if (trace.calls.empty()) throw std::runtime_error(fmt::format("{} is empty", file));
    trace.config = trace.calls.front();
    trace.calls.erase(trace.calls.begin());
    traces.push_back(std::move(trace));
  }
  std::sort(traces.begin(), traces.end(), [](const Trace& a, const Trace& b) { return a.name < b.name; });
  return traces;
}

CoreConfig core_config(const Json& from) {
  CoreConfig config;
  config.fingerprint = from.at("fingerprint");
  config.chunk_tokens = from.at("chunk_tokens");
  config.num_slots = from.at("num_slots");
  config.groups.clear();
  for (const Json& window : from.at("windows")) config.groups.push_back({from.at("block_tokens"), window});
  config.runs_ahead = from.at("runs_ahead");
  return config;
}

NewRequest new_request(const Json& add, std::vector<std::int32_t>& tokens) {
  tokens = add.at("tokens").get<std::vector<std::int32_t>>();
  NewRequest request;
  request.id = RequestId{add.at("request")};
  request.tokens = tokens;
  request.num_prompt_tokens = add.at("num_prompt_tokens");
  request.extras = add.at("extras");
  for (const Json& item : add.at("items")) request.items.push_back({item.at(0), item.at(1), item.at(2)});
  request.cacheable = add.at("cacheable");
  request.handoff = add.at("handoff");
  return request;
}

StepInput step_input(const Json& step) {
  StepInput input;
  for (const Json& row : step.at("scheduled")) {
    ScheduledRequest& scheduled = input.scheduled.emplace_back();
    scheduled.id = RequestId{row.at("request")};
    scheduled.num_computed = row.at("computed");
    scheduled.num_scheduled = row.at("scheduled");
    if (!row.at("blocks").is_null()) scheduled.block_ids = row.at("blocks").get<BlockTable>();
  }
  for (const Json& id : step.at("preempted")) input.preempted.push_back(RequestId{id});
  return input;
}

}  // namespace kvferry::replay
