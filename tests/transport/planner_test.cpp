// The planner at its edges; what it promises while all goes well is in the contract suite (backend "auto").
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "tests/transport/backends.h"

namespace kvferry {
namespace {

// Every probe pulls into memory of its own. Under the address sanitizer this sees a copy into memory that is gone.
TEST(Planner, EndsAtAnyMomentOfItsProbes) {
  const std::unique_ptr<Transport> peer = make_backend("auto");
  for (int tenths_of_ms = 0; tenths_of_ms < 200; tenths_of_ms += 7) {
    const std::unique_ptr<Transport> transport = make_backend("auto");
    ASSERT_TRUE(transport->connect(peer->address()));
    std::this_thread::sleep_for(std::chrono::microseconds(100 * tenths_of_ms));
  }
}

}  // namespace
}  // namespace kvferry
