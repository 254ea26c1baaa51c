"""The objects of a manifest: which of them are looked at, and what is wrong with each by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from multus_daemon import settings
from multus_daemon.cluster.standalone.manifests import DEFAULT_NAMESPACE
from multus_daemon.diagnosis.validate import configs, known
from multus_daemon.diagnosis.validate.configs import Network, Plugins
from multus_daemon.diagnosis.validate.report import Report, guessed
from multus_daemon.diagnosis.validate.source import Located, Place, Source, documents
from multus_daemon.runtime.jsontext import Path
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.nad import definition, selection, status
from multus_daemon.spec.nad.definition import NetworkAttachmentDefinition
from multus_daemon.spec.nad.names import label_problem, subdomain_problem
from multus_daemon.spec.nad.selection import NetworkSelection
from multus_daemon.spec.netconf import load, primary

OBJECTS_MAX: Final = 20_000
"""In all files together."""

_API_VERSION: Final = f"{definition.GROUP}/{definition.VERSION}"
_OF_PODS: Final = (selection.NETWORKS_ANNOTATION, selection.DEFAULT_NETWORK_ANNOTATION)
_OLD_STATUS: Final = "k8s.v1.cni.cncf.io/networks-status"
"""What the status was called once; clients still copy it."""
_ANNOTATIONS: Final = (*_OF_PODS, status.ANNOTATION, _OLD_STATUS, definition.RESOURCE_NAME_ANNOTATION)
_ALIKE: Final = 0.8
"""From here on an annotation's key, of anybody's, is one of ours that is misspelt."""
_CONF_SUFFIXES: Final = (".conf", ".conflist")
_DAEMON_CONFIG: Final = "daemon-config.json"
_CNI_CONFIG: Final = "cni-conf.json"
"""What the ConfigMaps of networks have it under."""


@dataclass(frozen=True)
class Element:
    """A network that a pod asks for."""

    subject: str
    namespace: str
    """The pod's."""
    selection: NetworkSelection
    place: Callable[[str], Place]
    """Of a key of the element; of the element itself where it has none of the name."""
    located: Located
    annotation: str
    is_default: bool
    """It takes the place of the cluster network."""


