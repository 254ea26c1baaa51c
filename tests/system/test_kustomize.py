"""kustomize renders each overlay into what the repository's tests read."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e import build_tools
from tests.programs import path_of
from tests.repo.manifests import MANIFESTS, build, identity

OVERLAYS = sorted(path for path in (MANIFESTS / "overlays").iterdir() if path.is_dir())

FOLDERS = [MANIFESTS / "base", *OVERLAYS]


def kustomize() -> list[str]:
    """The command line of the real one; empty where there is none."""
    if program := path_of("kustomize"):
        return [program, "build"]
    try:
        return [str(build_tools.find("kubectl")), "kustomize"]
    except build_tools.ToolError:
        return []


def by_folder(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("folder", FOLDERS, ids=by_folder)
def test_kustomize_makes_the_same(folder: Path) -> None:
    if not (command := kustomize()):
        pytest.skip("needs kubectl (make e2e builds it) or kustomize")
    done = subprocess.run([*command, folder], capture_output=True, text=True, check=True, timeout=50)

    def sorted_lists(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: sorted_lists(item) for key, item in value.items()}
        if isinstance(value, list):
            return sorted((sorted_lists(item) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
        return value.strip() if isinstance(value, str) else value

    made = {identity(item): sorted_lists(item) for item in yaml.safe_load_all(done.stdout)}
    assert made == {identity(item): sorted_lists(item) for item in build(folder)}
