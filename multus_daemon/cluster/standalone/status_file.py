"""A pod's network-status in `<directory>/status/<namespace>/<pod>.yaml`, a manifest of a Pod. All functions block."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Final

import yaml

from multus_daemon.runtime import fs
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.names import label_problem, subdomain_problem
from multus_daemon.spec.nad import network_status

STATUS_DIRECTORY: Final = "status"
# Strings that need no quotes. YAML 1.1 reads all other words of this form as strings.
_PLAIN: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9-]*(\.[a-zA-Z0-9-]+)*")
_NO_STRINGS: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def path_of(directory: Path, namespace: str, name: str) -> Path:
    """Return the path of a pod's status. Raises ValueError for invalid names."""
    problem = label_problem(namespace) or subdomain_problem(name)
    if problem:
        raise ValueError(f"{namespace!r}/{name!r} can't be a pod: {problem}")
    return Path(f"{directory}/{STATUS_DIRECTORY}/{namespace}/{name}.yaml")


def write(directory: Path, pod: Pod, value: str) -> None:
    """Write or replace the pod's status. Raises OSError, ValueError."""
    path = path_of(directory, pod.namespace, pod.name)
    fs.ensure_directory(os.path.dirname(path), mode=0o755)
    # Without PyYAML, which takes 0.2 ms.
    text = (
        "apiVersion: v1\n"
        "kind: Pod\n"
        "metadata:\n"
        f"  namespace: {_scalar(pod.namespace)}\n"
        f"  name: {_scalar(pod.name)}\n"
        f"  uid: {_scalar(pod.uid)}\n"
        "  annotations:\n"
        f"    {network_status.ANNOTATION}: {_block(value, 6)}\n"
    )
    # No fsync: after a power loss these pods no longer exist.
    fs.write_atomic(path, text.encode(), mode=0o644, fsync=False)


def _scalar(text: str) -> str:
    """Return `text` as a YAML scalar: plain, or as a JSON string."""
    return text if _PLAIN.fullmatch(text) and text.lower() not in _NO_STRINGS else json.dumps(text)


def _block(text: str, indent: int) -> str:
    """Return the text as a literal block of YAML if possible, else as a JSON string."""
    lines = text.split("\n")
    if not lines[0] or lines[0][0].isspace() or not lines[-1] or not all(map(str.isprintable, lines)):
        return _scalar(text)
    return "\n".join(["|-", *(f"{' ' * indent}{line}" if line else "" for line in lines)])


def read(directory: Path, namespace: str, name: str) -> str | None:
    """Return the annotation's value, None without a file. Raises OSError, and ValueError for a malformed file."""
    try:
        data = fs.read_limited(path_of(directory, namespace, name))
    except FileNotFoundError:
        return None
    try:
        value = yaml.safe_load(data)["metadata"]["annotations"][network_status.ANNOTATION]
    except (yaml.YAMLError, LookupError, TypeError) as error:
        raise ValueError(f"the file has no network-status: {error}") from error
    if not isinstance(value, str):
        raise ValueError("the annotation network-status in the file is not a string")
    return value


def remove(directory: Path, namespace: str, name: str) -> bool:
    """Remove the status; False if there was none. Raises OSError, ValueError."""
    path = path_of(directory, namespace, name)
    removed = fs.remove(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))  # fails if the namespace has other files
    return removed
