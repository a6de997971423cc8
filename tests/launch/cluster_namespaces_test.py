"""Tests the hosts of tests/cluster/run: ssh reaches them, they are separate from each other, and they and all their
processes are gone afterwards.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from cluster_namespaces import why_not
from kvferry_launch.paths import REPO

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

# This program runs in a process of its own, because it moves that process into a namespace.
SCRIPT = """
import subprocess, sys, time
from pathlib import Path
from cluster_namespaces import Namespaces, NamespaceError, ip, only_one, ours

ip("netns", "add", "kvferry-left")
left = subprocess.Popen(["ip", "netns", "exec", "kvferry-left", "sleep", "600"], stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL)
while not ip("netns", "pids", "kvferry-left"):
    time.sleep(0.01)
with Namespaces(Path(sys.argv[1]), ["a", "b"]) as hosts:
    assert left.wait(10) == -9, "what a killed run left goes"
    assert sorted(ours()) == ["kvferry-a", "kvferry-b", "kvferry-desk", "kvferry-switch"]
    try:
        only_one()
    except NamespaceError as error:
        print(error)
    ssh = ["ssh", "-T", "-o", "BatchMode=yes", *hosts.settings()["ssh"]["options"]]
    for name, address in hosts.hosts.items():
        told = subprocess.run([*ssh, "-l", "root", name, "ip -o -4 address show dev cable; readlink /proc/self/ns/net"],
                              capture_output=True, text=True, check=True).stdout
        assert f" {address}/24 " in told, told
        print(told.split()[-1])
    lost = subprocess.Popen([*ssh, "-l", "root", "kvferry-a", "sleep 600"])
    while len(ip("netns", "pids", "kvferry-a").split()) < 3:
        time.sleep(0.01)
lost.wait(10)
print(ours())
"""


def test_hosts_are_apart_and_leave_nothing(tmp_path: Path) -> None:
    path = f"sys.path[:0] = [{str(REPO / 'tests' / 'cluster')!r}, {str(REPO / 'launch' / 'lib')!r}]"
    done = subprocess.run([sys.executable, "-c", f"import sys; {path}\n{SCRIPT}", str(tmp_path)], capture_output=True,
                          text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    busy, first, second, left = done.stdout.splitlines()
    assert busy == "another run has this machine's namespaces"
    assert first != second
    assert left == "[]"
