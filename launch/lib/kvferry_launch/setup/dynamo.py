"""Installs Dynamo's KV indexer from PyPI into build/dynamo, apart from .venv, for the tests of KV events."""

from pathlib import Path

from kvferry_launch.paths import BUILD, LAUNCH, LOGS, VENV_PYTHON
from kvferry_launch.progress import Step
from kvferry_launch.setup.commands import run_logged, stamped

FOLDER = BUILD / "dynamo"
REQUIREMENTS = LAUNCH / "requirements-dynamo.txt"


def ensure_dynamo() -> Path:
    """Installs the indexer, unless what launch/requirements-dynamo.txt lists is installed. Returns the folder that a
    program must add to sys.path to import the indexer. Errors: SetupError.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    LOGS.mkdir(exist_ok=True)
    with stamped(FOLDER / ".kvferry", REQUIREMENTS) as stale:
        if stale:
            with Step("Dynamo's KV indexer") as step:
                command = [str(VENV_PYTHON), "-m", "pip", "install", "--progress-bar", "off", "--no-deps", "--upgrade",
                           "--target", str(FOLDER), "-r", str(REQUIREMENTS)]
                run_logged("pip install of Dynamo's KV indexer", command, LOGS / "pip.log", tick=step.update)
    return FOLDER
