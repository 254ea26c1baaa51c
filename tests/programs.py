"""Programs that no package and no Go module proxy has: who runs the tests builds them and names them by a variable."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

_SOURCES: Final = {
    "WIDE_OVS_CNI": "./cmd/plugin of github.com/k8snetworkplumbingwg/ovs-cni",
    "WIDE_WHEREABOUTS": "./cmd of github.com/k8snetworkplumbingwg/whereabouts",
    "WIDE_OCICNI": "./tools/ocicnitool of github.com/cri-o/ocicni",
    "UPSTREAM_NEW_DAEMON": "./cmd/multus-daemon of github.com/k8snetworkplumbingwg/multus-cni, v4.3.1 or newer",
    "UPSTREAM_NEW_SHIM": "./cmd/multus-shim of github.com/k8snetworkplumbingwg/multus-cni, v4.3.1 or newer",
}


def given(variable: str) -> Path:
    """The program that a variable of the environment names; where there is none, the test is skipped and says so."""
    source = _SOURCES[variable]
    if not (path := os.environ.get(variable)):
        pytest.skip(
            f"{variable} is not set: build {source} in a checkout, `CGO_ENABLED=0 go build`, and set it to the program"
        )
    assert os.access(path, os.X_OK), f"{variable}: {path} is no program"
    return Path(path)
