"""`multusctl explain`: what an ADD of a pod would attach, and why."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from multus_daemon import deadlines
from multus_daemon.tools.ctl.commands import common


def add_to(groups: common.Groups) -> None:
    """Declare it."""
    meaning = "show what would be attached to a pod, and why; touches nothing; exit status 1 where nothing would be"
    parser = common.command(groups, "explain", meaning, run)
    pod = parser.add_mutually_exclusive_group(required=True)
    pod.add_argument("pod", metavar="NAMESPACE/POD", type=common.pod, nargs="?")
    pod.add_argument("--file", metavar="FILE", type=Path, help="a manifest with the pod, which need not be applied")


def run(arguments: argparse.Namespace) -> int:
    """Raises NoDaemonError, CniError, CommandError, SettingsError."""
    client = common.client(arguments)
    if arguments.file:
        body = json.dumps(_pod_in(arguments.file)).encode()
        found = client.order("explain-manifest", {}, body)
    else:
        # The daemon waits for a pod that its watch does not know yet.
        found = client.ask("explain", {"pod": arguments.pod}, timeout=deadlines.ADMIN_SECONDS)
    if arguments.json:
        common.print_json(found)
    else:
        from multus_daemon.tools.ctl import show_explain

        show_explain.explanation(found)
    return common.FAILED if found["problem"] else common.DONE


def _pod_in(path: Path) -> dict[str, Any]:
    """The one pod of the file, or of a workload's template in it. Raises CommandError."""
    import yaml

    try:
        documents = list(yaml.safe_load_all(path.read_bytes()))
    except (OSError, yaml.YAMLError) as error:
        raise common.CommandError(f"{path} can't be read: {error}") from error
    pods = [pod for item in documents if isinstance(item, dict) and (pod := _as_pod(item))]
    if len(pods) != 1:
        raise common.CommandError(f"{path} has {len(pods)} pods (or workloads with a template); one is needed")
    return pods[0]


def _as_pod(item: dict[str, Any]) -> dict[str, Any] | None:
    pod: Any = item
    if item.get("kind") != "Pod":
        spec = item.get("spec")
        pod = spec.get("template") if isinstance(spec, dict) else None
    if not isinstance(pod, dict):
        return None
    metadata = {"name": "pod", "namespace": "default", **_own(item), **_own(pod)}
    return {**pod, "apiVersion": "v1", "kind": "Pod", "metadata": metadata}


def _own(item: dict[str, Any]) -> dict[str, Any]:
    """Of a workload the name and namespace, of its template the annotations too."""
    metadata = item.get("metadata")
    if not isinstance(metadata, dict):
        return {}
    return {key: metadata[key] for key in ("name", "namespace", "uid", "annotations") if metadata.get(key)}