class Objects:
    """What has been found in the files."""

    def __init__(
        self,
        report: Report,
        plugins: Plugins,
        given: settings.Settings | None = None,
        others: Mapping[tuple[str, str], NetworkAttachmentDefinition] | None = None,
    ) -> None:
        """`given`: the daemon's settings, where no configuration of it is found. `others`: what there is besides."""
        self.report = report
        self.networks: dict[tuple[str, str], Network | None] = {}
        """By namespace and name; None where the configuration is a file of the node's, or can't be read."""
        self.configs: list[Network] = []
        """Of files and of the daemon's configuration."""
        self.pods: list[list[Element]] = []
        """Of each pod what it asks for."""
        self.settings = given or settings.Settings()
        """The daemon's, of the last configuration of it that was found."""
        self._plugins = plugins
        self._others = others or {}

    @property
    def names(self) -> set[tuple[str, str]]:
        """Namespace and name of every NetworkAttachmentDefinition that is known."""
        return {*self.networks, *self._others}

    def network(self, namespace: str, name: str) -> Network | None:
        """The network of a NetworkAttachmentDefinition that is known; None as in `networks`.

        What is wrong with one that is not in the files is nobody's business here.
        """
        key = (namespace, name)
        if key not in self.networks:
            found = Objects(Report(), self._plugins, self.settings)
            value: dict[str, Any] = {"apiVersion": _API_VERSION, "kind": definition.KIND}
            value["metadata"] = {"namespace": namespace, "name": name}
            value["spec"] = {"config": self._others[key].config}
            found.document(next(documents(Source("", gojson.dumps(value)))))
            self.networks[key] = found.networks.get(key)
        return self.networks[key]

    def document(self, located: Located) -> bool:
        """Look at a document of a file; False where there is nothing for us in it."""
        value = located.value
        if not isinstance(value, dict):
            return False
        if value.get("apiVersion") is None and value.get("kind") is None:
            return self._bare(located)
        before = self.report.objects
        self._object(located)
        return self.report.objects > before

    # --- objects of Kubernetes ---------------------------------------------------------------------------------------

    def _object(self, located: Located) -> None:
        value = located.value
        kind, version = str(value.get("kind") or ""), str(value.get("apiVersion") or "")
        items = value.get("items")
        if kind.endswith("List") and isinstance(items, list):
            for index, item in enumerate(items):
                if isinstance(item, dict):
                    self._object(located.below("items", index))
            return
        if version.startswith(f"{definition.GROUP}/") or kind == definition.KIND:
            self._definition(located, kind, version)
        elif kind == "Pod":
            self._pod(located, (), located)
        elif kind == "ConfigMap":
            self._config_map(located)
        elif path := _template(value):
            self._pod(located, path, located)

    def _begin(self, located: Located) -> tuple[str, str, str]:
        """Namespace, name, and what findings call the object."""
        self.report.objects += 1
        value = located.value
        metadata = _object_at(value, ("metadata",))
        namespace, name = str(metadata.get("namespace") or DEFAULT_NAMESPACE), str(metadata.get("name") or "")
        subject = f"{value.get('kind')} {namespace}/{name or metadata.get('generateName') or '(no name)'}"
        own = located.prefix
        for path, offset in located.repeated:
            if path[: len(own)] == own:
                place = located.source.place(offset)
                problem = f"key {path[-1]!r} is there twice"
                self.report.add_at(
                    "error", "repeated-key", subject, located.source, place, problem, path=path[len(own) :]
                )
        return namespace, name, subject

    def _names(self, located: Located, namespace: str, name: str, subject: str) -> bool:
        """Whether the object has names that the API server takes."""
        before = len(self.report.findings)
        if problem := label_problem(namespace):
            text = f"metadata.namespace {namespace[:80]!r} {problem}"
            self.report.add("error", "object", subject, located, text, path=("metadata", "namespace"))
        generated = _object_at(located.value, ("metadata",)).get("generateName")
        if not (generated and not name) and (problem := subdomain_problem(name)):
            text = f"metadata.name {name[:80]!r} {problem}"
            self.report.add("error", "object", subject, located, text, path=("metadata", "name"))
        return len(self.report.findings) == before

    def _definition(self, located: Located, kind: str, version: str) -> None:
        namespace, name, subject = self._begin(located)
        report = self.report
        if kind != definition.KIND:
            text = f"there is no kind {kind!r} in {definition.GROUP}"
            report.add("error", "object", subject, located, text, f"is {definition.KIND} meant?", path=("kind",))
            if known.near(kind, [definition.KIND]) != definition.KIND:
                return
        if version != _API_VERSION:
            text = f"apiVersion {version!r} has no {definition.KIND}"
            report.add("error", "object", subject, located, text, f"is {_API_VERSION} meant?", path=("apiVersion",))
        self._names(located, namespace, name, subject)
        self._annotation_keys(located, ("metadata",), subject, ())
        self.networks[namespace, name] = None
        spec = located.value.get("spec")
        if spec is None:
            return
        if not isinstance(spec, dict):
            text = f"spec: an object is needed, not {gojson.kind_of(spec)}"
            report.add("error", "object", subject, located, text, path=("spec",))
            return
        for key in spec:
            if key != "config":
                text = f"unknown key {key!r} of spec, which the API server drops"
                advice = known.meant(key, ["config"]) or "a CNI configuration goes into spec.config, as text"
                report.add("warning", "object", subject, located, text, advice, path=("spec", key))
        if "config" in spec:
            self._config_text(located, ("spec", "config"), subject, namespace, name)

    def _config_text(self, located: Located, path: Path, subject: str, namespace: str, name: str) -> None:
        text = _at(located.value, path)
        if text is None:
            return
        if not isinstance(text, str):
            problem = f"{path[-1]}: a string is needed, not {gojson.kind_of(text)}"
            advice = 'it is JSON as text: write "config: |" and the JSON below it'
            self.report.add("error", "object", subject, located, problem, advice, path=path)
            return
        if not text.strip():
            # A file of the node's has it.
            return
        inner = self._json_object(located, path, subject, "network-config")
        if inner is not None:
            raw = text.encode("utf-8", "surrogatepass")
            network = configs.check(
                self.report, self._plugins, raw, inner, subject, name=f"{namespace}/{name}", default_name=name
            )
            self.networks[namespace, name] = network

    def _json_object(self, located: Located, path: Path, subject: str, check: str) -> Located | None:
        """The JSON object in the string at `path`; None where there is none, which is told."""
        try:
            inner = located.text(*path).json()
        except gojson.JsonError as error:
            configs.fault(self.report, check, subject, located, path, error)
            return None
        if not isinstance(inner.value, dict):
            problem = f"a JSON object is needed, not {gojson.kind_of(inner.value)}"
            self.report.add("error", check, subject, located, problem, path=path)
            return None
        return inner

    def _config_map(self, located: Located) -> None:
        data = _object_at(located.value, ("data",))
        texts = {key: text for key, text in data.items() if isinstance(text, str)}
        wanted = [key for key in texts if key in (_DAEMON_CONFIG, _CNI_CONFIG) or key.endswith(_CONF_SUFFIXES)]
        if not wanted:
            return
        namespace, name, subject = self._begin(located)
        self._names(located, namespace, name, subject)
        for key in wanted:
            check = "daemon-config" if key == _DAEMON_CONFIG else "network-config"
            inner = self._json_object(located, ("data", key), subject, check)
            if inner is not None and key == _DAEMON_CONFIG:
                self._daemon_config(texts[key].encode(), inner, subject)
            elif inner is not None:
                self._cni_config(texts[key].encode(), inner, subject)

    # --- pods --------------------------------------------------------------------------------------------------------

    def _pod(self, located: Located, path: Path, owner: Located) -> None:
        """The pod at `path` of the object `located`; a template where that is not empty."""
        metadata = _object_at(located.value, (*path, "metadata"))
        own = _object_at(located.value, ("metadata",))
        namespace, name, subject = self._begin(located)
        self._names(located, namespace, name, subject)
        self._annotation_keys(located, (*path, "metadata"), subject, _OF_PODS)
        if path:
            self._misplaced(located, own, path, subject)
        annotations = metadata.get("annotations")
        if not isinstance(annotations, dict):
            return
        elements: list[Element] = []
        for key in (selection.DEFAULT_NETWORK_ANNOTATION, selection.NETWORKS_ANNOTATION):
            if key in annotations:
                elements += self._annotation(located, (*path, "metadata", "annotations", key), subject, namespace)
        if elements and _object_at(located.value, (*path, "spec")).get("hostNetwork") is True:
            at = (*path, "metadata", "annotations", elements[-1].annotation)
            self.report.add(
                "warning", "annotation", subject, located,
                "the pod is in the host's network (hostNetwork: true): it gets none of the networks that it asks for",
                "remove the annotation, or hostNetwork", path=at,
            )  # fmt: skip
        self.pods.append(elements)

    def _misplaced(self, located: Located, own: Mapping[str, Any], path: Path, subject: str) -> None:
        for key in _object_at(own, ("annotations",)):
            if key in _OF_PODS:
                where = ".".join(map(str, (*path, "metadata", "annotations")))
                text = f"annotation {key} is of the {located.value.get('kind')}, not of its pods, which do not get it"
                at = ("metadata", "annotations", key)
                self.report.add("warning", "annotation", subject, located, text, f"put it into {where}", path=at)

    def _annotation_keys(self, located: Located, metadata: Path, subject: str, wanted: tuple[str, ...]) -> None:
        """Keys that are misspelt: nobody reads those."""
        found = _object_at(located.value, (*metadata, "annotations"))
        for key, text in found.items():
            at = (*metadata, "annotations", key)
            if key in _ANNOTATIONS:
                if not isinstance(text, str):
                    problem = f"annotation {key}: a string is needed, not {gojson.kind_of(text)}"
                    self.report.add("error", "annotation", subject, located, problem, "put it in quotes", path=at)
                continue
            near = known.near(key, wanted or _ANNOTATIONS, alike=_ALIKE)
            if near:
                text = f"annotation {key!r} means nothing"
                self.report.add("warning", "annotation-key", subject, located, text, f"is {near} meant?", path=at)

    def _annotation(self, located: Located, path: Path, subject: str, namespace: str) -> list[Element]:
        key, text = str(path[-1]), _at(located.value, path)
        if not isinstance(text, str):
            return []
        default = key == selection.DEFAULT_NETWORK_ANNOTATION
        try:
            if default:
                of = self.settings.networks.multus_namespace
                elements = [selection.parse_default_network(text, default_namespace=of)]
            else:
                elements = list(selection.parse(text, pod_namespace=namespace))
        except CniError as error:
            self._bad_annotation(located, path, subject, error)
            return []
        places = list(_places(located, path, len(elements)))
        for element, place in zip(elements, places, strict=True):
            for problem in element.unknown:
                what, _, meant = problem.partition(", ")
                self.report.add_at(
                    "warning", "annotation", subject, located.source, place(what), f"{what} (network {element})", meant,
                    path=path,
                )  # fmt: skip
        return [
            Element(subject, namespace, element, place, located, key, default)
            for element, place in zip(elements, places, strict=True)
        ]

    def _bad_annotation(self, located: Located, path: Path, subject: str, error: CniError) -> None:
        if isinstance(fault := _json_error(error), gojson.JsonError) and error.msg.startswith("not JSON"):
            configs.fault(self.report, "annotation", subject, located, path, fault)
            return
        problem = error.msg.replace(f" (annotation {path[-1]})", "")
        try:
            inner = located.text(*path).json()
            place = inner.place(guessed(inner.value, problem, error.details, base=_element_of(problem, inner.value)))
        except gojson.JsonError:
            element = _element_number(problem)
            items = list(_places(located, path, 0))
            place = items[element]("") if element is not None and element < len(items) else located.place(path)
        self.report.add_at("error", "annotation", subject, located.source, place, problem, error.details, path=path)

    # --- files without a kind ----------------------------------------------------------------------------------------

    def _bare(self, located: Located) -> bool:
        """A CNI configuration, or the daemon's."""
        value, name = located.value, located.source.name
        keys = {key.lower() for key in value}
        is_file = name.endswith(_CONF_SUFFIXES)
        plugin_type = gojson.get(value, "type")
        is_own = plugin_type in primary.OWN_TYPES or "multusconfigfile" in keys
        is_network = "plugins" in keys or (isinstance(plugin_type, str) and "cniversion" in keys and not is_own)
        if not (is_file or is_network or is_own or name.endswith(_DAEMON_CONFIG) or _is_of_daemon(keys)):
            return False
        self.report.objects += 1
        # As it is written, where the file is JSON: keys that are there twice are still in it.
        raw = located.source.text.encode("utf-8", "surrogatepass")
        raw = raw if _is_json(raw) else gojson.dumps(value, sort_keys=False)
        if is_network or (is_file and not is_own):
            self._cni_config(raw, located, "CNI configuration")
        elif is_own and plugin_type in primary.OWN_TYPES and "multusconfigfile" not in keys:
            self._own_config(raw, located, "CNI configuration of Multus")
        else:
            self._daemon_config(raw, located, "daemon configuration")
        return True

    def _cni_config(self, raw: bytes, located: Located, subject: str) -> None:
        if gojson.get(located.value, "type") in primary.OWN_TYPES and "plugins" not in located.value:
            self._own_config(raw, located, subject)
            return
        name = gojson.get(located.value, "name")
        subject = f"{subject} {name}" if isinstance(name, str) else subject
        if network := configs.check(self.report, self._plugins, raw, located, subject):
            self.configs.append(network)

    def _own_config(self, raw: bytes, located: Located, subject: str) -> None:
        """What the runtime gives the shim, delegates included."""
        try:
            found = load.load(raw, {})
        except CniError as error:
            self.report.refused("network-config", subject, located, error)
            return
        for index, delegate in enumerate(found.delegates):
            at = located.below(next(key for key in located.value if key.lower() == "delegates"), index)
            if network := configs.check(self.report, self._plugins, delegate.raw, at, subject):
                self.configs.append(network)

    def _daemon_config(self, raw: bytes, located: Located, subject: str) -> None:
        try:
            found = settings.parse(raw, located.source.name)
        except settings.SettingsError as error:
            for problem in error.problems:
                self._setting("error", located, subject, problem)
            return
        for problem in found.warnings:
            self._setting("warning", located, subject, problem)
        self.settings = found
        self._own_config(gojson.dumps(located.value, sort_keys=False), located, subject)

    def _setting(self, severity: Any, located: Located, subject: str, text: str) -> None:
        key, _, rest = text.partition(": ")
        problem, comma, meant = rest.partition(", is ")
        path = guessed(located.value, key)
        advice = f"is {meant}" if comma else ""
        self.report.add(severity, "daemon-config", subject, located, f"{key}: {problem}", advice, path=path)


