"""Paths of the files and folders in a checkout, or of an installed wheel. This module does not create them."""

import os
import sys
from pathlib import Path

_SITE = Path(__file__).resolve().parent.parent  # launch/lib, or site-packages if a wheel is installed
IS_INSTALLED = _SITE.parent.name != "launch"
"""Whether this package came with a wheel, without a checkout around it."""

REPO = _SITE.parent.parent
LAUNCH = REPO / "launch"
BUILD = REPO / "build"
RELEASE = BUILD / "release"
LOGS = BUILD / "logs"
MODELS = BUILD / "models"
VENV = REPO / ".venv"
VENV_PYTHON = Path(sys.executable) if IS_INSTALLED else VENV / "bin" / "python"
KVFERRY = (_SITE / "kvferry" if IS_INSTALLED else RELEASE) / "bin" / "kvferry"
"""The command-line binary of the wheel or of the release build."""
STATE = (Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kvferry" if IS_INSTALLED
         else BUILD)
"""The folder of the files that are kept between two runs."""


def command_name(name: str) -> str:
    """Returns how users call a script of launch/: launch/NAME, or as a command of the wheel."""
    return f"kvferry-launch {name}" if IS_INSTALLED else f"launch/{name}"


def no_binary() -> str:
    """Returns a sentence that says that the command-line binary is missing, and what to do about it."""
    remedy = "install kvferry's wheel again" if IS_INSTALLED else "build it with launch/setup"
    return f"there is no kvferry binary at {KVFERRY} or on PATH; {remedy}"
