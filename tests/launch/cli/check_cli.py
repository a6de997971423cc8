#!/usr/bin/env python3
"""Runs the real `kvferry` binary: python3 check_cli.py PATH_TO_KVFERRY. Standard library only."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
import unittest
from collections.abc import Callable
from pathlib import Path

KVFERRY = ""
DEADLINE_S = 30


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [KVFERRY, *args], capture_output=True, text=True, timeout=DEADLINE_S, env={**os.environ, **environment}
    )


class Controller:
    """A running controller on a free port. The controller ends with the `with` block."""

    def __init__(self, *args: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [KVFERRY, "controller", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def __enter__(self) -> "Controller":
        ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        line = self.process.stdout.readline() if ready else ""
        match = re.fullmatch(r"kvferry controller listening on (\S+)\n", line)
        if match is None:
            self.process.kill()
            raise AssertionError(f"unexpected first line {line!r}: {self.process.communicate()[1]}")
        self.endpoint = match.group(1)
        return self

    def end(self, signal_number: int = signal.SIGTERM) -> tuple[int, str, str, float]:
        """Ends the controller. Returns its exit status, the rest of its stdout, its stderr, and the seconds until it
        ended.
        """
        started = time.monotonic()
        self.process.send_signal(signal_number)
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err, time.monotonic() - started

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


class Terminal:
    """A terminal of a size, in which one command runs."""

    def __init__(self, columns: int, rows: int) -> None:
        self.main, self.other = pty.openpty()
        self.resize(columns, rows)
        self.before = self.settings()
        self.shown = ""
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Terminal":
        return self

    def start(self, *args: str) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen([KVFERRY, *args], stdin=self.other, stdout=self.other, stderr=self.other)
        return self.process

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def settings(self) -> list:
        return termios.tcgetattr(self.other)

    def write(self, text: str) -> None:
        os.write(self.main, text.encode())

    def read_until(self, is_there: Callable[[str], bool]) -> str:
        """Reads until the text since the last frame's begin is such a one, and returns this text."""
        deadline = time.monotonic() + DEADLINE_S
        while not is_there(frame := self.shown.split("\x1b[H")[-1]):
            if not select.select([self.main], [], [], max(0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"it did not come; the end of what came: {self.shown[-2000:]!r}")
            self.shown += os.read(self.main, 65536).decode()
        return frame

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.main)
        os.close(self.other)


