#!/usr/bin/env python3
"""Draws comments and messages of the product at random, for a reader who judges whether a stranger understands them.

  tests/draw_comments.py [--seed 1] [--comments 100] [--messages 40]
"""

import argparse
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import words_test

MESSAGE = re.compile(r'"((?:[^"\\\n]|\\.){20,})"')


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
                     if " " in comment and not comment.startswith(("namespace", "NOLINT"))]
        messages += [f"{path}:{number}: {message}" for number, line in enumerate(text.splitlines(), 1)
                     if not line.lstrip().startswith(("#include", "//", "#"))
                     for message in MESSAGE.findall(line) if message.count(" ") >= 2]
    draw = random.Random(wanted.seed)
    for title, found, count in (("comments", comments, wanted.comments), ("messages", messages, wanted.messages)):
        print(f"== {count} of {len(found)} {title}, seed {wanted.seed}")
        print("\n".join(sorted(draw.sample(found, count))))


if __name__ == "__main__":
    main()
