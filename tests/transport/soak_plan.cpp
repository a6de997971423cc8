#include "tests/transport/soak_plan.h"

#include <algorithm>
#include <random>

#include "tests/transport/transport_fixture.h"

namespace kvferry::soak {
namespace {

using Random = std::mt19937_64;

bool is_one_in(Random& random, std::uint64_t n) { return random() % n == 0; }

std::vector<CopyRange> make_ranges(Random& random) {
  const std::uint64_t shape = random() % 10;
  const std::uint64_t num_ranges = shape < 6 ? 1 + random() % 4 : shape < 9 ? 5 + random() % 28 : 33 + random() % 168;
  const std::uint64_t scale = is_one_in(random, 10) ? 14 + random() % 7 : random() % 15;
  const std::uint64_t bytes_max = std::min(std::uint64_t{1} << scale, kBytesMax / num_ranges);
  return random_ranges(random(), is_one_in(random, 200) ? 0 : num_ranges, bytes_max);
}

}  // namespace

Plan make_plan(std::uint64_t seed, std::uint64_t number, std::uint64_t restart_every,
               const std::set<std::string>& without) {
  Random random(seed * 1'000'003 + number);
  const auto does = [&](const char* what, std::uint64_t one_in) {
    return is_one_in(random, one_in) && !without.contains(what);
  };
  Plan plan;
  if (does("stops", 1000)) plan.event = Event::kStop;
  if (does("disconnects", 700)) plan.event = Event::kDisconnect;
  if (does("restarts", restart_every)) plan.event = is_one_in(random, 2) ? Event::kKill : Event::kQuit;
  plan.disconnects_late = is_one_in(random, 2);

  plan.peer = static_cast<std::uint32_t>(random() % 2);
  plan.direction = is_one_in(random, 2) ? Direction::kPull : Direction::kPush;
  plan.priority = static_cast<Priority>(random() % 3);
  plan.ranges = make_ranges(random);
  std::uint64_t bytes = 0;
  for (const CopyRange& range : plan.ranges) {
    plan.extent = std::max({plan.extent, range.local_offset + range.bytes, range.remote_offset + range.bytes});
    bytes += range.bytes;
  }
  plan.paint_seed = random();
  plan.is_verified = bytes <= 4096 || is_one_in(random, 8);
  if (is_one_in(random, 8)) plan.notification = std::to_string(number) + ':' + std::string(random() % 1000, 'x');
  if (does("feeds", 10)) plan.num_feeds = 1 + static_cast<std::uint32_t>(random() % 4);
  plan.has_checksums = does("checksums", 8);
  plan.is_damaged = plan.has_checksums && bytes > 0 && is_one_in(random, 8);
  plan.is_granted = does("grants", 20);
  if (plan.is_granted && is_one_in(random, 3)) plan.revoke_after = static_cast<int>(random() % 3);
  if (does("cancels", 20)) plan.cancel_after = static_cast<int>(random() % 4);
  plan.is_bad = is_one_in(random, 300);
  return plan;
}

}  // namespace kvferry::soak
