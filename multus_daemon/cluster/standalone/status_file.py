"""The network-status of a pod as a file, `<directory>/status/<namespace>/<pod>.yaml`: a Pod as `kubectl get -o yaml`
would show it, reduced to its names and that annotation. All functions block.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Final

import yaml

from multus_daemon.cluster.standalone.folder import STATUS_DIRECTORY
from multus_daemon.runtime import fs
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.nad import status
from multus_daemon.spec.nad.names import label_problem, subdomain_problem

# Written as they stand; YAML 1.1 takes no other word of this form for anything but a string.
_PLAIN: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9-]*(\.[a-zA-Z0-9-]+)*")
_NO_STRINGS: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def path_of(directory: Path, namespace: str, name: str) -> Path:
    """Where the status of a pod is kept. Raises ValueError for names that Kubernetes would not have."""
    problem = label_problem(namespace) or subdomain_problem(name)
    if problem:
        raise ValueError(f"{namespace!r}/{name!r} can't be a pod: {problem}")
    return Path(f"{directory}/{STATUS_DIRECTORY}/{namespace}/{name}.yaml")


def write(directory: Path, pod: Pod, value: str) -> None:
    """Put `value` in place of what is there. Raises OSError and ValueError."""
    path = path_of(directory, pod.namespace, pod.name)
    fs.ensure_directory(os.path.dirname(path), mode=0o755)
    # By hand: PyYAML takes 0.2 ms.
    text = (
        "apiVersion: v1\n"
        "kind: Pod\n"
        "metadata:\n"
        f"  namespace: {_scalar(pod.namespace)}\n"
        f"  name: {_scalar(pod.name)}\n"
        f"  uid: {_scalar(pod.uid)}\n"
        "  annotations:\n"
        f"    {status.ANNOTATION}: {_block(value, 6)}\n"
    )
    # Not synced to the disk: the pods of before a power loss do not exist after it.
    fs.write_atomic(path, text.encode(), mode=0o644, fsync=False)


def _scalar(text: str) -> str:
    """A string as it stands, or as JSON has it, which is YAML too."""
    return text if _PLAIN.fullmatch(text) and text.lower() not in _NO_STRINGS else json.dumps(text)


def _block(text: str, indent: int) -> str:
    """Several lines as a literal block, where it can hold them."""
    lines = text.split("\n")
    if not lines[0] or lines[0][0].isspace() or not lines[-1] or not all(map(str.isprintable, lines)):
        return _scalar(text)
    return "\n".join(["|-", *(f"{' ' * indent}{line}" if line else "" for line in lines)])


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
        os.rmdir(os.path.dirname(path))  # only where it was the namespace's last one
    return found
