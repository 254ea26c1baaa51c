"""The CNI shim: the native program that the container runtime executes, and where to find it.

The program is written in Zig (`shim.zig` says what it does); this package compiles it (`build.py`) and knows the path
of the installed binary.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import sysconfig

__all__ = ["binary"]

_NAME = "multus-shim"


def binary() -> pathlib.Path:
    """Path of the installed shim.

    The environment variable MULTUS_SHIM_BINARY wins; then the bin folder of this Python environment; then PATH.
    Raises FileNotFoundError, with what to do, when there is none.
    """
    named = os.environ.get("MULTUS_SHIM_BINARY")
    if named:
        path = pathlib.Path(named)
        if path.is_file():
            return path
        raise FileNotFoundError(f"MULTUS_SHIM_BINARY is {named!r}, where no file is")
    installed = pathlib.Path(sysconfig.get_path("scripts")) / _NAME
    if installed.is_file():
        return installed
    found = shutil.which(_NAME)
    if found:
        return pathlib.Path(found)
    raise FileNotFoundError(
        f"no {_NAME} in {installed.parent} or on PATH; install this project with pip, or build the binary alone"
        " with `python -m multus_shim.build`"
    )
