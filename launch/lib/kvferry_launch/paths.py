"""Paths of the files and folders of a checkout or of an installed wheel. This module does not create any of them."""

import os
import sys
from pathlib import Path

_SITE = Path(__file__).resolve().parent.parent  # launch/lib, or site-packages if a wheel is installed
IS_INSTALLED = _SITE.parent.name != "launch"
"""True if this package was installed from a wheel; False if it is part of a checkout."""

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
"""The folder for files that stay when a command ends, such as the folders of deployments."""


def command_name(name: str) -> str:
    """Returns what users type to run launch/NAME: that path in a checkout, `kvferry-launch NAME` with a wheel."""
    return f"kvferry-launch {name}" if IS_INSTALLED else f"launch/{name}"


def no_binary() -> str:
    """Returns a sentence that says that the command-line binary is missing, and what to do about it."""
    remedy = "install kvferry's wheel again" if IS_INSTALLED else "build it with launch/setup"
    return f"there is no kvferry binary at {KVFERRY} or on PATH; {remedy}"
