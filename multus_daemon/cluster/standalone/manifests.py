"""Parse the pods and networks of Kubernetes manifests in the format of `kubectl apply`. No I/O."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid, label_problem, subdomain_problem
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition

Key = tuple[str, str]  # namespace and name; of a Namespace its name alone

DEFAULT_NAMESPACE: Final = "default"
OBJECTS_MAX: Final = 2000
NESTING_MAX: Final = 100
_UID_SPACE: Final = uuid.UUID("0d5b8a3e-52f4-5d0c-9a3e-6c7f1c1d2b90")
_Loader: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# PyYAML's constructors raise more than its own errors, for values such as `!!bool x` and `!!timestamp x`.
_YAML_ERRORS: Final = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)


class ManifestError(ValueError):
    """A manifest can't be used; the message says which object and why."""


@dataclass(frozen=True, slots=True)
class Manifests:
    """The content of one file."""

    declared: list[tuple[str, Key, Any]] = field(default_factory=list)
    """Kind, key and value: Pod, NetworkAttachmentDefinition, or the labels of a Namespace."""
    passed_over: list[str] = field(default_factory=list)  # `apiVersion/kind` of objects of other kinds


def parse(data: bytes, *, is_json: bool = False) -> Manifests:
    """Parse one JSON value, or any number of YAML documents, and the items of each List. Raises ManifestError."""
    content = Manifests()
    try:
        for index, item in enumerate(_objects(_documents(data, is_json))):
            if index >= OBJECTS_MAX:
                raise ManifestError(f"the file has more than {OBJECTS_MAX} objects")
            version, kind = gojson.get_str(item, "apiVersion"), gojson.get_str(item, "kind")
            if not version or not kind:
                raise ManifestError(f"object {index}: apiVersion and kind are needed")
            if (read := _READERS.get((version, kind))) is None:
                content.passed_over.append(f"{version}/{kind}")
                continue
            try:
                content.declared.append((kind, *read(item)))
            except ValueError as error:
                raise ManifestError(f"object {index} ({kind}): {error}") from error
    except gojson.JsonError as error:
        raise ManifestError(str(error)) from error
    except RecursionError as error:
        raise ManifestError("objects of kind List are nested too deep") from error
    return content


def _documents(data: bytes, is_json: bool) -> list[Any]:
    if is_json:
        return [gojson.loads(data)]
    try:
        refuse_depth(data)
        return list(yaml.load_all(data, Loader=_Loader))
    except ManifestError:
        raise
    except _YAML_ERRORS as error:
        raise ManifestError(f"not YAML: {' '.join(str(error).split()) or type(error).__name__}") from error


def refuse_depth(data: bytes | str) -> None:
    """Check the nesting depth. Raises ManifestError and PyYAML's errors.

    NB: PyYAML's C loader composes nested nodes by recursion without a limit; deep nesting crashes the process.
    """
    depth = 0
    for event in yaml.parse(data, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > NESTING_MAX:
                raise ManifestError(f"the file is nested deeper than {NESTING_MAX} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _objects(documents: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the objects in `documents` and in lists of them; empty documents are skipped."""
    for document in documents:
        if document is None:
            continue
        if not isinstance(document, dict):
            raise ManifestError(f"each document must be an object, not {gojson.kind_of(document)}")
        # YAML allows keys of any type.
        if not all(isinstance(key, str) for key in document):
            raise ManifestError("all keys must be strings: put them in quotes")
        kind = document.get("kind")
        if isinstance(kind, str) and kind.endswith("List"):
            yield from _objects(gojson.get_list(document, "items") or [])
        else:
            yield document


def _pod(item: dict[str, Any]) -> tuple[Key, Pod]:
    metadata = _mapping(item, "metadata")
    namespace, name = _names(metadata)
    uid = gojson.get_str(metadata, "uid") or str(uuid.uuid5(_UID_SPACE, f"{namespace}/{name}"))
    pod = Pod(
        Namespace(namespace),
        PodName(name),
        PodUid(uid),
        annotations=_strings(metadata, "annotation"),
        host_network=gojson.get_bool(_mapping(item, "spec"), "hostNetwork") or False,
        phase=gojson.get_str(_mapping(item, "status"), "phase") or "",
    )
    return (namespace, name), pod


def _network(item: dict[str, Any]) -> tuple[Key, NetworkAttachmentDefinition]:
    metadata = _mapping(item, "metadata")
    namespace, name = _names(metadata)
    config = gojson.get_str(_mapping(item, "spec"), "config") or ""
    return (namespace, name), NetworkAttachmentDefinition(namespace, name, config, _strings(metadata, "annotation"))


def _namespace(item: dict[str, Any]) -> tuple[Key, Mapping[str, str]]:
    metadata = _mapping(item, "metadata")
    name = gojson.get_str(metadata, "name") or ""
    if problem := label_problem(name):
        raise ManifestError(f"metadata.name {name[:80]!r} {problem}")
    return (name, ""), _strings(metadata, "label")


_READERS: Final[Mapping[tuple[str, str], Callable[[dict[str, Any]], tuple[Key, Any]]]] = {
    ("v1", "Pod"): _pod,
    (f"{selection.GROUP}/{selection.VERSION}", selection.KIND): _network,
    ("v1", "Namespace"): _namespace,
}


def _names(metadata: dict[str, Any]) -> tuple[str, str]:
    namespace = gojson.get_str(metadata, "namespace") or DEFAULT_NAMESPACE
    name = gojson.get_str(metadata, "name") or ""
    if problem := label_problem(namespace):
        raise ManifestError(f"metadata.namespace {namespace[:80]!r} {problem}")
    if problem := subdomain_problem(name):
        raise ManifestError(f"metadata.name {name[:80]!r} {problem}")
    return namespace, name


def _strings(metadata: dict[str, Any], what: str) -> Mapping[str, str]:
    values = _mapping(metadata, f"{what}s")
    for name, value in values.items():
        if not isinstance(value, str):
            raise ManifestError(f"{what} {name}: a string is needed, not {gojson.kind_of(value)}: put it in quotes")
    return values


def _mapping(fields: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the object at `key`, empty if it is missing."""
    value = gojson.get_object(fields, key) or {}
    if not all(isinstance(name, str) for name in value):
        raise ManifestError(f"{key}: all keys must be strings: put them in quotes")
    return value
