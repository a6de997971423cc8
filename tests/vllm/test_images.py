"""Tests chats with images through launch/proxy: the text is the plain server's, and the decode server computes none of
the prompt.
"""

import base64
import io
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import proof_models
import pytest
from engine import picture
from families import IMAGE_TOKENS
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.testbed.servers import VllmServer
from proxy_deployment import ANY_CORE, PROXIED_CHUNK_TOKENS, START_TIMEOUT_S, ProxyDeployment
from texts import text_of

TEXT = text_of(range(1, 121))
PICTURES = (1, 2)
MAX_TOKENS = 20
# vLLM puts an image before the text, so the template needs a chat's texts only.
TEMPLATE = ("{% for message in messages %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
            "{% endif %}{% endfor %}{% endfor %}")


@pytest.fixture
def model(tmp_path: Path) -> proof_models.Model:
    """Returns a model with images, with a chat template for its servers."""
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    found = proof_models.kept("blip2")
    return proof_models.Model(found.folder, (*found.flags, "--chat-template", str(template)), found.env)


@pytest.fixture
def expected(model: proof_models.Model, servers: Any, run_server: Callable[[VllmServer], VllmServer]) -> list[str]:
    """Returns the plain server's answers."""
    servers.stop()  # two cores have no room for another deployment
    plain = run_server(VllmServer("images-plain", model.folder, ANY_CORE, flags=model.flags, env=model.env))
    plain.wait_ready(START_TIMEOUT_S)
    texts = [chat(plain.url, number)[0] for number in PICTURES]
    plain.stop()
    return texts


@pytest.fixture
def deployment(model: proof_models.Model, expected: list[str], kvferry_connector: KvConnector
               ) -> Iterator[ProxyDeployment]:
    del expected  # the plain server comes first
    made = ProxyDeployment(model.folder, kvferry_connector, "images", extra={"chunk_tokens": PROXIED_CHUNK_TOKENS},
                           flags=model.flags, env=model.env)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def chat(url: str, number: int) -> tuple[str, list[dict[str, Any]]]:
    """Asks about a picture. Returns the answer's text and kvferry's report of the request's admissions."""
    png = io.BytesIO()
    picture(number).save(png, "PNG")
    image = {"url": f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"}
    content = [{"type": "image_url", "image_url": image}, {"type": "text", "text": TEXT}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": MAX_TOKENS, "temperature": 0.0,
            "kv_transfer_params": {"kvferry_report": True}}
    request = urllib.request.Request(f"{url}/v1/chat/completions", data=json.dumps(body).encode(),
                                     headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found = json.load(answer)
    report = (found.get("kv_transfer_params") or {}).get("kvferry_report", {})
    return found["choices"][0]["message"]["content"], report.get("admissions", [])


@pytest.mark.long
def test_chats_with_images_are_handed_over(deployment: ProxyDeployment, expected: list[str]) -> None:
    assert expected[0] != expected[1], "the pictures change the answer"
    for number, text in zip(PICTURES, expected, strict=True):
        answer, (admission,) = chat(deployment.url, number)
        assert answer == text
        # The text is the same, and its first chunk ends in the image: another picture's KV would be found here.
        assert admission["local"] == 0
        assert admission["loaded"] == admission["tokens"] - 1 >= IMAGE_TOKENS + 100
    assert deployment.metric(r'kvferry_proxy_stage_seconds_count\{stage="prefill"\}') == len(PICTURES)
