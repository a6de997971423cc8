"""Tests conversations through launch/proxy: all servers use what one server computed, whether it prefills or decodes.
"""

import asyncio
import time
from dataclasses import dataclass

import pytest
from kvferry_launch.testbed.answers import growth
from kvferry_launch.testbed.client import VllmClient
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.reference import Reference
from kvferry_launch.testbed.servers import VllmServer
from proxy_deployment import PROXIED_CHUNK_TOKENS, ProxyDeployment
from texts import complete_text, text_of

FIRST_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 300, 100, 100
SYSTEM_TOKENS, USER_TOKENS = 4 * PROXIED_CHUNK_TOKENS, PROXIED_CHUNK_TOKENS + 20
SHORT_ANSWER_TOKENS = 20
TELL_S = 20.0  # long, because three servers share two cores
HEARTBEATS_S = 2.5  # more than two heartbeats of a node
# The first contact of two servers on busy cores may take longer than a request waits. A server that did not answer is
# not asked again for 5 s. Then another conversation shows what the first one could not.
FIRST_CONTACTS = 3
PAUSE_S = 6.0

pytestmark = pytest.mark.servers("proxied")


def tokens(seed: int, count: int) -> list[int]:
    return PromptSet(seed, 1, count, count).prompts()[0]


@dataclass(frozen=True)
class Talk:
    """A conversation of two turns, with the plain server's answers. `second` is the whole prompt of the second turn."""

    first: list[int]
    answer: list[int]
    second: list[int]
    second_answer: list[int]


@dataclass(frozen=True)
class Known:
    talks: list[Talk]
    system: list[list[int]]  # prompts that have the same beginning
    system_answers: list[list[int]]


def ask_reference(reference: Reference) -> Known:
    firsts = [tokens(701 + number, FIRST_TOKENS) for number in range(1 + FIRST_CONTACTS)]
    answers = [found.tokens for found in reference.generations(firsts, ANSWER_TOKENS)]
    seconds = [first + answer + tokens(711, QUESTION_TOKENS) for first, answer in zip(firsts, answers, strict=True)]
    second_answers = [found.tokens for found in reference.generations(seconds, SHORT_ANSWER_TOKENS)]
    system = [tokens(721, SYSTEM_TOKENS) + tokens(722 + number, USER_TOKENS) for number in range(3)]
    system_answers = [found.tokens for found in reference.generations(system, SHORT_ANSWER_TOKENS)]
    talks = [Talk(*turns) for turns in zip(firsts, answers, seconds, second_answers, strict=True)]
    return Known(talks, system, system_answers)


@pytest.fixture
def known(reference: Reference) -> Known:
    return ask_reference(reference)


def ask(url: str, prompt: list[int], max_tokens: int) -> list[str]:
    async def one() -> str:
        async with VllmClient(url) as client:
            return await complete_text(client, text_of(prompt), max_tokens)

    return asyncio.run(one()).split()


def metrics(server: VllmServer) -> dict[str, float]:
    async def one() -> dict[str, float]:
        async with VllmClient(server.url) as client:
            return await client.metrics()

    return asyncio.run(one())


def settled(server: VllmServer) -> dict[str, float]:
    """Returns the server's metrics after one more step, because kvferry's counters are updated by steps."""
    ask(server.url, tokens(799, 5), 2)
    return metrics(server)


def wait_until_told(deployment: ProxyDeployment, server: str, chunks: int) -> None:
    """Waits until the controller knows `chunks` chunks of the server. What a server reports takes a moment to arrive.
    """
    deadline = time.monotonic() + TELL_S
    while (told := deployment.nodes()[server]["chunks"]) < chunks:
        assert time.monotonic() < deadline, f"the controller knows {told} chunks of {server}, not {chunks}"
        time.sleep(0.05)


