"""What is wrong in the NetworkAttachmentDefinitions and the pods' annotations of the cluster, as they are now.

    {"schema": "kubectl-multus.validate/v1", "objects": <how many were looked at>, "errors": 1, "warnings": 0,
     "findings": [{"subject": "NetworkAttachmentDefinition default/blue", "severity": "error" or "warning",
                   "check": "plugin-key", "key": "ipam.rangestart2", "problem": …, "advice": …,
                   "alike": <how many pods more of the namespace have the same annotations>}],
     "notes": [<what could not be looked at>]}

The rules are those of `multusctl validate`, and of an ADD. No node is asked: every binary counts as there, which
`kubectl multus networks` looks after. Isolation goes by what the daemon does where nothing is said.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from multus_daemon.diagnosis import validate
from multus_daemon.spec.nad import definition, selection
from multus_daemon.spec.nad.definition import NetworkAttachmentDefinition
from multus_daemon.tools.kubectl.cluster import Cluster, PodObject

SCHEMA: Final = "kubectl-multus.validate/v1"
_ANNOTATIONS: Final = (selection.NETWORKS_ANNOTATION, selection.DEFAULT_NETWORK_ANNOTATION)


async def look(cluster: Cluster, *, namespace: str) -> dict[str, Any]:
    """`namespace`: of what is told of; empty: all. Raises KubeError."""
    # Those of other namespaces are named by pods, too, and their ranges may overlap.
    networks = await cluster.networks()
    pods = await cluster.pods(namespace)
    return {**await asyncio.to_thread(_findings, networks, pods, namespace), "notes": cluster.notes}


def _findings(
    networks: Sequence[NetworkAttachmentDefinition], pods: Sequence[PodObject], namespace: str
) -> dict[str, Any]:
    # Pods of a workload have the same annotations: one stands for all.
    alike: dict[tuple[str, ...], list[PodObject]] = {}
    for pod in pods:
        if any(key in pod.annotations for key in _ANNOTATIONS) and not pod.finished:
            texts = (pod.annotations.get(key, "") for key in _ANNOTATIONS)
            alike.setdefault((pod.metadata.namespace, *texts), []).append(pod)
    more = {_name("Pod", str(found[0])): len(found) - 1 for found in alike.values()}
    files = [*(_network(item) for item in networks), *(_pod(found[0]) for found in alike.values())]
    report = validate.of(files)
    findings = [
        {
            "subject": item.subject or item.file,
            "severity": item.severity,
            "check": item.check,
            "key": item.key,
            "problem": item.problem,
            "advice": item.advice,
            "alike": more.get(item.file, 0),
        }
        for item in report.sorted()
        if not namespace or item.file.partition(" ")[2].startswith(f"{namespace}/")
    ]
    told = [item["severity"] for item in findings]
    return {
        "schema": SCHEMA,
        "objects": len(networks) + sum(len(found) for found in alike.values()),
        "errors": told.count("error"),
        "warnings": told.count("warning"),
        "findings": findings,
    }


def _network(item: NetworkAttachmentDefinition) -> tuple[str, bytes]:
    metadata = {"namespace": item.namespace, "name": item.name, "annotations": dict(item.annotations)}
    version = f"{definition.GROUP}/{definition.VERSION}"
    spec = {"spec": {"config": item.config}} if item.config else {}
    return _file(definition.KIND, version, metadata, spec)


def _pod(pod: PodObject) -> tuple[str, bytes]:
    annotations = {key: pod.annotations[key] for key in _ANNOTATIONS if key in pod.annotations}
    metadata = {"namespace": pod.metadata.namespace, "name": pod.metadata.name, "annotations": annotations}
    return _file("Pod", "v1", metadata, {"spec": {"hostNetwork": pod.spec.host_network}})


def _file(kind: str, version: str, metadata: dict[str, Any], spec: Mapping[str, Any]) -> tuple[str, bytes]:
    name = _name(kind, f"{metadata['namespace']}/{metadata['name']}")
    return name, json.dumps({"apiVersion": version, "kind": kind, "metadata": metadata, **spec}).encode()


def _name(kind: str, name: str) -> str:
    return f"{kind} {name}"
