#include "transport/base/log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_color_sinks.h>

#include <cstdlib>
#include <memory>
#include <string_view>

namespace kvferry {
namespace {

constexpr std::size_t kMessageBytesMax = 8192;

/// Writes a message as one line without control characters of ASCII, because a message may quote texts of other
/// processes, and a terminal would take control characters for commands.
class SafeMessage : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm& /*time*/, spdlog::memory_buf_t& line) override {
    const std::string_view text(message.payload.data(), message.payload.size());
    for (const char c : text.substr(0, kMessageBytesMax)) {
      const bool is_control = (c >= 0 && c < ' ') || c == '\x7f';
      if (is_control)
        fmt::format_to(std::back_inserter(line), "\\x{:02x}", c);
      else
        line.push_back(c);
    }
    if (text.size() > kMessageBytesMax)
      fmt::format_to(std::back_inserter(line), "... ({} more bytes)", text.size() - kMessageBytesMax);
  }
  std::unique_ptr<custom_flag_formatter> clone() const override { return std::make_unique<SafeMessage>(); }
};

/// Sets the level that KVFERRY_LOG names, or info.
void set_level(spdlog::logger& logger) {
  const char* const named = std::getenv("KVFERRY_LOG");
  const std::string_view name = named == nullptr ? "info" : named;
  const spdlog::level::level_enum level = spdlog::level::from_str(std::string(name));  // off if the name is unknown
  const bool is_known = level != spdlog::level::off || name == "off";
  logger.set_level(is_known ? level : spdlog::level::info);
  if (!is_known)
    logger.warn(
        "KVFERRY_LOG is '{}', which is no level; allowed: trace, debug, info, warning, error, critical and off; "
        "info is used",
        name);
}

}  // namespace

spdlog::logger& log() {
  static const std::shared_ptr<spdlog::logger> logger = [] {
    auto made = std::make_shared<spdlog::logger>("kvferry", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    auto formatter = std::make_unique<spdlog::pattern_formatter>();
    formatter->add_flag<SafeMessage>('*').set_pattern("%Y-%m-%d %H:%M:%S.%e kvferry[%P] %^%l%$ %*");
    made->set_formatter(std::move(formatter));
    made->flush_on(spdlog::level::info);
    set_level(*made);
    return made;
  }();
  return *logger;
}

}  // namespace kvferry
