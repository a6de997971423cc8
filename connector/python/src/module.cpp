// The Python module kvferry._core: its own functions and its class SchedulerNode. The other sources of this folder add
// the rest of the module. This file only converts arguments, results and errors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>
#include <span>
#include <utility>

#include "connector/python/src/node_config.h"
#include "connector/python/src/pool_changes.h"
#include "connector/python/src/python_bytes.h"
#include "connector/python/src/python_error.h"
#include "connector/python/src/running_reader.h"
#include "connector/runtime/config.h"
#include "connector/runtime/scheduler/scheduler_node.h"
#include "transport/base/fingerprint.h"
#include "transport/base/net/tls/signatures.h"
#include "transport/base/versions.h"
#include "transport/base/wall_clock.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace kvferry;

using Dict = nb::typed<nb::dict, nb::str, nb::any>;
using Integers = nb::typed<nb::list, nb::int_>;
using Strings = nb::typed<nb::list, nb::str>;
using TokensOf = nb::typed<nb::callable, Integers(nb::str, nb::int_)>;
using NewBlocks = nb::typed<nb::list, std::optional<nb::typed<nb::sequence, Integers>>>;

net::Bytes32 bytes32(const nb::bytes& bytes) {
  net::Bytes32 made{};
  if (bytes.size() != made.size())
    throw nb::value_error(
        fmt::format("a key of a certificate has {} bytes; it must have {}", bytes.size(), made.size()).c_str());
  std::copy_n(bytes.c_str(), made.size(), made.begin());
  return made;
}

Dict config_dict(const std::string& extra_json) {
  const ConnectorConfig config = config_from(extra_json);
  Dict dict;
  for (const Setting<ConnectorConfig>& row : connector_settings())
    dict[nb::str(row.key.data(), row.key.size())] =
        std::visit([](const auto& value) { return nb::cast(value); }, row.get(config));
  return dict;
}

struct PyScheduler {
  std::unique_ptr<SchedulerNode> node;
  StepInput step;  // kept from step to step: running_reader needs the last step's `running`, and memory is reused
  RunningReader running_reader;

  PyScheduler(const std::string& extra_json, std::string engine_id, std::string role, std::string fingerprint,
              const std::vector<std::tuple<std::uint32_t, std::uint32_t, bool>>& groups, bool whole_blocks,
              bool keeps_state, std::uint32_t checkpoint_alignment, bool runs_ahead, std::int64_t start_timeout_ms,
              bool on_device, std::uint64_t prepared_tokens_max, std::string conversion) {
    SchedulerOptions options{config_from(extra_json),
                             EngineId{std::move(engine_id)},
                             std::move(role),
                             std::move(fingerprint),
                             {},
                             whole_blocks,
                             keeps_state,
                             checkpoint_alignment,
                             runs_ahead,
                             on_device,
                             prepared_tokens_max,
                             start_timeout_ms,
                             std::move(conversion)};
    for (const auto& [block_tokens, window, restarts] : groups)
      options.groups.push_back({block_tokens, window, restarts});
    const nb::gil_scoped_release unlocked;
    node = unwrap(SchedulerNode::start(std::move(options)));
  }

  void attach_workers(const std::vector<nb::bytes>& hellos) {
    std::vector<std::string> copies;
    for (const nb::bytes& hello : hellos) copies.emplace_back(view(hello));
    unwrap(node->attach_workers(copies));
  }

  void add_request(const std::string& id, const Integers& token_ids, std::uint32_t num_prompt_tokens,
                   const std::vector<nb::bytes>& digests, std::string extras,
                   const std::vector<std::tuple<std::uint32_t, std::uint32_t, std::string>>& items, bool cacheable,
                   bool handoff,
                   const std::optional<std::tuple<std::string, std::string, std::uint32_t, std::string>>& source,
                   const std::optional<std::string>& push_to, std::int64_t arrived_ms, std::string trace,
                   const std::string& cache_salt, bool prepares) {
    NewRequest request;
    request.id = RequestId{id};
    request.tokens = integers(token_ids);
    request.digests.reserve(digests.size());
    for (const nb::bytes& digest : digests) request.digests.push_back(engine_digest(view(digest)));
    request.num_prompt_tokens = num_prompt_tokens;
    request.extras = std::move(extras);
    request.cache_salt = cache_salt;
    for (const auto& [first, count, identifier] : items) request.items.push_back({first, count, identifier});
    request.cacheable = cacheable;
    request.handoff = handoff;
    if (source) request.source = std::apply([](auto&... each) { return HandoffSource{each...}; }, *source);
    request.push_to = push_to;
    request.prepares = prepares;
    request.waited = wait_since(arrived_ms, wall_clock_ms());
    request.trace = std::move(trace);
    node->add_request(std::move(request));
  }

