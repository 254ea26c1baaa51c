"""Build hook of the wheel: compile the shim and put it into the environment's bin folder.

hatchling runs this for plain and for editable installs (`[tool.hatch.build.targets.wheel.hooks.custom]`).
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
import sysconfig
import tempfile
import typing

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def _shim_build(root: pathlib.Path) -> typing.Any:
    """The module `multus_shim/build.py`, loaded by its path: the package is not installed while it is being built."""
    spec = importlib.util.spec_from_file_location("multus_shim_build", root / "multus_shim" / "build.py")
    if spec is None or spec.loader is None:
        raise RuntimeError(f"no multus_shim/build.py in {root}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class ShimBuildHook(BuildHookInterface[BuilderConfig]):
    """Adds the binary to the wheel and marks the wheel as one for this kind of machine.

    Without Linux there is no shim, nor with MULTUS_SHIM_ARCH=none: `kubectl multus` of that wheel runs anywhere.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, typing.Any]) -> None:
        """Compile; `version` is "standard" or "editable". Raises the build module's BuildError."""
        self._scratch = tempfile.TemporaryDirectory(prefix="multus-shim-wheel-")
        # An image for another architecture than the builder's sets the variable (image/install.py).
        other = os.environ.get("MULTUS_SHIM_ARCH", "")
        if other == "none" or not (other or sys.platform == "linux"):
            return
        root = pathlib.Path(self.root)
        shim_build = _shim_build(root)
        # The file has to be there until the wheel is written, so it cannot be in a folder that is removed here.
        binary: pathlib.Path = shim_build.build(
            other or shim_build.machine(), pathlib.Path(self._scratch.name) / shim_build.NAME, root
        )
        build_data["shared_scripts"][str(binary)] = shim_build.NAME
        build_data["pure_python"] = False
        # Any Python 3 will do (nothing links against it), but only the shim's architecture. NB: hatchling puts its own
        # tag on editable wheels; those never leave the machine.
        platform = f"linux_{other}" if other else sysconfig.get_platform()
        build_data["tag"] = "py3-none-" + platform.replace("-", "_").replace(".", "_")

    def finalize(self, version: str, build_data: dict[str, typing.Any], artifact_path: str) -> None:
        """Remove what `initialize` left behind."""
        self._scratch.cleanup()
