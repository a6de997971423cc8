"""Paths of the files and folders in a checkout. This module does not create them."""

from pathlib import Path

REPO = Path(__file__).resolve().parents[3]
LAUNCH = REPO / "launch"
BUILD = REPO / "build"
RELEASE = BUILD / "release"
LOGS = BUILD / "logs"
MODELS = BUILD / "models"
VENV = REPO / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
KVFERRY = RELEASE / "bin" / "kvferry"
"""The command-line binary of the release build."""
