// The outputs of a benchmark: a file of JSON figures, with facts about the machine, and the picture that
// peers/plots.py draws.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "launch/bench/harness/programs.h"

namespace kvferry::bench {

/// Returns {"version", "boot_id", "cores", "cpu", "kernel", "huge_pages", "date"}; a text that can't be read is empty.
nlohmann::json host_facts();

/// Writes the figures into the file `name`; writes nothing if `name` is empty. Failures: kUnavailable, with the
/// system's reason, if the file can't be written.
void write_json(const std::string& name, const nlohmann::json& figures);

/// Returns a figure divided by `unit`, with `digits` digits after the point; "-" if the figure is missing.
std::string number_text(const nlohmann::json& figures, const std::string& name, int digits, double unit = 1);

/// Runs a part of the benchmark that can be left out. If the part fails, `say` is called with a warning and
/// missing[name] is set to the reason. Failure: kCancelled.
void try_part(const std::string& name, nlohmann::json& missing, const Say& say, const std::function<void()>& part);

/// Draws the figures into the file `name` (.png), or nothing if `name` is empty; installs matplotlib on demand. `kind`:
/// a key of KINDS in peers/plots.py. If the picture can't be drawn, `say` is called with a warning. Failure:
/// kCancelled.
void draw(const std::string& name, const std::string& kind, const nlohmann::json& figures, const Say& say);

}  // namespace kvferry::bench
