#include "tally.h"

namespace kvferry::sim {

std::vector<Tally::Line> Tally::lines() const {
  return {
#define KVFERRY_SIM_FIELD(name, what) {#name, what, name},
      KVFERRY_SIM_TALLY(KVFERRY_SIM_FIELD)
#undef KVFERRY_SIM_FIELD
  };
}

void Tally::add(const Tally& other) {
#define KVFERRY_SIM_FIELD(name, what) name += other.name;
  KVFERRY_SIM_TALLY(KVFERRY_SIM_FIELD)
#undef KVFERRY_SIM_FIELD
}

}  // namespace kvferry::sim
