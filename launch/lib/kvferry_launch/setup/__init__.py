"""Installs and builds what a checkout needs: Debian packages, .venv, vLLM, the build, the toy model.

The modules here use only the standard library, because set-up runs before anything is installed. They may import
`paths` and `progress`.
"""

from kvferry_launch.setup.build import PRODUCT
from kvferry_launch.setup.commands import SetupError
from kvferry_launch.setup.steps import ensure, ensure_or_exit

__all__ = ["PRODUCT", "SetupError", "ensure", "ensure_or_exit"]
