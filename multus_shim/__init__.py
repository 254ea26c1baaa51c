"""The CNI shim, a native program that the container runtime executes: its Zig sources, its build and its path."""

from __future__ import annotations

import os
import pathlib
import shutil
import sysconfig

__all__ = ["binary"]

_NAME = "multus-shim"


def binary() -> pathlib.Path:
    """Return the path of the shim: MULTUS_SHIM_BINARY, or in the bin folder of this Python environment, or in PATH.

    Raises FileNotFoundError with the remedy.
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
