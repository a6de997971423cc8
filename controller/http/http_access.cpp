#include "controller/http/http_access.h"

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <algorithm>

namespace kvferry::controller {
namespace {

constexpr std::string_view kQuestions[] = {"/pair", "/query", "/query_by_hash", "/score"};
constexpr std::string_view kBearer = "Bearer ";
constexpr std::string_view kBasic = "Basic ";

bool is_get(std::string_view method) { return method == "GET" || method == "HEAD"; }

HttpRole needed_for(std::string_view method, std::string_view path) {
  if (is_get(method)) return path == "/healthz" ? HttpRole::kNone : HttpRole::kReader;
  const bool is_question = method == "POST" && std::ranges::find(kQuestions, path) != std::end(kQuestions);
  return is_question ? HttpRole::kReader : HttpRole::kAdmin;
}

/// Decodes the base64 of "USER:PASSWORD" and returns the password, or an empty text if there is none.
std::string password_in(std::string_view base64) {
  std::string plain(base64.size() / 4 * 3, '\0');
  const int size =
      ::EVP_DecodeBlock(reinterpret_cast<unsigned char*>(plain.data()),
                        reinterpret_cast<const unsigned char*>(base64.data()), static_cast<int>(base64.size()));
  const std::size_t colon = plain.find(':');
  if (size < 0 || colon == std::string::npos) return {};
  while (plain.back() == '\0') plain.pop_back();  // removes the zero byte to which each '=' was decoded
  return plain.substr(colon + 1);
}

}  // namespace

std::string http_token(const net::ClusterKey& key, HttpRole role) {
  const char* const name = role == HttpRole::kAdmin ? "admin" : "reader";
  return hex_of(net::text_of(key.derived(fmt::format("kvferry HTTP {} 1", name))));
}

HttpRole HttpAccess::role_with(std::string_view token) const {
  const auto is = [&](const std::string& own) {
    return token.size() == own.size() && ::CRYPTO_memcmp(token.data(), own.data(), own.size()) == 0;
  };
  HttpRole role = HttpRole::kNone;
  if (const auto content = key_->content(); content->members) {
    const net::Bytes32 hash = net::sha256(token);
    for (const net::Member& member : *content->members)
      if (hash == member.token_hash)
        role = member.identity.role == net::Role::kAdmin ? HttpRole::kAdmin : HttpRole::kReader;
  }
  for (const net::ClusterKey& key : key_->accepted()) {
    for (const HttpRole one : {HttpRole::kReader, HttpRole::kAdmin})
      if (is(http_token(key, one))) role = one;
  }
  return role;
}

HttpRole HttpAccess::role_of(std::string_view method, std::string_view authorization) const {
  if (authorization.starts_with(kBearer)) return role_with(authorization.substr(kBearer.size()));
  const bool is_browser = authorization.starts_with(kBasic) && is_get(method);
  return is_browser ? role_with(password_in(authorization.substr(kBasic.size()))) : HttpRole::kNone;
}

std::optional<HttpRefusal> HttpAccess::refusal(std::string_view method, std::string_view path,
                                               std::string_view authorization) const {
  const HttpRole needed = needed_for(method, path);
  if (!key_ || needed == HttpRole::kNone) return std::nullopt;
  const HttpRole role = role_of(method, authorization);
  if (role >= needed) return std::nullopt;
  const char* const command = needed == HttpRole::kAdmin ? "kvferry token --role admin" : "kvferry token";
  return HttpRefusal{
      role == HttpRole::kNone ? 401 : 403,
      fmt::format("the token is missing or not allowed here; send 'Authorization: Bearer TOKEN' with the "
                  "token that '{}' prints on a machine with the cluster key",
                  command)};
}

}  // namespace kvferry::controller
