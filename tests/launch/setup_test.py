"""Tests that set-up reports an obstacle in one line, and does not repeat finished steps."""

import io
import sys
import time
from pathlib import Path

import pytest
from kvferry_launch.paths import LAUNCH
from kvferry_launch.progress import REDRAW_INTERVAL_S, Step
from kvferry_launch.setup import SetupError, commands, debian, venv


def test_every_requirement_is_pinned_or_has_a_minimum() -> None:
    for name in ("requirements.txt", "requirements-tests.txt", "requirements-vllm.txt"):
        for line in venv.requirements(LAUNCH / name).values():
            assert "==" in line or ">=" in line, line


def test_packages_that_only_tests_need_are_left_out_otherwise() -> None:
    assert "clang-format" in debian.debian_packages(tests=True)
    assert "clang-format" not in debian.debian_packages(tests=False)
    assert "libucx-dev" in debian.debian_packages(tests=False)


def test_a_failing_command_is_reported_with_its_tail_and_its_log(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "REPO", tmp_path)
    command = [sys.executable, "-c", "print('first'); print('the reason'); raise SystemExit(2)"]
    with pytest.raises(SetupError, match=r"the step failed \(exit status 2\).*step\.log") as caught:
        commands.run_logged("the step", command, tmp_path / "step.log")
    assert caught.value.tail.endswith("first\nthe reason")
    assert "the reason" in (tmp_path / "step.log").read_text()


def test_a_command_that_fails_for_want_of_a_network_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "REPO", tmp_path)
    command = [sys.executable, "-c", "print('Temporary failure resolving x'); raise SystemExit(100)"]
    with pytest.raises(SetupError, match="a server on the network was not reached"):
        commands.run_logged("the step", command, tmp_path / "step.log")


def test_a_missing_command_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="'no-such-command' is not installed"):
        commands.run_logged("the step", ["no-such-command"], tmp_path / "step.log")


def test_lines_are_passed_on_as_they_come_without_their_ends(tmp_path: Path) -> None:
    lines: list[str] = []
    command = [sys.executable, "-c", "print('a\\nb\\rc', end='')"]
    commands.run_logged("the step", command, tmp_path / "step.log", lines.append)
    assert lines == ["a", "b", "c"]


def test_no_root_and_no_sudo_names_the_packages_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debian, "debian_packages", lambda tests: ["no-such-package"])
    monkeypatch.setattr(debian.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(debian.shutil, "which", lambda name: None if name == "sudo" else f"/usr/bin/{name}")
    monkeypatch.setattr(debian.subprocess, "run", lambda *_, **__: type("Done", (), {"stdout": ""}))
    with pytest.raises(SetupError, match=r"not root and has no sudo.*apt-get install no-such-package"):
        debian.ensure_debian_packages(tests=False)


def test_an_old_python_is_refused_with_both_versions() -> None:
    with pytest.raises(SetupError, match=r"is Python 3\.\d+; .*set the environment variable PYTHON to .* 9\.0 or "
                                          "later$"):
        venv._check_python(sys.executable, (9, 0))
    with pytest.raises(SetupError, match="'no-such-python' is not a Python interpreter"):
        venv._check_python("no-such-python", (3, 10))


def test_a_stamp_is_stale_until_its_block_ended_well_and_after_its_input_changed(tmp_path: Path) -> None:
    source, stamp = tmp_path / "input", tmp_path / "stamp"
    source.write_text("one")
    with pytest.raises(SetupError), commands.stamped(stamp, source) as stale:
        assert stale
        raise SetupError("failed")
    with commands.stamped(stamp, source) as stale:
        assert stale
    with commands.stamped(stamp, source) as stale:
        assert not stale
    source.write_text("two")
    with commands.stamped(stamp, source) as stale:
        assert stale


def test_a_step_that_fails_ends_the_command_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "REPO", tmp_path)

    def call(name: str, code: str) -> None:
        commands.run_logged(name, [sys.executable, "-c", code], tmp_path / f"{name}.log")

    fail, wait = "raise SystemExit(3)", "import time; time.sleep(60)"
    with pytest.raises(SetupError, match=r"^thread failed \(exit status 3\)"), \
            commands.beside(lambda: call("thread", fail)):
        call("block", wait)
    with pytest.raises(SetupError, match=r"^block failed \(exit status 3\)"), \
            commands.beside(lambda: call("thread", wait)):
        call("block", fail)
    with commands.beside(lambda: call("thread", "print()")):
        call("block", "print()")


def test_of_two_steps_on_a_terminal_the_first_draws_its_bar() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    with Step("first", screen) as first, Step("second", screen) as second:
        second.update(0.5)
        assert "second" not in screen.getvalue()
        first.done()
        time.sleep(REDRAW_INTERVAL_S)
        second.update(0.5)
        assert "second [############............]  50%" in screen.getvalue()
