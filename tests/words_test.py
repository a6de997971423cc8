"""Enforces one vocabulary: rejects the words that transport/base/GLOSSARY.md replaces, and comments that are no
sentences.

`python tests/words_test.py [PATH...]` lists the findings in all files, or in the files below these paths.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
ROOMS = ("transport", "kernels", "controller", "connector", "launch")
CXX = (".h", ".cpp", ".cu", ".cuh")

# Words that are rejected everywhere, alone or as a part of a name (LedgerEntry, num_ledgers_).
WORDS = {
    "ledger": "transfer table",
    "outbox": "completion queue",
    "greeter": "acceptor",
    "newcomer": "pending peer",
    "errand": "request",
    "wish": "desired value",
    "crew": "thread pool",
    "stranger": "unknown peer, unregistered node",
    "story": "status, reason",
    "lend": "grant, export, reserve",
    "lends": "grants, exports, reserves",
    "lent": "granted, exported, reserved",
    "loan": "grant, slot reservation",
    "trail": "cursor",
    "tap": "observer",
    "unkeep": "unpin",
    "forget": "expire, remove, drop",
    "forgets": "expires, removes, drops",
    "forgot": "expired, removed, dropped",
    "forgotten": "expired, removed, dropped",
    "distrust": "invalidate",
    "unfull": "partial",
}

# Words that only a pattern can tell from ordinary English.
PATTERNS = {
    r"\b[A-Za-z]*(?<!In)Flights?\b|\bflights\b": "transfer, PieceTransfer",
    r"\b\w*[a-z]Front\b|\bFront\b|\b[a-z]+_front\b(?!\()": "listener",
    r"\b[A-Z]?[A-Za-z]*Rules?(?=[A-Z]|\b)": "admin command",
    r"\bRemains\b|\bremains_of\b": "DeadHolderTails",
    r"\b\w*Keep(?:Order|Wanted|Request|Reply)\b": "Pin...",
    r"\b(?:[A-Z]\w*)?Bring[A-Z]?\w*\b(?! )|\bbring_\w+|\w+_bring\b": "replicate",
    r"\b[Ff]etch_?[Oo]rder\w*": "ReplicateOrder",
    r"\b(?:struct|class) Hold\b|\bHold>|\bHold(?= [a-z_]+[(;])": "pin",
    r"\b\w*Half\b|\b(?:scheduler|worker)(?:'s)? hal(?:f|ves)\b": "scheduler connector, worker connector",
    r"\bkBeyond\b|\bbeyond_\w*": "overflow",
    r"[Ll]ook-ups?\b|\blook_ups?\b|LookUp|\b[Aa] look up\b": "lookup",
    r"\bsign_as\b": "set_source_address",
    r"\bend_waits_by\b": "set_wait_interrupt_fd",
    r"\badd_guest\b": "add_wakeup_fd",
    r"\bdoes_without\b": "skip_external",
    r"\blets_others_go_in\b": "yield_in_step",
    r"SharedTruth|shared_truth": "ReplicatedState",
    r"\bgive_save\b": "enqueue_save",
    r"\bhurry\b": "shorten_deadline",
}

# Patterns that no comment (C++ or Python) may contain.
IN_COMMENTS = {
    r"\b(?:[Ss]omebody|[Nn]obody|[Aa]nybody|[Ww]hoever|[Ee]verybody)\b": "name the component: caller, peer, node, ...",
    r"^(?:[Oo]f|[Aa]nd) |^[Bb]y (?!default\b|itself\b)": "begin with a subject or a noun, not with Of, By, And",
    r"(?:^|(?<=[.;] ))(?:False|True|nullopt): ": '"Returns X if ..."',
    r"\b(?:[Bb]elieves?|[Bb]elieved|[Hh]ears|[Hh]eard)\b": "sends, reports, receives, records",
}

# Allowed findings: (path prefix, pattern of the finding, reason).
EXCEPTIONS = (
    ("tests/words_test.py", r".*", "it names what it rejects"),
    ("tests/", r"\w*Rules\w*", "rules of a protocol or of the engine, which are no commands"),
    ("", r"save_unfull_chunk|SAVE_UNFULL_CHUNK", "a setting's old name, kept as an alias"),
)


def files_of(root: Path) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=root,
                            capture_output=True, text=True, check=True).stdout
    return sorted(Path(name) for name in set(listed.split("\0")) if name and (root / name).is_file())


def is_checked(path: Path) -> bool:
    """Returns True for all text files in the rooms and in the tests, and for all documents."""
    if path.suffix in (".png", ".svg", ".lock", ".txt") or path.name == "CMakeLists.txt":
        return False
    if path.parts[0] == "tests":
        return path.suffix in (*CXX, ".py", ".md") or (path.suffix == "" and "corpus" not in path.parts)
    return path.parts[0] in ROOMS or (path.suffix == ".md" and path.name != "CHANGELOG.md")


PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def word_findings(line: str) -> Iterator[tuple[str, str]]:
    """Yields (finding, what to say instead) for each rejected word in a line of text."""
    for part in PART.findall(line):
        word = part.lower()
        instead = WORDS.get(word) or (WORDS.get(word[:-1]) if word.endswith("s") else None)
        if instead:
            yield part, instead
    for pattern, instead in PATTERNS.items():
        for match in re.finditer(pattern, line):
            yield match[0], instead


# Matches a string literal, which is skipped, or a comment up to the end of its line.
CXX_COMMENT = re.compile(r'"(?:[^"\\\n]|\\.)*"|//+!?<?[ ]?(.*)')


def cxx_comments(text: str) -> Iterator[tuple[int, str]]:
    """Yields (number of the first line, text) of each comment. Consecutive lines of // are one comment."""
    block: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), 1):
        said = next((match[1] for match in CXX_COMMENT.finditer(line) if match[1] is not None), None)
        alone = line.lstrip().startswith("//")
        if block and not alone:
            yield first, " ".join(block)
            block = []
        if said is None:
            continue
        if not alone:
            yield number, said
        else:
            first = first if block else number
            block.append(said)
    if block:
        yield first, " ".join(block)


