#!/usr/bin/env python3
"""Draws comments and messages of the product at random, for a reader who judges whether they can be understood.

  tests/draw_comments.py [--seed 1] [--comments 100] [--messages 40]
"""

import argparse
import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import words_test

# Matches comments, #include lines, raw strings and characters, which are skipped, or else (group `text`) neighbouring
# string literals, which the compiler joins.
CXX_TEXT = re.compile(r"""//[^\n]*|/\*.*?\*/|\#include[^\n]*|R"(\w*)\(.*?\)\1"|'(?:[^'\\\n]|\\.)'|"""
                      r"""(?P<text>(?:"(?:[^"\\\n]|\\.)*"\s*)+)""", re.DOTALL)


def cxx_messages(text: str) -> Iterator[tuple[int, str]]:
    for found in CXX_TEXT.finditer(text):
        if found["text"]:
            yield text.count("\n", 0, found.start()) + 1, re.sub(r'"\s*"|^"|"\s*$', "", found["text"])


def python_messages(text: str) -> Iterator[tuple[int, str]]:
    """Yields the string literals that are no docstrings. In an f-string, the expressions stay in braces."""
    tree = ast.parse(text)
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    skipped |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            yield node.lineno, ast.unparse(node)[2:-1]


def is_message(text: str) -> bool:
    """Returns whether a text is a message in words, and no input for another program."""
    return len(text) >= 20 and text.count(" ") >= 2 and "\n" not in text and text.count("{") < text.count(" ")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw comments and messages at random.")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw")
    parser.add_argument("--comments", type=int, default=100, help="number of comments")
    parser.add_argument("--messages", type=int, default=40, help="number of messages")
    wanted = parser.parse_args()
    comments, messages = [], []
    for path in words_test.files_of(words_test.REPO):
        if path.parts[0] not in words_test.ROOMS or path.suffix not in (*words_test.CXX, ".py"):
            continue
        text = (words_test.REPO / path).read_text()
        extract = words_test.cxx_comments if path.suffix in words_test.CXX else words_test.python_comments
        comments += [f"{path}:{number}: {comment}" for number, comment in extract(text)
                     if " " in comment and not comment.startswith(("namespace", "NOLINT", "fmt: ", "clang-format "))]
        texts = cxx_messages(text) if path.suffix in words_test.CXX else python_messages(text)
        messages += [f"{path}:{number}: {message}" for number, message in texts if is_message(message)]
    draw = random.Random(wanted.seed)
    for title, found, count in (("comments", comments, wanted.comments), ("messages", messages, wanted.messages)):
        print(f"== {count} of {len(found)} {title}, seed {wanted.seed}")
        print("\n".join(sorted(draw.sample(found, count))))


if __name__ == "__main__":
    main()