  std::pair<std::optional<std::uint32_t>, bool> lookup(const std::string& id, std::uint32_t num_local) {
    const nb::gil_scoped_release unlocked;
    const Answer answer = node->lookup(RequestId{id}, num_local);
    return {answer.pending ? std::nullopt : std::optional(answer.num_external), answer.is_async};
  }

  nb::bytes build_step(
      const std::vector<std::tuple<std::string, std::uint32_t, std::uint32_t, std::optional<BlockTable>>>& admitted,
      const Strings& ids, const Integers& computed, const NewBlocks& blocks, const nb::typed<nb::set, nb::str>& resumed,
      const nb::typed<nb::dict, nb::str, nb::int_>& scheduled, const std::vector<std::string>& preempted,
      const TokensOf& tokens_of) {
    const RunningRequests running{ids, computed, blocks, resumed, scheduled};
    running_reader.read(running, step, [&](const RequestId& id) { return node->handle_of(id); });
    step.scheduled.clear();
    for (const auto& [id, num_computed, count, table] : admitted)
      step.scheduled.push_back({RequestId{id}, num_computed, count, table});
    step.preempted.clear();
    for (const std::string& id : preempted) step.preempted.push_back(RequestId{id});
    return to_bytes(node->build_step(
        step, [&](const RequestId& id, std::uint32_t known) { return integers(tokens_of(id.value, known)); }));
  }

  Dict finished(const std::string& id, std::uint32_t num_computed, const BlockTable& blocks, bool aborted) {
    const FinishedRequest done = node->finished(RequestId{id}, num_computed, blocks, aborted);
    Dict dict;
    dict["handoff_tokens"] = done.handoff ? nb::cast(done.handoff_tokens) : nb::none();
    dict["handoff_name"] = done.handoff_name;
    dict["preemptions"] = done.preemptions;
    dict["transfer_ms"] = static_cast<double>(done.fetch_ns) / 1e6;
    nb::list admissions;
    for (const Admission& admission : done.admissions) {
      nb::dict row;
      row["hit"] = admission.hit;
      row["local"] = admission.local;
      row["to_load"] = admission.to_load;
      row["loaded"] = admission.loaded;
      row["resumed"] = admission.resumed;
      row["tokens"] = admission.tokens;
      admissions.append(row);
    }
    dict["admissions"] = admissions;
    return dict;
  }
};

}  // namespace

void bind_controller(nb::module_& m);  // This function is defined in controller.cpp.
void bind_transport(nb::module_& m);   // This function is defined in transport.cpp.
void bind_worker(nb::module_& m);      // This function is defined in worker.cpp.