def python_comments(text: str) -> Iterator[tuple[int, str]]:
    """Yields the comments, and the strings that are statements of their own."""
    block: list[str] = []
    first, last = 0, -1
    before = tokenize.NEWLINE
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and not token.string.startswith(("#!", "# noqa", "# type:")):
                is_alone = token.line.lstrip().startswith("#")
                if block and token.start[0] == last + 1 and is_alone:
                    block.append(token.string.lstrip("# "))
                else:
                    if block:
                        yield first, " ".join(block)
                    first, block = token.start[0], [token.string.lstrip("# ")]
                last = token.start[0] if is_alone else 0  # a comment behind code does not go on in the next line
            elif token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.NL,
                                                              tokenize.DEDENT):
                yield token.start[0], " ".join(str(ast.literal_eval(token.string)).split())
            if token.type not in (tokenize.COMMENT, tokenize.NL):
                before = token.type
    except (tokenize.TokenError, IndentationError):
        return
    if block:
        yield first, " ".join(block)


def is_python(path: Path, text: str) -> bool:
    return path.suffix in (".py", ".pyi") or text.startswith("#!/usr/bin/env python3")


def findings(path: Path, text: str) -> Iterator[str]:
    """Yields a line for each rejected word and, outside of the tests, for each comment that breaks a rule."""

    def excused(what: str, line: str) -> bool:
        return any(str(path).startswith(prefix) and any(what in match for match in re.findall(pattern, line))
                   for prefix, pattern, _ in EXCEPTIONS)

    for number, line in enumerate(text.splitlines(), 1):
        for what, instead in word_findings(line):
            if not excused(what, line):
                yield f"{path}:{number}: '{what}': say {instead}"
    comments: Iterable[tuple[int, str]] = ()
    if path.parts[0] == "tests":
        return
    if path.suffix in CXX:
        comments = cxx_comments(text)
    elif is_python(path, text):
        comments = python_comments(text)
    for number, comment in comments:
        for pattern, instead in IN_COMMENTS.items():
            for match in re.finditer(pattern, comment):
                yield f"{path}:{number}: comment '{match[0].strip()}': {instead}: {comment[:80]}"


def all_findings(root: Path, only: tuple[str, ...] = ("",)) -> list[str]:
    return [found for path in files_of(root) if is_checked(path) and str(path).startswith(only)
            for found in findings(path, (root / path).read_text(errors="replace"))]


def test_code_and_documents_use_the_words_of_the_glossary() -> None:
    found = all_findings(REPO)
    assert not found, "\n".join([f"{len(found)} findings", *found])


# --- The rules themselves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [
    "Ledger ledger_;", "num_ledgers_", "void add(LedgerEntry entry);", "a look-up of 128 keys", "class HttpFront {",
    "struct Flight {", "KeepOrder order;", "class SchedulerHalf:", "the scheduler half", "SharedTruth truth;",
    "struct AdminRule {", "for (const Rule& rule : rules)", "Result<Hold> hold();", "struct Hold {", "it is forgotten",
    "BringWanted", "FetchOrder", "kBeyond", "kNewcomersMax",
])
def test_an_old_word_is_found(line: str) -> None:
    assert list(word_findings(line))


@pytest.mark.parametrize("line", [
    "queue.front().bytes", "a transfer in flight", "num_in_flight_", "InFlight", "pipelines keep their order",
    "the holder holds it", "FoundHolder", "a rule of the layering test", "half of the blocks", "trailing comma",
    "tapered", "beyond 64 bits", "the front door", "a lookup", "looks up a key", "what remains", "history",
    "bring it up", "kUp", "keepalive",
])
def test_ordinary_words_are_not_found(line: str) -> None:
    assert list(word_findings(line)) == []


@pytest.mark.parametrize("text", [
    "/// Of a chunk, in bytes.", "int n = 0;  // of the GPU", "// By 16 bytes a lane.", "/// And its size.",
    "/// Whoever asks gets it.", "// A peer that\n// nobody needs.", "/// False: there is none.",
    "/// Sends it. False: the queue is full.",
])
def test_a_comment_that_breaks_a_rule_is_found(text: str) -> None:
    assert list(findings(Path("transport/a.h"), text))


def test_comments_of_python_are_found() -> None:
    text = '"""Of a node."""\n# nobody asks\nx = 1  # of the GPU\ny = "of it"\n'
    assert len(list(findings(Path("launch/a.py"), text))) == 3


def test_a_sentence_passes() -> None:
    text = "/// Returns false if the queue is full.\n/// Of is no first word here.\nauto s = \"// Of a string\";\n"
    assert list(findings(Path("transport/a.h"), text)) == []


if __name__ == "__main__":
    lines = all_findings(REPO, tuple(sys.argv[1:]) or ("",))
    print("\n".join([*lines, f"{len(lines)} findings"]))
    sys.exit(1 if lines else 0)
