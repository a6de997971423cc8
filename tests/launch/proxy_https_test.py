"""Tests launch/proxy with HTTPS on both sides: for its clients, and to a controller with a certificate. Also tests that
launch/cluster reports such a proxy.
"""

import argparse
import os
import re
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from certificates import ask, lock, make_certificate
from kvferry_launch.cluster.front import Reporter
from kvferry_launch.paths import RELEASE, REPO
from kvferry_launch.proxy.certificate import Authorities

DEADLINE_S = 20.0


def line_of(process: "subprocess.Popen[str]", pattern: str) -> str:
    stream = process.stdout or process.stderr
    assert stream is not None
    while line := stream.readline():
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError(f"the program ended without saying {pattern}")


def test_clients_proxy_and_controller_speak_https_and_renewed_certificates_are_used(tmp_path: Path) -> None:
    (for_controller, its_key), (for_clients, key) = (make_certificate(tmp_path, name) for name in ("one", "two"))
    with subprocess.Popen([RELEASE / "bin" / "kvferry", "controller", "--bind", "tcp://127.0.0.1:0", "--state", "none",
                           "--http", "127.0.0.1:0", "--http-cert-file", for_controller, "--http-key-file", its_key],
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as controller, \
            subprocess.Popen([sys.executable, str(REPO / "launch" / "proxy"), "--port", "0", "--controller",
                              "https://" + line_of(controller, r"HTTP on (\S+) .HTTPS"), "--tls-cert-file", for_clients,
                              "--tls-key-file", key], env=os.environ | {"SSL_CERT_FILE": str(for_controller)},
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as proxy:
        try:
            url = line_of(proxy, r"listening on (https://\S+)")
            end = time.monotonic() + DEADLINE_S
            while "kvferry_proxy_controller_up 1" not in ask(f"{url}/metrics", for_clients)[1]:
                assert time.monotonic() < end, "the proxy did not reach the controller"
                time.sleep(0.05)
            assert ask(f"{url}/health", for_clients)[0] == 503

            former = tmp_path / "former.crt"
            former.write_bytes(for_clients.read_bytes())
            for_clients.write_text("nonsense")  # until the new files are there, the former ones stay in use
            time.sleep(1.5)
            assert ask(f"{url}/health", former)[0] == 503
            make_certificate(tmp_path, "two")
            while True:
                try:
                    assert ask(f"{url}/health", for_clients)[0] == 503
                    break
                except urllib.error.URLError as error:
                    assert isinstance(error.reason, ssl.SSLCertVerificationError)
                    assert time.monotonic() < end, "the renewed certificate is not used"
                    time.sleep(0.1)
        finally:
            proxy.terminate()
            controller.terminate()


def test_new_authorities_are_trusted_without_a_restart_and_none_does_not_replace_them(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (one, _), (other, _) = (make_certificate(tmp_path, name) for name in ("one", "other"))
    trusted = tmp_path / "ca.crt"
    trusted.write_bytes(one.read_bytes())
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    authorities = Authorities()
    first = authorities.context()
    assert authorities.context() is first
    trusted.write_text("nonsense")
    assert authorities.context() is first
    assert caplog.text.count("has no certificate of an authority; the former authorities stay trusted") == 1
    trusted.unlink()
    assert authorities.context() is first
    trusted.write_bytes(other.read_bytes())
    now = authorities.context()
    assert now.get_ca_certs(binary_form=True) == [ssl.PEM_cert_to_DER_cert(other.read_text())]
    assert authorities.context() is now
    assert (now.verify_mode, now.check_hostname) == (ssl.CERT_REQUIRED, True)


@pytest.mark.parametrize("flags", [["--", "--tls-cert-file", "c", "--tls-key-file", "k"], ["--tls-cert-file=c"], []])
def test_the_launcher_asks_and_names_a_proxy_with_a_certificate_by_https(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        if flags:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*make_certificate(tmp_path))
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        Reporter(argparse.Namespace(kind="proxy", command=None, host="127.0.0.1", port=port, rest=flags,
                                    advertise_host="10.0.0.1")).look()
        server.shutdown()
    assert capsys.readouterr().out == (
        f"kvferry router node serves at http{'s' if flags else ''}://10.0.0.1:{port}\n")


def test_files_that_are_no_certificate_are_refused_by_one_sentence(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    other = make_certificate(tmp_path, "other")[1]
    for files, words in (((certificate, other), "key values mismatch"), ((key, key), "in PEM"),
                         ((tmp_path / "none", key), "No such file"),
                         ((certificate, lock(key, tmp_path / "locked.key")), "without a password"),
                         ((certificate, ""), "only one of them is set")):
        ended = subprocess.run([sys.executable, str(REPO / "launch" / "proxy"), "--port", "0", "--tls-cert-file",
                                files[0], "--tls-key-file", files[1]], stdin=subprocess.DEVNULL, capture_output=True,
                               text=True, timeout=DEADLINE_S, check=False)
        assert ended.returncode != 0
        assert words in ended.stderr.lower() or words in ended.stderr, ended.stderr
        assert "Traceback" not in ended.stderr
