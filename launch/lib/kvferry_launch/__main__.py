"""The wheel's commands: `kvferry`, and `kvferry-launch COMMAND`, which is launch/COMMAND in a checkout."""

import os
import sys
from typing import NoReturn

from kvferry_launch.paths import KVFERRY

USAGE = """usage: kvferry-launch COMMAND ...

  prefill, decode  start one vLLM server with kvferry on this host
  controller       start the controller on this host
  cluster          start, watch, scale and stop a whole deployment from one YAML file
  proxy            start the proxy: one OpenAI URL for all prefill and decode servers

kvferry-launch COMMAND --help lists the options of a command."""


def main() -> None:
    """Runs the command `kvferry-launch COMMAND`. Without arguments it prints the usage."""
    command = sys.argv.pop(1) if len(sys.argv) > 1 else "--help"
    if command in ("prefill", "decode"):
        from kvferry_launch.node.start import engine_main

        engine_main(command)
    elif command == "controller":
        from kvferry_launch.node.start import controller_main

        controller_main()
    elif command == "cluster":
        from kvferry_launch.cluster.cli import main as cluster_main

        cluster_main()
    elif command == "proxy":
        from kvferry_launch.proxy.main import main as proxy_main

        proxy_main()
    elif command in ("-h", "--help"):
        print(USAGE)
    else:
        sys.exit(f"kvferry-launch: '{command}' is not a command; the commands are prefill, decode, controller, cluster "
                 "and proxy")


def kvferry() -> NoReturn:
    """Replaces this process by the program `kvferry`, which the wheel contains."""
    try:
        os.execv(KVFERRY, [str(KVFERRY), *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"kvferry: can't run {KVFERRY} ({error.strerror}); install kvferry's wheel again")


if __name__ == "__main__":
    main()
