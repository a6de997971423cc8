#include "controller/http/http_api.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "controller/http/http_views.h"

namespace kvferry::controller {
namespace {

using nlohmann::json;

constexpr const char* kPaths =
    "GET /, /healthz, /metrics, /nodes, /overview, /status, /workers; POST /pair, /query, /query_by_hash, /register, "
    "/score, "
    "/unregister";
constexpr std::string_view kViews[] = {"/metrics", "/nodes", "/overview", "/status", "/workers"};
constexpr struct {
  std::string_view path;
  HttpHandler* handler;
} kHandlers[] = {{"/pair", handle_pair},   {"/query", handle_query},       {"/query_by_hash", handle_query_by_hash},
                 {"/score", handle_score}, {"/register", handle_register}, {"/unregister", handle_unregister}};

HttpAnswer ok(const json& value) { return {.body = value.dump(-1, ' ', false, json::error_handler_t::replace)}; }

HttpAnswer failed(const Error& error) {
  const bool is_temporary = error.code == ErrorCode::kFull || error.code == ErrorCode::kUnavailable;
  return http_error(error.code == ErrorCode::kNotFound ? 404 : is_temporary ? 503 : 400, error.what);
}

HttpAnswer view(const HttpApi& api, const std::string& path) {
  const HttpBackend& backend = api.backend;
  const ControllerView all = api.ask_owner([&](TimeNs now) {
    return ControllerView{backend.sessions.status(now),   backend.endpoint,
                          backend.engines.engines(now),   backend.engines.namespaces(),
                          backend.events.num_malformed(), api.num_refused};
  });
  if (path == "/metrics") return {200, "text/plain; version=0.0.4; charset=utf-8", metrics_text(all)};
  if (path == "/nodes") return ok(nodes_json(all.status));
  if (path == "/overview") return ok(overview_json(all));
  if (path == "/workers") return ok(workers_json(all));
  return ok(view_json(all));
}

}  // namespace

HttpAnswer HttpApi::answer(const std::string& method, const std::string& path, const std::string& body) {
  try {
    const bool is_get = method == "GET" || method == "HEAD";
    if (is_get && path == "/") return {200, "text/html; charset=utf-8", std::string(status_page())};
    if (is_get && path == "/healthz") {
      ask_owner([](TimeNs) { return true; });
      return {200, "text/plain; charset=utf-8", "ok\n"};
    }
    if (is_get && std::ranges::find(kViews, path) != std::end(kViews)) return view(*this, path);
    const auto* handler = std::ranges::find(kHandlers, path, [](const auto& entry) { return entry.path; });
    if (method == "POST" && handler != std::end(kHandlers)) return ok(handler->handler(*this, HttpRequest(body)));
    return http_error(404, fmt::format("{} {} does not exist; allowed: {}", method, path.substr(0, 100), kPaths));
  } catch (const HttpFailure& failure) {
    return failed(failure.error);
  } catch (const std::exception& failure) {
    return http_error(500, fmt::format("{} {} failed because of an error in the controller: {}", method,
                                       path.substr(0, 100), failure.what()));
  }
}

HttpAnswer http_error(int status, const std::string& sentence) {
  HttpAnswer answer = ok({{"error", sentence}});
  answer.status = status;
  return answer;
}

}  // namespace kvferry::controller