# --- where things are ------------------------------------------------------------------------------------------------


def _template(value: Mapping[str, Any]) -> Path:
    """The path of the pod that a workload makes; empty where the object makes none."""
    paths: tuple[Path, ...] = (("spec", "template"), ("spec", "jobTemplate", "spec", "template"))
    for path in paths:
        if isinstance(_object_at(value, path).get("spec"), dict):
            return path
    return ()


def _at(value: Any, path: Path) -> Any:
    for name in path:
        value = value[name]
    return value


def _object_at(value: Any, path: Path) -> Mapping[str, Any]:
    """The object at `path`, empty where there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _is_of_daemon(keys: set[str]) -> bool:
    """Whether most of the keys are the daemon's, and one at least is nobody else's."""
    own = {key.lower() for key in settings.known_keys()}
    shared = {"name", "type", "cniversion", "capabilities", "runtimeconfig"}
    return bool(keys & (own - shared)) and 2 * len(keys & own) > len(keys)


def _is_json(raw: bytes) -> bool:
    try:
        gojson.loads(raw)
    except gojson.JsonError:
        return False
    return True


def _json_error(error: BaseException) -> BaseException | None:
    """The innermost cause that is a JsonError."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, gojson.JsonError):
        found = found.__cause__
    return found


def _element_number(problem: str) -> int | None:
    """Of the element that a message about an annotation is about."""
    found = re.search(r"\(element ([0-9]{1,4})\b", problem)
    return int(found[1]) if found else None


def _element_of(problem: str, value: Any) -> Path:
    """The path of that element in a JSON list."""
    number = _element_number(problem)
    return (number,) if number is not None and isinstance(value, list) and number < len(value) else ()


def _places(located: Located, path: Path, count: int) -> Iterator[Callable[[str], Place]]:
    """For each element of the annotation at `path`, which can be read, what finds a key of it."""
    text = located.text(*path)
    try:
        inner = text.json()
    except gojson.JsonError:
        at = 0
        for item in text.text.split(","):
            place = text.place(at + len(item) - len(item.lstrip()))
            yield lambda _, place=place: place  # type: ignore[misc]
            at += len(item) + 1
        return
    for index in range(count):
        yield lambda about, index=index: inner.place(guessed(inner.value, about, base=(index,)))  # type: ignore[misc]
