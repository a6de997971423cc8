#include "controller/server/turn_budget.h"

#include <fmt/format.h>

namespace kvferry::controller {

void TurnBudget::begin_turn() {
  now_ = clock_.now();
  turn_ = share_ = {.begun_at = now_};
}

void TurnBudget::begin_share() { share_ = {.begun_at = now_}; }

void TurnBudget::count(std::size_t num_messages, std::size_t num_bytes) {
  now_ = clock_.now();
  for (Used* used : {&turn_, &share_}) {
    used->num_messages += num_messages;
    used->num_bytes += num_bytes;
  }
}

std::string TurnBudget::share_used() const {
  return fmt::format("{} messages in {} us", share_.num_messages, (now_ - share_.begun_at) / 1000);
}

}  // namespace kvferry::controller