class CliTest(unittest.TestCase):
    def assert_fails(self, result: subprocess.CompletedProcess[str], exit_status: int, *words: str) -> None:
        self.assertEqual(result.returncode, exit_status, result.stderr)
        self.assertEqual(result.stdout, "")
        self.assertEqual(result.stderr.count("\n"), 1, f"one line, please: {result.stderr!r}")
        self.assertTrue(result.stderr.startswith("kvferry: "), result.stderr)
        for word in words:
            self.assertIn(word, result.stderr)

    def config(self, text: str) -> str:
        file = tempfile.NamedTemporaryFile("w", suffix=".yaml")  # noqa: SIM115  (the test's clean-up closes it)
        self.addCleanup(file.close)
        file.write(text)
        file.flush()
        return file.name

    def test_version_and_help_work_everywhere(self) -> None:
        self.assertRegex(run("--version").stdout, r"^kvferry \d+\.\d+\.\d+\n$")
        for args in ([], ["controller"], ["status"]):
            result = run(*args, "--help")
            self.assertEqual(result.returncode, 0)
            self.assertIn("Usage", result.stdout)
        self.assertIn("or 'none'", run("controller", "--help").stdout)

    def test_unknown_words_are_one_clear_line(self) -> None:
        commands = re.findall(r"^  ([a-z]+) ", run("--help").stdout.split("Subcommands:")[1], re.MULTILINE)
        self.assertIn("status", commands)
        self.assert_fails(run(), 2, "command is missing", ", ".join(commands))
        self.assert_fails(run("fly"), 2, "unknown command 'fly'", ", ".join(commands))
        self.assert_fails(run("controller", "--bidn"), 2, "--bidn", "kvferry controller --help")
        self.assert_fails(run("status", "--bind"), 2, "--bind")

    def test_a_new_key_is_for_its_owner_only_and_replaces_none(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("a.key", "b.key")]
            for file in files:
                self.assertEqual(run("keygen", str(file)).stdout, f"{file}\n")
                self.assertEqual(file.stat().st_mode & 0o7777, 0o600)
                self.assertRegex(file.read_text(), r"^[0-9a-f]{64}\n$")
            self.assertNotEqual(files[0].read_text(), files[1].read_text())
            before = files[0].read_text()
            self.assert_fails(run("keygen", str(files[0])), 2, str(files[0]), "exists")
            self.assertEqual(files[0].read_text(), before)
            self.assert_fails(run("keygen", f"{folder}/none/x"), 1, f"{folder}/none/x", "No such file")
        self.assert_fails(run("keygen"), 2, "FILE")

    def test_a_key_is_replaced_in_three_steps_and_the_file_stays_its_owners_own(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file, link = Path(folder, "a.key"), Path(folder, "link.key")
            run("keygen", str(file))
            file.chmod(0o400)
            link.symlink_to(file)
            old = file.read_bytes()
            for step in ("--switch", "--retire"):
                self.assert_fails(run("keygen", step, str(file)), 2, str(file), "has only one key")
            self.assertEqual(run("keygen", "--add", str(link)).stdout, f"{link}\n")
            head, *keys = file.read_text().splitlines()
            self.assertEqual((head, keys[0], len(keys)), ("kvferry cluster keys 1", old.hex(), 2))
            new = bytes.fromhex(keys[1])
            self.assertRegex(new.decode(), r"^[0-9a-f]{64}\n$")
            self.assert_fails(run("keygen", "--add", str(file)), 2, str(file), "has two keys", "--retire")
            self.assertEqual(run("keygen", str(file), "--switch").returncode, 0)
            self.assertEqual(file.read_text().splitlines(), [head, keys[1], keys[0]])
            self.assertEqual(run("keygen", "--retire", str(file)).returncode, 0)
            self.assertEqual((file.read_bytes(), file.stat().st_mode & 0o7777), (new, 0o400))
            self.assertTrue(link.is_symlink())
            self.assertEqual(sorted(Path(folder).iterdir()), [file, link])
            self.assert_fails(run("keygen", "--add", "--switch", str(file)), 2, "--add")
            self.assert_fails(run("keygen", "--add", f"{folder}/none"), 2, f"{folder}/none", "No such file")
            file.chmod(0o644)
            self.assert_fails(run("keygen", "--add", str(file)), 2, str(file), "mode 0644")

    def test_a_token_follows_from_the_key_and_the_role(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            key = Path(folder, "key")
            key.write_text("k" * 32)
            key.chmod(0o600)
            reader = run("token", KVFERRY_CLUSTER_KEY_FILE=str(key)).stdout
            self.assertRegex(reader, r"^[0-9a-f]{64}\n$")
            same = run("token", "--role", "reader", "--cluster-key-file", str(key)).stdout
            self.assertEqual(same, reader)
            self.assertNotEqual(run("token", "--role", "admin", "--cluster-key-file", str(key)).stdout, reader)
            self.assert_fails(run("token", "--role", "king", "--cluster-key-file", str(key)), 2, "king", "reader")
            key.chmod(0o644)
            self.assert_fails(run("token", "--cluster-key-file", str(key)), 2, str(key), "mode 0644")
        for command in (("token",), ("token", "--cluster-key-file", "")):
            self.assert_fails(run(*command), 2, "--cluster-key-file")

    def test_only_members_reach_a_controller_with_a_key(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            ours, other = f"{folder}/ours.key", f"{folder}/other.key"
            for file in (ours, other):
                run("keygen", file)
            with Controller("--bind", "tcp://127.0.0.1:0", "--cluster-key-file", ours) as controller:
                there = ("--controller", controller.endpoint)
                self.assert_fails(run("status", *there), 1, "not reachable", "this process has no cluster key",
                                  "cluster_key_file")
                self.assert_fails(run("clear", *there, "--cluster-key-file", other), 1, "must have the same key")
                status = run("status", *there, "--json", KVFERRY_CLUSTER_KEY_FILE=ours)
                counters = json.loads(status.stdout)["counters"]
                self.assertEqual(counters["messages_taken"], 1, "that of this status")
                self.assertGreaterEqual(counters["handshakes_refused"], 2)
                self.assert_fails(run("clear", *there, "--cluster-key-file", ours), 1, "has no nodes")
                self.assertIn("refused a connection (1 so far): the peer has no cluster key", controller.end()[2])
            with Controller("--bind", "tcp://127.0.0.1:0") as controller:
                there = ("--controller", controller.endpoint)
                self.assert_fails(run("status", *there, "--cluster-key-file", ours), 1,
                                  "this process has a cluster key")
            Path(ours).chmod(0o644)
            for command in ("controller", "status"):
                self.assert_fails(run(command, "--cluster-key-file", ours), 2, ours, "mode 0644", "0600 and 0400")
            Path(ours).chmod(0o600)
            both = ("--cluster-key-file", ours, "--stream", "stream://127.0.0.1:0")
            self.assert_fails(run("controller", *both), 2, "stream://127.0.0.1:0", "neither encrypted")

    def test_without_a_key_other_hosts_are_let_in_only_by_insecure(self) -> None:
        for where in (("--bind", "tcp://0.0.0.0:0"), ("--bind", "tcp://*:0"), ("--stream", "stream://0.0.0.0:0"),
                      ("--http", "0.0.0.0:0")):
            result = run("controller", *where, "--state", "none")
            self.assert_fails(result, 2, where[1], "kvferry keygen", "KVFERRY_CLUSTER_KEY_FILE", "insecure")
        nowhere = ("--state", "none", "--bind", "tcp://0.0.0.0:0")
        for flags, environment in ((["--insecure"], {}), ([], {"KVFERRY_INSECURE": "true"})):
            with Controller(*nowhere, *flags, **environment) as controller:
                there = ("--controller", controller.endpoint.replace("0.0.0.0", "127.0.0.1"))
                self.assertTrue(json.loads(run("status", *there, "--json").stdout)["insecure"])
                self.assertIn("INSECURE", run("status", *there).stdout)
                self.assertIn("insecure: every host", controller.end()[2])
        with tempfile.TemporaryDirectory() as folder:
            run("keygen", f"{folder}/key")
            with Controller(*nowhere, "--cluster-key-file", f"{folder}/key") as controller:
                there = ("--controller", controller.endpoint.replace("0.0.0.0", "127.0.0.1"))
                status = run("status", *there, "--json", "--cluster-key-file", f"{folder}/key")
                self.assertFalse(json.loads(status.stdout)["insecure"])
                self.assertNotIn("insecure", controller.end()[2])
        with Controller("--bind", "tcp://127.0.0.1:0", "--insecure") as controller:
            status = run("status", "--controller", controller.endpoint, "--json")
            self.assertFalse(json.loads(status.stdout)["insecure"])

    def test_bad_values_name_key_value_place_and_what_is_allowed(self) -> None:
        self.assert_fails(run("controller", "--bind", "14600"), 2, "bind is '14600'", "--bind", "tcp://HOST:PORT")
        self.assert_fails(run("controller", KVFERRY_BIND="x"), 2, "bind is 'x'", "KVFERRY_BIND", "tcp://HOST:PORT")
        path = self.config("bind: nowhere\n")
        self.assert_fails(run("controller", "--config", path), 2, "bind is 'nowhere'", path, "tcp://HOST:PORT")
        self.assert_fails(run("status", "--controller", "x"), 2, "controller is 'x'", "tcp://HOST:PORT")

    def test_bad_services_are_one_clear_line_without_their_passwords(self) -> None:
        for args in (
            ("--etcd", "http://u:hidden@h:x"),
            ("--etcd", "https://u:hidden@h:1"),
            ("--event-log", "redis://:hidden@h/x"),
            ("--event-log", "rediss://:hidden@h"),
        ):
            result = run("controller", "--bind", "tcp://127.0.0.1:0", *args)
            self.assert_fails(result, 2, args[0].removeprefix("--"), "allowed: ")
            self.assertNotIn("hidden", result.stderr)
        result = run("controller", "--bind", "tcp://127.0.0.1:0", KVFERRY_EVENT_LOG="nonsense")
        self.assert_fails(result, 2, "event-log", "redis://HOST")
        everywhere = ("controller", "--insecure", "--bind", "tcp://0.0.0.0:0", "--etcd", "http://127.0.0.1:1")
        self.assert_fails(run(*everywhere), 2, "advertise is missing", "tcp://HOST:PORT")
        self.assert_fails(run(*everywhere, "--advertise", "here"), 2, "advertise is 'here'", "tcp://HOST:PORT")
        self.assert_fails(run(*everywhere, "--replica", "a b"), 2, "replica is 'a b'", "printable")

    def test_a_replica_serves_and_ends_without_etcd_and_redis(self) -> None:
        # No process listens at the first address, and no host answers at the second one.
        for etcd in ("http://127.0.0.1:1", "http://192.0.2.1:2379"):
            with Controller(
                "--bind", "tcp://127.0.0.1:0", "--etcd", etcd, "--event-log", "redis://127.0.0.1:1"
            ) as controller:
                status = json.loads(run("status", "--controller", controller.endpoint, "--json").stdout)
                self.assertFalse(status["replica"]["etcd_ok"])
                replicas = status["replica"]["replicas"]
                self.assertEqual([replica["endpoint"] for replica in replicas], [controller.endpoint])
                exit_status, _, _, seconds = controller.end()
                self.assertEqual(exit_status, 0)
                self.assertLess(seconds, 5.0)

    def test_bad_config_files_are_one_clear_line(self) -> None:
        path = self.config("bnd: tcp://127.0.0.1:0\n")
        self.assert_fails(run("controller", "--config", path), 2, path, "unknown key 'bnd'", "bind, ")
        self.assert_fails(run("controller", "--config", "/nonexistent"), 2, "/nonexistent",
                          "can't be read: No such file")
        self.assert_fails(run("controller", "--config", "/tmp"), 2, "/tmp: ",
                          "can't be read: it is a folder")
        self.assert_fails(run("controller", "--config", self.config("bind: [\n")), 2, "line")
        self.assert_fails(run("controller", "--config", self.config("just words\n")), 2, "key: value")
        self.assert_fails(run("controller", "--config", self.config("bind: {a: b}\n")), 2, "'bind'")
        self.assert_fails(run("controller", "--config", self.config("bind:\n")), 2, "'bind' has no value")

    def test_prints_its_endpoint_and_ends_within_a_second_on_either_signal(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            with Controller("--bind", "tcp://127.0.0.1:0", "--state", "none") as controller:
                self.assertRegex(controller.endpoint, r"^tcp://127\.0\.0\.1:[1-9]\d*$")
                exit_status, out, _, seconds = controller.end(number)
                self.assertEqual((exit_status, out), (0, ""))
                self.assertLess(seconds, 1.0)

    def test_a_flag_wins_over_the_environment_and_that_over_the_file(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            places = {name: f"ipc://{folder}/{name}" for name in ("file", "environment", "flag")}
            path = self.config(f"bind: {places['file']}\n")
            with Controller("--config", path) as controller:
                self.assertEqual(controller.endpoint, places["file"])
            with Controller("--config", path, KVFERRY_BIND=places["environment"]) as controller:
                self.assertEqual(controller.endpoint, places["environment"])
            with Controller(
                "--config", path, "--bind", places["flag"], KVFERRY_BIND=places["environment"]
            ) as controller:
                self.assertEqual(controller.endpoint, places["flag"])

    def test_localhost_may_be_called_by_its_name(self) -> None:
        with Controller("--bind", "tcp://localhost:0") as controller:
            self.assertRegex(controller.endpoint, r"^tcp://127\.0\.0\.1:[1-9]\d*$")

    def test_a_port_in_use_is_one_clear_line(self) -> None:
        with Controller("--bind", "tcp://127.0.0.1:0") as controller:
            self.assert_fails(run("controller", "--bind", controller.endpoint), 1, controller.endpoint, "in use")
        nowhere = ("--bind", "tcp://no-such-interface:0", "--insecure")
        self.assert_fails(run("controller", *nowhere), 1, "interface of this machine")

    def test_two_controllers_do_not_share_an_http_port(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            http = f"127.0.0.1:{probe.getsockname()[1]}"
        with Controller("--bind", "tcp://127.0.0.1:0", "--http", http) as controller:
            second = run("controller", "--bind", "tcp://127.0.0.1:0", "--http", http)
            self.assert_fails(second, 1, f"cannot listen on {http}: Address already in use; allowed: a free port")
            controller.end()
        for address, reason in (("192.0.2.1:0", "cannot listen on 192.0.2.1:0: Cannot assign requested address"),
                                ("nobody.invalid:0", "cannot resolve host 'nobody.invalid'")):
            refused = run("controller", "--bind", "tcp://127.0.0.1:0", "--http", address, "--insecure")
            self.assertNotIn("in use", refused.stderr)
            self.assert_fails(refused, 1, reason, "an address of this machine")
        with Controller("--bind", "tcp://127.0.0.1:0", "--http", http):
            pass  # the port is free again, because the controller that used it has ended

    def test_a_state_without_a_folder_is_told(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            bind = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        for state, is_told in ((), True), (("--state", "none"), False):
            with Controller("--bind", bind, *state, HOME="", XDG_STATE_HOME="") as controller:
                told = controller.end()[2]
            self.assertEqual("no state for a restart, because neither HOME nor XDG_STATE_HOME" in told, is_told, told)

    def test_status_tells_of_a_running_controller(self) -> None:
        with Controller("--bind", "tcp://127.0.0.1:0") as controller:
            result = run("status", "--controller", controller.endpoint, "--json")
            self.assertEqual(result.returncode, 0, result.stderr)
            status = json.loads(result.stdout)
            self.assertEqual(status["controller"], controller.endpoint)
            self.assertEqual(status["nodes"], [])
            self.assertEqual(status["counters"]["lookups"], 0)
            table = run("status", KVFERRY_CONTROLLER=controller.endpoint)
            self.assertEqual(table.returncode, 0, table.stderr)
            self.assertIn("lookups: 0", table.stdout)

    def test_rules_are_obeyed_or_refused_in_one_line(self) -> None:
        with Controller("--bind", "tcp://127.0.0.1:0") as controller:
            there = ("--controller", controller.endpoint)
            self.assert_fails(run("drain", "n1", *there), 1, "namespace 'default' has no node 'n1'; it has none")
            self.assert_fails(run("drain", "--undo", "n1", "--namespace", "x", *there), 1, "namespace 'x'")
            self.assert_fails(run("clear", *there), 1, "namespace 'default' has no nodes")
            for whom in ("--producer", "--member"):
                self.assert_fails(run("purge", whom, "n1", *there), 1, "namespace 'default' has no nodes")
            self.assertEqual(run("quota", "1000", *there).stdout,
                             "namespace 'default' may have at most 1000 chunks in the index\n")
            answer = json.loads(run("quota", "--none", "--json", *there).stdout)
            self.assertEqual(answer["text"], "namespace 'default' has no quota")
        self.assert_fails(run("drain"), 2, "NODE is required")
        self.assert_fails(run("purge"), 2, "--producer is required, or --member in its place")
        self.assert_fails(run("purge", "--producer", "x", "--member", "x"), 2, "--producer excludes --member")
        self.assert_fails(run("purge", "--producer", "x", "--timeout", "0"), 2,
                          "--timeout: '0' is not a number from 0.1 to 3600")
        self.assert_fails(run("quota", *there), 2, "CHUNKS or --none")
        for chunks in ("-5", "abc", "1.5", "", "99999999999999999999999"):
            self.assert_fails(run("quota", chunks, *there), 2,
                              f"CHUNKS: '{chunks}' is not a whole number from 0 to 1000000000000000")
        self.assert_fails(run("clear", "--controller", "tcp://127.0.0.1:1"), 1, "not reachable")
        for seconds in ("-1", "0", "inf", "nan", "1e9", "10s"):
            self.assert_fails(run("drain", "x", "--timeout", seconds), 2,
                              f"--timeout: '{seconds}' is not a number from 0.1 to 604800")
        self.assert_fails(run("doctor", "--security", "--pid", "0"), 2,
                          "--pid: '0' is not a whole number from 1 to 2147483647")

    def test_state_is_kept_by_default_on_a_port_of_its_own(self) -> None:
        with tempfile.TemporaryDirectory() as home, socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            probe.close()
            places = {"XDG_STATE_HOME": home}
            with Controller("--bind", "tcp://127.0.0.1:0", **places):
                self.assertEqual(list(Path(home).iterdir()), [])
            bind = f"tcp://127.0.0.1:{port}"
            with Controller("--bind", bind, **places) as controller:
                folder = Path(home, "kvferry", f"controller-{port}")
                self.assertTrue((folder / "kvferry-controller-state").exists())
                self.assertIn(f"state: {folder}", run("status", "--controller", controller.endpoint).stdout)
                status = json.loads(run("status", "--controller", controller.endpoint, "--json").stdout)
                self.assertTrue(status["state"]["durable"])
                second = run("controller", "--bind", "tcp://127.0.0.1:0", "--state", str(folder))
                self.assert_fails(second, 1, "another controller", str(folder))
            with Controller("--bind", bind, "--state", "none", **places) as controller:
                self.assertIn("state: none", run("status", "--controller", controller.endpoint).stdout)

    def test_a_folder_of_something_else_is_one_clear_line(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "thesis.txt").write_text("precious")
            result = run("controller", "--bind", "tcp://127.0.0.1:0", "--state", folder)
            self.assert_fails(result, 2, folder, "not a kvferry controller's", "--state none")

    def test_a_stream_is_printed_too_and_status_works_over_it(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for stream, pattern in (
                (f"unix://{folder}/socket", re.escape(f"unix://{folder}/socket")),
                ("stream://127.0.0.1:0", r"stream://127\.0\.0\.1:[1-9]\d*"),
            ):
                with Controller("--bind", "tcp://127.0.0.1:0", "--stream", stream) as controller:
                    line = controller.process.stdout.readline()
                    match = re.fullmatch(rf"kvferry controller listening on ({pattern})\n", line)
                    self.assertIsNotNone(match, line)
                    result = run("status", "--controller", match.group(1), "--json")
                    self.assertEqual(result.returncode, 0, result.stderr)
                    self.assertEqual(json.loads(result.stdout)["controller"], match.group(1))

    def test_bad_streams_name_what_is_allowed(self) -> None:
        self.assert_fails(run("controller", "--stream", "tcp://h:1"), 2, "stream is 'tcp://h:1'", "none, unix:///")
        path = "unix:///no/such/folder/socket"
        self.assert_fails(run("controller", "--bind", "tcp://127.0.0.1:0", "--stream", path), 1, path, "No such file")

    def test_top_prints_frames_without_a_terminal_only_if_asked(self) -> None:
        with Controller("--bind", "tcp://127.0.0.1:0") as controller:
            there = ("--controller", controller.endpoint)
            frame = run("top", "--once", *there)
            self.assertEqual(frame.returncode, 0, frame.stderr)
            self.assertIn("no node is registered", frame.stdout)
            self.assertNotIn("\x1b", frame.stdout)
            self.assertEqual(json.loads(run("top", "--json", *there).stdout), [])
            self.assert_fails(run("top", *there), 2, "no terminal", "--once")
            self.assert_fails(run("top", "--once", "--sort", "luck", *there), 2, "luck", "pool")
        self.assert_fails(run("top", "--once", "--controller", "tcp://127.0.0.1:1"), 1, "not reachable")

    def test_top_restores_the_terminal_and_outlives_the_controller(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            bind = ("--bind", f"ipc://{folder}/controller")
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, None):
                with Terminal(80, 24) as terminal:
                    with Controller(*bind) as controller:
                        top = terminal.start("top", "--controller", controller.endpoint)
                        terminal.read_until(lambda frame: "no node is registered" in frame)
                        self.assertFalse(terminal.settings()[3] & termios.ECHO)
                    terminal.read_until(lambda frame: re.search("no answer for .* not reachable", frame) is not None)
                    terminal.resize(40, 10)
                    with Controller(*bind):
                        frame = terminal.read_until(lambda frame: frame.endswith("\x1b[J") and "no answer" not in frame)
                        lines = [re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line).rstrip("\r") for line in frame.split("\n")]
                        self.assertLessEqual(max(map(len, lines)), 40)
                        self.assertTrue(lines[0].startswith("kvferry top: up "))
                        if number is None:
                            terminal.write("q")
                        else:
                            top.send_signal(number)
                        self.assertEqual(top.wait(DEADLINE_S), 0)
                    terminal.read_until(lambda shown: "\x1b[?1049l" in shown)
                    self.assertTrue(terminal.shown.endswith("\x1b[?7h\x1b[?25h\x1b[?1049l"), terminal.shown[-80:])
                    self.assertEqual(terminal.settings(), terminal.before)

    def test_status_without_a_controller_is_one_clear_line(self) -> None:
        self.assert_fails(run("status", "--controller", "tcp://127.0.0.1:1"), 1, "tcp://127.0.0.1:1", "not reachable")


if __name__ == "__main__":
    KVFERRY = str(Path(sys.argv.pop(1)).resolve())
    for variable in ("KVFERRY_BIND", "KVFERRY_STREAM", "KVFERRY_HTTP", "KVFERRY_STATE", "KVFERRY_CONTROLLER",
                     "KVFERRY_ETCD", "KVFERRY_EVENT_LOG", "KVFERRY_REPLICA", "KVFERRY_ADVERTISE"):
        os.environ.pop(variable, None)
    unittest.main()
