"""Judges the answers, the whole run of a configuration, and the counters. This module uses no server and no clock."""

from dataclasses import dataclass, field

from configurations import Configuration
from kvferry_launch.testbed.answers import SLOW_S, Admission, Generation, Report, first_mismatch
from kvferry_launch.testbed.log_paths import path_complaints

MIN_RECOVERED = 0.95
MIN_HANDED_OVER = 0.5
MIN_REQUESTS_FOR_ALL = 40  # with fewer requests, the run may end before a decode server runs out of blocks


@dataclass
class Outcome:
    """The results of all requests to one configuration."""

    configuration: Configuration
    requests: int = 0
    right: int = 0
    aborted: int = 0
    resent: int = 0
    kills: int = 0  # number of processes that were killed and ended by this signal
    prefilled: int = 0  # number of answers whose prompt a prefill server had computed
    handed_over: int = 0  # number of these answers for which kvferry loaded KV at their first admission
    preemptions: int = 0
    resumed: int = 0
    # number of these that were preempted before their first token; only the KV that they had loaded is counted
    unbegun: int = 0
    chunks: int = 0  # number of full chunks that resumed requests had computed or loaded before
    chunks_local: int = 0  # number of these chunks that were in the engine's own prefix cache
    chunks_loaded: int = 0  # number of these chunks that kvferry loaded
    missing: list[str] = field(default_factory=list)  # admissions that had to compute some of these chunks again
    slowest_s: float = 0.0
    seconds: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)  # kvferry's counters, summed over all servers
    paths: list[str] = field(default_factory=list)  # the servers' log lines that name the path to a peer
    complaints: list[str] = field(default_factory=list)

    @property
    def chunks_wanted(self) -> int:
        """Number of chunks that only kvferry could load again."""
        return self.chunks - self.chunks_local

    @property
    def recovered(self) -> float | None:
        return self.chunks_loaded / self.chunks_wanted if self.chunks_wanted else None

    @property
    def fetched(self) -> float:
        """Number of chunks that came from other nodes."""
        return sum(self.counters.get(f"kvferry_{name}_chunks_total", 0.0) for name in ("pulled", "received"))


@dataclass(frozen=True)
class Asked:
    """A request that was answered."""

    index: int
    prompt_tokens: int
    prefilled: bool  # a prefill server computed the prompt
    seconds: float  # time of all tries of the request together


def judge_answer(outcome: Outcome, asked: Asked, reference: Generation, generation: Generation) -> None:
    """Adds an answer to the outcome, with a complaint for each fault of the answer."""
    index, seconds = asked.index, asked.seconds
    outcome.slowest_s = max(outcome.slowest_s, seconds)
    if seconds > SLOW_S:
        outcome.complaints.append(f"request {index}: took {seconds:.1f} s, more than {SLOW_S:.0f} s")
    mismatch = first_mismatch(reference, generation)
    if mismatch:
        outcome.complaints.append(f"request {index}: {mismatch}")
    else:
        outcome.right += 1
    report = Report.of(generation)
    if report is None:
        outcome.complaints.append(f"request {index}: came back without its report")
        return
    outcome.preemptions += report.preemptions
    if asked.prefilled:
        outcome.prefilled += 1
        outcome.handed_over += any(admission.loaded > 0 for admission in report.admissions[:1])
    known = 0  # number of tokens whose KV the request has had, according to its report
    for admission in report.admissions:
        if not 0 <= admission.loaded <= admission.to_load or admission.hit >= admission.tokens:
            outcome.complaints.append(f"request {index}: {admission}")
        if admission.tokens > asked.prompt_tokens:
            known = admission.tokens - 1  # the token that was sampled last has no KV yet
        if admission.resumed:
            outcome.resumed += 1
            outcome.unbegun += admission.tokens <= asked.prompt_tokens
            _count_chunks(outcome, asked, admission, known)
        known = max(known, admission.local + admission.loaded)


def _count_chunks(outcome: Outcome, asked: Asked, admission: Admission, known: int) -> None:
    """Counts the full chunks of the `known` tokens that a request had computed before it was preempted."""
    chunk_tokens = outcome.configuration.extra.get("chunk_tokens", 256)
    chunks = known // chunk_tokens
    local = min(chunks, admission.local // chunk_tokens)
    back = min(chunks, (admission.local + admission.loaded) // chunk_tokens)
    outcome.chunks += chunks
    outcome.chunks_local += local
    outcome.chunks_loaded += back - local
    if back < chunks:
        outcome.missing.append(f"request {asked.index} of {asked.prompt_tokens} tokens computed {chunks - back} chunks "
                               f"again: {admission}")


def judge_whole(outcome: Outcome) -> list[str]:
    """Returns complaints about a whole run. For example, the run must have shown what its configuration is for."""
    complaints = []
    configuration = outcome.configuration
    if configuration.recovers and outcome.recovered is not None and outcome.recovered < MIN_RECOVERED:
        complaints.append(f"kvferry loaded {outcome.recovered:.1%} of the {outcome.chunks_wanted} chunks of preempted "
                          f"requests that the engine had not kept, less than {MIN_RECOVERED:.0%}: {outcome.missing}")
    if outcome.kills < len(configuration.kills):
        complaints.append(f"{outcome.kills} kills, {len(configuration.kills)} were wanted")
    if outcome.counters.get("kvferry_loaded_tokens_total", 0.0) == 0:
        complaints.append("kvferry loaded nothing, so this proved nothing")
    if configuration.num_prefill > 0 and outcome.fetched == 0:
        complaints.append("no chunk came from another node, so this proved nothing")
    if outcome.handed_over < MIN_HANDED_OVER * outcome.prefilled:
        complaints.append(f"{outcome.handed_over} of {outcome.prefilled} prompts were handed over, "
                          f"less than {MIN_HANDED_OVER:.0%}")
    if configuration.pushes and outcome.counters.get("kvferry_received_chunks_total", 0.0) == 0:
        complaints.append("no chunk was pushed, so this proved nothing")
    if "path" in configuration.extra:
        complaints += path_complaints(outcome.paths, configuration.extra["path"])
    if outcome.requests < MIN_REQUESTS_FOR_ALL:
        return complaints
    for what, count in (("preempted", outcome.preemptions), ("resumed", outcome.resumed),
                        ("given up by its client", outcome.aborted)):
        if count == 0:
            complaints.append(f"no request was {what}, so this proved nothing")
    if configuration.evicts and outcome.counters.get("kvferry_evicted_chunks_total", 0.0) == 0:
        complaints.append("no chunk was evicted, so this proved nothing")
    return complaints
