"""Tests that controller/PROTOCOL.md lists each message and each of a node's details."""

import re
from pathlib import Path

CONTROLLER = Path(__file__).resolve().parents[3] / "controller"
PAGE = (CONTROLLER / "PROTOCOL.md").read_text()


def test_each_message_has_a_row_with_its_type() -> None:
    source = (CONTROLLER / "protocol" / "messages.h").read_text()
    structs = re.findall(r"^struct (\w+) \{(.*?)^\};", source, re.MULTILINE | re.DOTALL)
    messages = [(number[1], name) for name, body in structs
                if (number := re.search(r"Header header\{kProtocolVersion, (\d+)\};", body))]
    assert len(messages) == len(structs) - 1 > 20, "all but Header are messages"
    assert len({number for number, _ in messages}) == len(messages), "each has a number of its own"
    assert sorted(re.findall(r"^\| (\d+) \| (\w+) \|", PAGE, re.MULTILINE)) == sorted(messages)


def test_the_details_are_listed_in_their_order() -> None:
    source = (CONTROLLER / "api" / "node_info.h").read_text().split("struct NodeDetails {")[1]
    fields = re.findall(r"KVFERRY_FIELDS\((.+?)\);", source, re.DOTALL)[0]
    sentence = re.findall(r"^`details` is an array .*?: (.+?)\. ", PAGE, re.MULTILINE | re.DOTALL)[0]
    assert sentence.replace("\n", " ").split(", ") == re.sub(r"\s+", " ", fields).split(", ")
