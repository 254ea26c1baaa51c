"""Upstream's thick manifest, as its release has it: from the source that `build_tools` builds the programs from."""

from __future__ import annotations

from typing import Any, Final

import yaml

from tests.e2e import build_tools

IMAGE: Final = "ghcr.io/k8snetworkplumbingwg/multus-cni:snapshot-thick"
_MODULE: Final = "gopkg.in/k8snetworkplumbingwg/multus-cni.v4"


def text(image: str = IMAGE) -> str:
    """The manifest, in which nothing but the image is changed. Raises `build_tools.ToolError` where it is not there."""
    directory = build_tools.source(_MODULE, build_tools.UPSTREAM)
    path = directory / "deployments" / "multus-daemonset-thick.yml"
    try:
        found = path.read_text()
    except OSError as error:
        raise build_tools.ToolError(f"upstream's manifest is not there: {error}") from error
    assert found.count(IMAGE) == 2, f"{path} has changed"
    return found.replace(IMAGE, image)


def objects() -> list[dict[str, Any]]:
    """Its objects."""
    return [item for item in yaml.safe_load_all(text()) if item]