NB_MODULE(_core, m) {
  m.doc() = "kvferry's scheduler and worker nodes, controller client and transport";
  const nb::exception<PythonError> error(m, "KvFerryError", PyExc_RuntimeError);
  bind_controller(m);
  bind_transport(m);
  m.def("fingerprint_difference", &fingerprint_difference, "here"_a, "there"_a,
        "Returns the differences of two fingerprints, field by field; empty if they are equal.");
  m.def(
      "settings_markdown", [] { return settings_markdown(connector_settings()); },
      "Returns the settings as a Markdown table.");
  m.def(
      "version", [] { return std::string(version()); }, "Returns the version of this kvferry.");
  m.def("check_config", &config_dict, "extra_json"_a,
        "Returns the settings in effect. Raises a KvFerryError that names the wrong key or value.");

  m.def(
      "signature_of",
      [](const nb::bytes& secret, const nb::bytes& text) {
        return to_bytes(net::signature_of(bytes32(secret), view(text)));
      },
      "secret"_a, "text"_a, "Signs a text with a certificate's secret key of 32 bytes.");
  m.def(
      "is_signed_by",
      [](const nb::bytes& certificate, const nb::bytes& text, const nb::bytes& signature) {
        return net::is_signed_by(bytes32(certificate), view(text), view(signature));
      },
      "certificate"_a, "text"_a, "signature"_a,
      "Returns True if the signature of the text was made with the secret key of this certificate of 32 bytes.");
  m.def(
      "certificate_public",
      [](const nb::bytes& secret) {
        return to_bytes(std::string(net::text_of(net::certificate_public(bytes32(secret)))));
      },
      "secret"_a, "Returns the public key of a certificate with this secret key, 32 bytes.");

  nb::class_<PyScheduler>(m, "SchedulerNode")
      .def(nb::init<const std::string&, std::string, std::string, std::string,
                    const std::vector<std::tuple<std::uint32_t, std::uint32_t, bool>>&, bool, bool, std::uint32_t, bool,
                    std::int64_t, bool, std::uint64_t, std::string>(),
           nb::kw_only(), "extra_json"_a, "engine_id"_a, "role"_a, "fingerprint"_a, "groups"_a, "whole_blocks"_a,
           "keeps_state"_a, "checkpoint_alignment"_a, "runs_ahead"_a, "start_timeout_ms"_a, "on_device"_a = false,
           "prepared_tokens_max"_a = 0, "conversion"_a = "")
      .def_prop_ro("host", [](const PyScheduler& self) { return self.node->host(); })
      .def_prop_ro("port", [](const PyScheduler& self) { return self.node->port(); })
      .def("attach_workers", &PyScheduler::attach_workers, "hellos"_a)
      .def("add_request", &PyScheduler::add_request, nb::kw_only(), "request_id"_a, "tokens"_a, "num_prompt_tokens"_a,
           "digests"_a, "extras"_a, "items"_a, "cacheable"_a, "handoff"_a, "source"_a.none(),
           "push_to"_a.none() = nb::none(), "arrived_ms"_a = 0, "trace"_a = "", "cache_salt"_a = "",
           "prepares"_a = false)
      .def(
          "update_tokens",
          [](PyScheduler& self, const std::string& id, std::uint32_t keep, const Integers& tokens) {
            self.node->update_tokens(RequestId{id}, keep, integers(tokens));
          },
          "request_id"_a, "keep"_a, "new_tokens"_a)
      .def(
          "num_tokens",
          [](const PyScheduler& self, const std::string& id) { return self.node->num_tokens(RequestId{id}); },
          "request_id"_a)
      .def("lookup", &PyScheduler::lookup, "request_id"_a, "num_local"_a,
           "Returns two values: the number of tokens after num_local that can be loaded (None if the lookup is "
           "pending), and True if the load would be asynchronous.")
      .def(
          "allocated",
          [](PyScheduler& self, const std::string& id, std::uint32_t num_external, const BlockTable& blocks) {
            self.node->allocated(RequestId{id}, num_external, blocks);
          },
          "request_id"_a, "num_external"_a, "block_ids"_a)
      .def("build_step", &PyScheduler::build_step, "admitted"_a, "running_ids"_a, "running_computed"_a,
           "running_blocks"_a, "resumed"_a, "num_scheduled"_a, "preempted"_a, "tokens_of"_a,
           "Returns the step's plan. Running requests are passed as in vLLM's CachedRequestData; tokens_of(id, known) "
           "returns a scheduled request's tokens from `known` on.")
      .def(
          "rest", [](PyScheduler& self) { self.node->rest(); }, nb::call_guard<nb::gil_scoped_release>(),
          "Pauses an engine that has only preparations, for at most 8 ms.")
      .def("finished", &PyScheduler::finished, "request_id"_a, "num_computed"_a, "block_ids"_a, "aborted"_a)
      .def(
          "worker_report",
          [](PyScheduler& self, const nb::bytes& report) { unwrap(self.node->worker_report(view(report))); },
          "report"_a)
      .def("has_unreported_saves", [](const PyScheduler& self) { return self.node->has_unreported_saves(); })
      .def("has_unreported_loads", [](const PyScheduler& self) { return self.node->has_unreported_loads(); })
      .def(
          "num_engine_purges", [](const PyScheduler& self) { return self.node->num_engine_purges(); },
          "Returns the number of purges, until the last lookup() or build_step(), of this node or of KV that the "
          "engine had loaded. The engine's own cached blocks may have purged KV.")
      .def("reset_cache", [](PyScheduler& self) { self.node->reset_cache(); })
      .def(
          "set_weights_epoch",
          [](PyScheduler& self, std::string epoch) { self.node->set_weights_epoch(std::move(epoch)); }, "epoch"_a,
          "Sets the weights epoch that the extras of requests name. The node reports it to the controller.")
      .def("track_pool", [](PyScheduler& self) { self.node->track_pool(); })
      .def("take_pool_changes", [](PyScheduler& self) { return pool_changes(*self.node); })
      .def("take_named_chunks", [](PyScheduler& self) { return named_chunks(*self.node); })
      .def("metrics", [](const PyScheduler& self) { return self.node->metrics(); })
      .def("take_metrics", [](PyScheduler& self) { return self.node->take_metrics(); })
      .def("transfers_after", [](PyScheduler& self, std::uint64_t number) { return transfers(*self.node, number); })
      .def(
          "shutdown", [](PyScheduler& self) { self.node->shutdown(); }, nb::call_guard<nb::gil_scoped_release>());
  bind_worker(m);
}
