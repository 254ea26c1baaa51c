"""The network-status of a pod as a file, `<directory>/status/<namespace>/<pod>.yaml`: a Pod as `kubectl get -o yaml`
would show it, reduced to its names and that annotation. All functions block.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import yaml

from multus_daemon.attachment import Pod
from multus_daemon.base import fs
from multus_daemon.nad import status
from multus_daemon.nad.names import label_problem, subdomain_problem
from multus_daemon.standalone.folder import STATUS_DIRECTORY


class _Text(str):
    """A string to be written as a literal block."""


class _Dumper(yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper):  # type: ignore[misc]
    """Keys in our order, texts of several lines as blocks."""


def _block(dumper: yaml.SafeDumper, text: _Text) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")


_Dumper.add_representer(_Text, _block)


def path_of(directory: Path, namespace: str, name: str) -> Path:
    """Where the status of a pod is kept. Raises ValueError for names that Kubernetes would not have."""
    problem = label_problem(namespace) or subdomain_problem(name)
    if problem:
        raise ValueError(f"{namespace!r}/{name!r} can't be a pod: {problem}")
    return directory / STATUS_DIRECTORY / namespace / f"{name}.yaml"


def write(directory: Path, pod: Pod, value: str) -> None:
    """Put `value` in place of what is there. Raises OSError and ValueError."""
    path = path_of(directory, pod.namespace, pod.name)
    fs.ensure_directory(path.parent, mode=0o755)
    metadata: dict[str, Any] = {
        "namespace": str(pod.namespace),
        "name": str(pod.name),
        "uid": str(pod.uid),
        "annotations": {status.ANNOTATION: _Text(value)},
    }
    text = yaml.dump(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}, Dumper=_Dumper, sort_keys=False, allow_unicode=True
    )
    # Not synced to the disk: the pods of before a power loss do not exist after it.
    fs.write_atomic(path, text.encode(), mode=0o644, fsync=False)


def read(directory: Path, namespace: str, name: str) -> str | None:
    """The annotation's value, None if there is none. Raises OSError, and ValueError for a file that is not ours."""
    try:
        data = fs.read_limited(path_of(directory, namespace, name))
    except FileNotFoundError:
        return None
    try:
        value = yaml.safe_load(data)["metadata"]["annotations"][status.ANNOTATION]
    except (yaml.YAMLError, LookupError, TypeError) as error:
        raise ValueError(f"no network-status in it: {error}") from error
    if not isinstance(value, str):
        raise ValueError("network-status is no text")
    return value


def remove(directory: Path, namespace: str, name: str) -> bool:
    """Forget the status; False if there was none. Raises OSError and ValueError."""
    path = path_of(directory, namespace, name)
    found = fs.remove(path)
    with contextlib.suppress(OSError):
        path.parent.rmdir()  # only where it was the namespace's last one
    return found
