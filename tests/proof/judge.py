"""What the proof says of answers, of a configuration's whole run, and of counters. No server, no clock."""

from dataclasses import dataclass, field

from configurations import Configuration
from kvferry_launch.testbed.answers import SLOW_S, Generation, Report, first_mismatch

MIN_RECOVERED = 0.95
MIN_REQUESTS_FOR_ALL = 40  # fewer may end before a decode server runs out of blocks


@dataclass
class Outcome:
    """What came of all requests to one configuration."""

    configuration: Configuration
    requests: int = 0
    right: int = 0
    aborted: int = 0
    resent: int = 0
    kills: int = 0
    preemptions: int = 0
    resumed: int = 0
    chunks: int = 0  # full ones that resumed requests had computed before
    chunks_back: int = 0  # of these, those that were in the engine's prefix cache or that kvferry loaded
    loaded_tokens: int = 0
    slowest_s: float = 0.0
    seconds: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)  # kvferry's, summed over all servers
    paths: list[str] = field(default_factory=list)  # the servers' log lines that name the path to a peer
    complaints: list[str] = field(default_factory=list)

    @property
    def recovered(self) -> float | None:
        return self.chunks_back / self.chunks if self.chunks else None


def judge_answer(outcome: Outcome, index: int, reference: Generation, generation: Generation, seconds: float) -> None:
    """Adds an answer to the outcome, with a complaint for everything that is wrong with it."""
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
    chunk_tokens = outcome.configuration.extra.get("chunk_tokens", 256)
    outcome.preemptions += report.preemptions
    for admission in report.admissions:
        outcome.loaded_tokens += admission.loaded
        if not 0 <= admission.loaded <= admission.to_load or admission.hit >= admission.tokens:
            outcome.complaints.append(f"request {index}: {admission}")
        if admission.resumed:
            # The token sampled last has no KV yet.
            chunks = (admission.tokens - 1) // chunk_tokens
            outcome.resumed += 1
            outcome.chunks += chunks
            outcome.chunks_back += min(chunks, (admission.local + admission.loaded) // chunk_tokens)


def judge_whole(outcome: Outcome) -> list[str]:
    """Complaints about a whole run: what the configuration is about has to have happened."""
    complaints = []
    configuration = outcome.configuration
    if configuration.recovers and outcome.recovered is not None and outcome.recovered < MIN_RECOVERED:
        complaints.append(f"{outcome.recovered:.1%} of preempted requests' chunks came back, "
                          f"less than {MIN_RECOVERED:.0%}")
    if outcome.kills < len(configuration.kills):
        complaints.append(f"{outcome.kills} kills, {len(configuration.kills)} were wanted")
    if outcome.loaded_tokens == 0:
        complaints.append("kvferry loaded nothing, so this proved nothing")
    path = configuration.extra.get("path")
    if path is not None and not outcome.paths:
        complaints.append("no log names a path to a peer")
    complaints += [f"a path other than {path}: {line}" for line in outcome.paths if path and f"path {path}" not in line]
    if outcome.requests < MIN_REQUESTS_FOR_ALL:
        return complaints
    for what, count in (("preempted", outcome.preemptions), ("resumed", outcome.resumed),
                        ("given up by its client", outcome.aborted)):
        if count == 0:
            complaints.append(f"no request was {what}, so this proved nothing")
    if configuration.evicts and outcome.counters.get("kvferry_evicted_chunks_total", 0.0) == 0:
        complaints.append("no chunk was evicted, so this proved nothing")
    return complaints