def wait_until_idle(deployment: ProxyDeployment) -> None:
    """Waits until a heartbeat of each server has reported no requests. Otherwise an outdated load would decide the
    choice of a pair.
    """
    time.sleep(HEARTBEATS_S)
    deadline = time.monotonic() + TELL_S
    while busy := [name for name, node in deployment.nodes().items() if node["load"] > 0]:
        assert time.monotonic() < deadline, f"the controller still has requests of {busy}"
        time.sleep(0.05)


def words(answer: list[int]) -> list[str]:
    return text_of(answer).split()


def test_the_second_turn_is_prefilled_from_what_decode_computed_in_the_first(
        proxied: ProxyDeployment, known: Known) -> None:
    talk = known.talks[0]
    assert ask(proxied.url, talk.first, ANSWER_TOKENS) == words(talk.answer)
    before = settled(proxied.prefill)
    for server in proxied.decodes:
        settled(server)  # so that the controller has received all reports
    assert ask(proxied.url, talk.second, SHORT_ANSWER_TOKENS) == words(talk.second_answer)
    grown = growth(before, settled(proxied.prefill))
    # The decoded chunks: the full chunks of the first turn, without those of its prompt, which the prefill server
    # already has.
    decoded = (FIRST_TOKENS + ANSWER_TOKENS) // PROXIED_CHUNK_TOKENS - FIRST_TOKENS // PROXIED_CHUNK_TOKENS
    assert grown["kvferry_pulled_chunks_total"] >= decoded, grown
    assert grown["kvferry_pull_failures_total"] == 0
    assert grown["vllm:external_prefix_cache_hits_total"] > 0


def test_a_decode_server_uses_what_another_one_decoded(proxied: ProxyDeployment, known: Known) -> None:
    first, second = proxied.decodes
    shared = (FIRST_TOKENS + ANSWER_TOKENS) // PROXIED_CHUNK_TOKENS
    for talk in known.talks[1:]:
        had = proxied.nodes()["d0"]["chunks"]
        # the request goes past the prefill servers, so none of them has any of its KV
        assert ask(first.url, talk.first, ANSWER_TOKENS) == words(talk.answer)
        settled(first)
        wait_until_told(proxied, "d0", had + shared)
        before, before_first = settled(second), metrics(first)
        assert ask(second.url, talk.second, SHORT_ANSWER_TOKENS) == words(talk.second_answer)
        grown, grown_first = growth(before, settled(second)), growth(before_first, settled(first))
        if grown["kvferry_pulled_chunks_total"] >= shared:
            break
        time.sleep(PAUSE_S)
    assert grown["kvferry_pulled_chunks_total"] >= shared, grown
    assert grown["kvferry_hit_tokens_total"] >= shared * PROXIED_CHUNK_TOKENS
    assert grown_first["kvferry_leases_granted_total"] >= 1


def test_a_shared_system_prompt_is_pushed_once(proxied: ProxyDeployment, known: Known) -> None:
    servers = [proxied.prefill, *proxied.decodes]
    pushed, received = [], []
    for prompt, answer in zip(known.system, known.system_answers, strict=True):
        before = [settled(server) for server in servers]
        wait_until_idle(proxied)
        assert ask(proxied.url, prompt, SHORT_ANSWER_TOKENS) == words(answer)
        grown = [growth(old, settled(server)) for old, server in zip(before, servers, strict=True)]
        pushed.append(grown[0]["kvferry_pushed_chunks_total"])
        received.append([of_one["kvferry_received_chunks_total"] for of_one in grown[1:]])
        assert sum(of_one["kvferry_push_failures_total"] for of_one in grown) == 0, grown
    whole = (SYSTEM_TOKENS + USER_TOKENS) // PROXIED_CHUNK_TOKENS
    own = whole - SYSTEM_TOKENS // PROXIED_CHUNK_TOKENS
    assert pushed[0] >= whole, pushed
    assert pushed[1:] == [own + 1, own + 1], f"chunks pushed, of which a tail: {pushed}; received: {received}"
    assert [max(each) for each in received] == pushed, f"all go to the decode server that has the beginning: {received}"
    assert len({each.index(max(each)) for each in received}) == 1, received
