#include "transport/ucx/transport_names.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <regex>

namespace kvferry::ucx {
namespace {

/// Returns what `print`, a function of UCX, writes to a stream.
template <class Print>
std::string printed(Print print) {
  char* text = nullptr;
  std::size_t bytes = 0;
  std::FILE* stream = ::open_memstream(&text, &bytes);
  if (stream == nullptr) return {};
  print(stream);
  std::fclose(stream);
  std::string copy(text, bytes);
  std::free(text);
  return copy;
}

/// Returns what the pattern's group matches in the text.
std::set<std::string> all_matches(const std::string& text, const std::regex& pattern) {
  std::set<std::string> names;
  for (std::sregex_iterator at(text.begin(), text.end(), pattern), end; at != end; ++at) names.insert((*at)[1]);
  return names;
}

}  // namespace

std::set<std::string> transports_of(ucp_context_h context) {
  // UCX has no query for them, but its description has a line for each: "resource 3 :  md 2 dev 1 flags -- tcp/eth0".
  return names_in_context(printed([&](std::FILE* stream) { api().ucp_context_print_info(context, stream); }));
}

std::set<std::string> transports_of(ucp_ep_h ep) {
  // UCX 1.13 has no query for the lanes, but its description names each: "lane[0]:  2:tcp/eth0.0 md[1] ...".
  static const std::regex kLane(R"(lane\[\d+\]:\s*\d+:([^\s.]+))");
  return all_matches(printed([&](std::FILE* stream) { api().ucp_ep_print_info(ep, stream); }), kLane);
}

std::set<std::string> names_in_context(const std::string& description) {
  static const std::regex kResource(R"(resource \d+\s*:.* flags \S+ ([^\s/]+)/)");
  return all_matches(description, kResource);
}

bool is_rdma(std::string_view name) {
  constexpr std::string_view kRdma[] = {"rc", "ud", "dc", "srd"};
  return std::ranges::any_of(kRdma, [&](std::string_view kind) { return name.starts_with(kind); });
}

}  // namespace kvferry::ucx
