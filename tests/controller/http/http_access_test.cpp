#include "controller/http/http_access.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "tests/transport/base/net/key_file.h"

namespace kvferry::controller {
namespace {

const net::ClusterKey kKey{std::string(32, 'k')};
// The token that connector/python/kvferry/tickets.py derives from the same key. tests/connector/python/tickets_test.py
// expects it too.
constexpr const char* kReader = "90aa5daf3b2d3703f8c4cd988ab7640a1b2d2dedc84cdee6eb769135365d265a";
constexpr const char* kAdmin = "3595a76d2133d8726dc93eec074492fcf65fbf36bf678fe5326bd53de656f1b2";

int status_of(const HttpAccess& access, const char* method, const char* path, const std::string& authorization) {
  const auto refusal = access.refusal(method, path, authorization);
  EXPECT_TRUE(!refusal || refusal->why.find("kvferry token") != std::string::npos);
  return refusal ? refusal->status : 200;
}

TEST(HttpAccess, TokensFollowFromTheKey) {
  EXPECT_EQ(http_token(kKey, HttpRole::kReader), kReader);
  EXPECT_EQ(http_token(kKey, HttpRole::kAdmin), kAdmin);
}

TEST(HttpAccess, TheTokensOfBothKeysAreValidUntilOneIsRemoved) {
  net::KeyFile file(::testing::TempDir(), {net::kNewKey, net::kOldKey});
  const HttpAccess access(file.read());
  const auto status = [&](const std::string& key, const char* method) {
    const HttpRole role = std::string(method) == "GET" ? HttpRole::kReader : HttpRole::kAdmin;
    return status_of(access, method, "/x", "Bearer " + http_token(net::ClusterKey(key), role));
  };
  for (const char* method : {"GET", "POST"}) {
    EXPECT_EQ(status(net::kNewKey, method), 200);
    EXPECT_EQ(status(net::kOldKey, method), 200);
  }
  file.write({net::kNewKey});
  EXPECT_TRUE(net::reaches([&] { return status(net::kOldKey, "GET") == 401; }));
  EXPECT_EQ(status(net::kOldKey, "POST"), 401);
  EXPECT_EQ(status(net::kNewKey, "POST"), 200);
}

TEST(HttpAccess, WithoutAKeyEverybodyMayDoEverything) {
  const HttpAccess access(std::nullopt);
  for (const char* authorization : {"", "Bearer ", "Basic Og=="}) {
    EXPECT_EQ(status_of(access, "GET", "/status", authorization), 200);
    EXPECT_EQ(status_of(access, "POST", "/register", authorization), 200);
  }
}

TEST(HttpAccess, ARoleMayDoWhatItMayAndNoMore) {
  const HttpAccess access(kKey);
  const std::string reader = std::string("Bearer ") + kReader, admin = std::string("Bearer ") + kAdmin;
  for (const std::string& anybody : {std::string(), reader, admin}) {
    EXPECT_EQ(status_of(access, "GET", "/healthz", anybody), 200);
    EXPECT_EQ(status_of(access, "HEAD", "/healthz", anybody), 200);
  }
  for (const auto& [method, path] : {std::pair("GET", "/"),
                                     {"HEAD", "/metrics"},
                                     {"GET", "/nodes"},
                                     {"GET", "/status"},
                                     {"GET", "/overview"},
                                     {"GET", "/workers"},
                                     {"GET", "/nowhere"},
                                     {"POST", "/pair"},
                                     {"POST", "/query"},
                                     {"POST", "/query_by_hash"},
                                     {"POST", "/score"}}) {
    EXPECT_EQ(status_of(access, method, path, ""), 401) << path;
    EXPECT_EQ(status_of(access, method, path, reader), 200) << path;
    EXPECT_EQ(status_of(access, method, path, admin), 200) << path;
  }
  for (const auto& [method, path] : {std::pair("POST", "/register"),
                                     {"POST", "/unregister"},
                                     {"POST", "/healthz"},
                                     {"POST", "/nowhere"},
                                     {"PUT", "/pair"},
                                     {"DELETE", "/status"}}) {
    EXPECT_EQ(status_of(access, method, path, ""), 401) << path;
    EXPECT_EQ(status_of(access, method, path, reader), 403) << path;
    EXPECT_EQ(status_of(access, method, path, admin), 200) << path;
  }
}

TEST(HttpAccess, WhatIsNoTokenCountsAsNone) {
  const HttpAccess access(kKey);
  const std::string token = kReader;
  for (const std::string& wrong :
       {token, "Bearer " + token + " ", "Bearer " + token.substr(1), "Bearer x" + token.substr(1), "Bearer  " + token,
        "Bearer " + http_token(net::ClusterKey(std::string(32, 'x')), HttpRole::kReader), std::string("Bearer "),
        std::string("Basic "), "Basic " + token, std::string("Basic ===="), std::string("Basic Og=="),
        std::string("Basic Oj0="), std::string("Basic \xff\xff\xff\xff"), std::string("Digest x")})
    EXPECT_EQ(status_of(access, "GET", "/status", wrong), 401) << wrong;
}

TEST(HttpAccess, ABrowserReadsWithThePasswordAndOrdersNothing) {
  const HttpAccess access(kKey);
  const std::string reader =
      "Basic bWU6OTBhYTVkYWYzYjJkMzcwM2Y4YzRjZDk4OGFiNzY0MGExYjJkMmRlZGM4NGNkZWU2ZWI3NjkxMzUzNjVkMjY1YQ==";
  const std::string admin =
      "Basic OjM1OTVhNzZkMjEzM2Q4NzI2ZGM5M2VlYzA3NDQ5MmZjZjY1ZmJmMzZiZjY3OGZlNTMyNmJkNTNkZTY1NmYxYjI=";
  for (const std::string& browser : {reader, admin}) {
    EXPECT_EQ(status_of(access, "GET", "/", browser), 200);
    EXPECT_EQ(status_of(access, "POST", "/pair", browser), 401);
    EXPECT_EQ(status_of(access, "POST", "/register", browser), 401);
  }
}

}  // namespace
}  // namespace kvferry::controller
