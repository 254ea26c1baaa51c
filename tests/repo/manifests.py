"""What `kubectl apply -k` makes of a folder of manifests, as far as this project's use kustomize.

    python -m tests.repo.manifests > manifests/multus-daemonset.yaml

Strategic merge patches by Kubernetes' own rules for the lists that occur: volumes, containers and variables by `name`,
mounts by `mountPath`; any other list is replaced; `null` removes a key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
RENDERED = MANIFESTS / "multus-daemonset.yaml"
HEADER = """\
# Everything for a cluster of kubeadm with containerd, in one file: `kubectl apply -f multus-daemonset.yaml`. Put the
# name of your image in first. Made from manifests/base by `python -m tests.repo.manifests`; change it there.
"""
MERGE_KEYS = ("mountPath", "name")


def rendered() -> str:
    """The base in one file, comments included."""
    base = MANIFESTS / "base"
    names = yaml.safe_load((base / "kustomization.yaml").read_text())["resources"]
    return HEADER + "".join("---\n" + (base / name).read_text() for name in names)


def build(folder: Path) -> list[dict[str, Any]]:
    """The objects that `folder` stands for. Raises AssertionError for what is not understood here."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(kustomization) <= {"apiVersion", "kind", "resources", "patches"}, folder
    objects: list[dict[str, Any]] = []
    for name in kustomization["resources"]:
        path = folder / name
        objects += build(path) if path.is_dir() else [item for item in yaml.safe_load_all(path.read_text()) if item]
    for patch in kustomization.get("patches", ()):
        assert set(patch) == {"patch"}, folder
        change = yaml.safe_load(patch["patch"])
        (number,) = [number for number, item in enumerate(objects) if identity(item) == identity(change)]
        objects[number] = merge(objects[number], change)
    return objects


def identity(item: dict[str, Any]) -> tuple[str, str, str]:
    """What tells one object from another."""
    return item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"]


def merge(old: Any, new: Any) -> Any:
    """`old` with the strategic merge patch `new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        merged = {key: merge(old.get(key), value) for key, value in new.items() if value is not None}
        return {key: value for key, value in old.items() if key not in new} | merged
    key = _merge_key(old, new)
    if key is None:
        return new
    names = [item[key] for item in old]
    assert {item[key] for item in new} <= set(names), f"{new} adds to {names}"
    changes = {item[key]: item for item in new}
    return [merge(item, changes[item[key]]) if item[key] in changes else item for item in old]


def _merge_key(old: Any, new: Any) -> str | None:
    if not (isinstance(old, list) and isinstance(new, list)):
        return None
    items = [*old, *new]
    return next((key for key in MERGE_KEYS if all(isinstance(item, dict) and key in item for item in items)), None)


if __name__ == "__main__":
    print(rendered(), end="")
