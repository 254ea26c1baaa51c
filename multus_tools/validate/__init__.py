"""Find faults in manifests and configurations before they are applied; report place, fault and likely intention.

It uses the same code to read them as an ADD. No plugin runs.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from multus_daemon import settings
from multus_daemon.cluster.standalone.manifests import DEFAULT_NAMESPACE
from multus_daemon.runtime import deadline
from multus_daemon.settings import Settings
from multus_daemon.spec import netconf
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import label_problem, subdomain_problem
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_tools.validate import configs, known, pod_rules, ranges
from multus_tools.validate.configs import Network, Planner
from multus_tools.validate.located import Located, Source, UnreadableError, documents, object_at
from multus_tools.validate.pod_rules import Element
from multus_tools.validate.positions import Path
from multus_tools.validate.report import Finding, Report, Severity, Subject, guessed

__all__ = ["Finding", "Report", "net_conf", "of", "of_object"]

Networks = Mapping[tuple[str, str], NetworkAttachmentDefinition]
"""NetworkAttachmentDefinitions by namespace and name."""
OBJECTS_MAX: Final = 20_000
"""Maximum number of objects in all files together."""
_NO_FILE: Final = Source("", b"", is_file=False)
_API_VERSION: Final = f"{selection.GROUP}/{selection.VERSION}"
_CONF_SUFFIXES: Final = (".conf", ".conflist")
_DAEMON_CONFIG: Final = "daemon-config.json"
_CNI_CONFIG: Final = "cni-conf.json"
"""Key of a CNI configuration in the ConfigMaps of networks."""
_KEYS: Final[Mapping[Path, frozenset[str]]] = {
    (): frozenset({"apiVersion", "kind", "metadata", "spec", "status"}),
    ("spec",): frozenset({"config"}),
}
"""Keys of a NetworkAttachmentDefinition, by the path of the object."""
_NEEDED: Final = "a CNI configuration goes into spec.config, as text"
_TEMPLATES: Final[tuple[Path, ...]] = (("spec", "template"), ("spec", "jobTemplate", "spec", "template"))
"""Paths of the pod template in workloads."""
_OURS: Final = ("cni.cncf.io", "multus", "cniVersion")
"""A file that concerns Multus contains at least one of these words."""


def of(files: Iterable[tuple[str, bytes]], *, settings: Settings | None = None, bin_dirs: Sequence[str] = ()) -> Report:
    """Check files, each with its name.

    `settings`: of the daemon, unless a file has them. `bin_dirs`: directories of plugin binaries; empty: every binary
    is assumed to exist.
    """
    report = Report()
    found = _Objects(report, Planner(bin_dirs), settings, {})
    for name, data in files:
        _check(report, found, name, data)
    found.together()
    return report


def of_object(value: Mapping[str, Any], settings: Settings, others: Networks, *, seconds: float) -> Report:
    """Check one object that is not in a file, for `seconds` at most; `others`: the networks that exist.

    A finding's `file` is the path of the string that contains its place; empty if there is none. Raises Interrupted.
    """
    report = Report()
    found = _Objects(report, Planner(), settings, others)
    with contextlib.suppress(deadline.ExpiredError), deadline.within(seconds):
        found.document(Located(_NO_FILE, value, {}))
        found.together()
    return report


def net_conf(settings: Settings) -> netconf.NetConf:
    """Return the daemon's rules for networks of pods, such as isolation, without a cluster network."""
    return netconf.load(b"{}", {key: value for key, value in settings.overlay.items() if key != "delegates"})


def _check(report: Report, found: _Objects, name: str, data: bytes) -> None:
    before = report.objects
    try:
        for document in documents(Source(name, data)):
            found.document(document)
            if report.objects > OBJECTS_MAX:
                raise UnreadableError(f"more than {OBJECTS_MAX} objects", document.place())
    except UnreadableError as error:
        if report.objects == before and not any(word.encode() in data for word in _OURS):
            report.passed_over.append((name, f"{error}, and nothing of Multus' is in it"))
            return
        advice = "a template? render it first: helm template … | multusctl validate -" if b"{{" in data else ""
        report.add(Finding(name, error.place, "error", "syntax", "", "", str(error), advice))
        return
    if report.objects == before:
        report.passed_over.append((name, "nothing of Multus' is in it"))


class _Objects:
    """Checks each object, and collects what `together` needs."""

    def __init__(self, report: Report, plugins: Planner, given: Settings | None, others: Networks) -> None:
        """`given`: settings of the daemon, unless a file has them. `others`: networks that exist besides the files."""
        self.report = report
        self._plugins = plugins
        self._settings = given or Settings()
        self._others = others
        self._networks: dict[tuple[str, str], Network | None] = {}
        """Keys are namespace and name. A value is None if its configuration is in a file of the node, or malformed."""
        self._configs: list[Network] = []
        """Networks of files and of the daemon's configuration."""
        self._pods: list[list[Element]] = []
        """Requests of each pod."""
        self._named: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
        """Number of pods by network: of pods, and of templates, whose pods may be in the files, too."""

    def together(self) -> None:
        """Check objects against each other: missing networks, isolation, requests, address ranges."""
        rules = net_conf(self._settings)
        names = {*self._networks, *self._others}
        for elements in self._pods:
            pod_rules.check_interfaces(elements)
            for element in elements:
                deadline.check()
                pod_rules.check_isolation(element, rules)
                key = (element.selection.namespace, element.selection.name)
                if key not in names:
                    pod_rules.report_missing(element, names, rules)
                elif network := self._network(key):
                    pod_rules.check_request(self._plugins, element, network, strict=rules.strict_requests)
        found = [network for network in self._networks.values() if network and network.subject.located.source.is_file]
        ranges.check_overlaps([*found, *self._configs])
        for network in found:
            ranges.check_size(network, max(pods.get(network.name, 0) for pods in self._named.values()))

    def _network(self, key: tuple[str, str]) -> Network | None:
        """Return the network of `key` (namespace, name). Faults are reported only if it is in the checked files."""
        if key not in self._networks:
            metadata = {"namespace": key[0], "name": key[1]}
            spec = {"config": self._others[key].config}
            value = {"apiVersion": _API_VERSION, "kind": selection.KIND, "metadata": metadata, "spec": spec}
            other = _Objects(Report(), self._plugins, self._settings, {})
            other.document(Located(_NO_FILE, value, {}))
            self._networks[key] = other._networks.get(key)
        return self._networks[key]

    def document(self, located: Located) -> None:
        """Check a document of a file; one that does not concern Multus is ignored."""
        value = located.value
        if isinstance(value, dict):
            if value.get("apiVersion") is None and value.get("kind") is None:
                self._bare(located)
            else:
                self._object(located)

    def _object(self, located: Located) -> None:
        value = located.value
        kind, version = str(value.get("kind") or ""), str(value.get("apiVersion") or "")
        items = value.get("items")
        if kind.endswith("List") and isinstance(items, list):
            for index, item in enumerate(items):
                if isinstance(item, dict):
                    self._object(located.below("items", index))
        elif version.startswith(f"{selection.GROUP}/") or kind == selection.KIND:
            self._definition(located, kind, version)
        elif kind == "ConfigMap":
            self._config_map(located)
        elif kind == "Pod":
            self._pod(located, ())
        else:
            for path in _TEMPLATES:
                if isinstance(object_at(value, path).get("spec"), dict):
                    self._pod(located, path)
                    return

    def _begin(self, located: Located) -> tuple[Subject, str, str]:
        """Count the object and report repeated keys; return it with its namespace and name."""
        self.report.objects += 1
        value = located.value
        metadata = object_at(value, ("metadata",))
        namespace, name = str(metadata.get("namespace") or DEFAULT_NAMESPACE), str(metadata.get("name") or "")
        generated = metadata.get("generateName")
        subject = Subject(self.report, f"{value.get('kind')} {namespace}/{name or generated or '(no name)'}", located)
        subject.repeated("error", "the API server refuses it")
        return subject, namespace, name

    def _names(self, subject: Subject, namespace: str, name: str) -> None:
        """Report names that the API server refuses."""
        if problem := label_problem(namespace):
            text = f"metadata.namespace {namespace[:80]!r} {problem}"
            subject.error("object", text, path=("metadata", "namespace"))
        generated = object_at(subject.located.value, ("metadata",)).get("generateName")
        if not (generated and not name) and (problem := subdomain_problem(name)):
            subject.error("object", f"metadata.name {name[:80]!r} {problem}", path=("metadata", "name"))

    def _definition(self, located: Located, kind: str, version: str) -> None:
        subject, namespace, name = self._begin(located)
        if kind != selection.KIND:
            text = f"there is no kind {kind!r} in {selection.GROUP}"
            subject.error("object", text, f"is {selection.KIND} meant?", path=("kind",))
            if known.near(kind, [selection.KIND]) != selection.KIND:
                return
        if version != _API_VERSION:
            text = f"apiVersion {version!r} has no {selection.KIND}"
            subject.error("object", text, f"is {_API_VERSION} meant?", path=("apiVersion",))
        self._names(subject, namespace, name)
        pod_rules.check_keys(subject, ("metadata",))
        misplaced = object_at(located.value, ("metadata",)).keys() - {"config"}
        for where, keys in (*_KEYS.items(), (("metadata",), misplaced)):
            for key in object_at(located.value, where).keys() - keys:
                text = f"unknown key {key!r} of {where[0] if where else 'the object'}, which the API server drops"
                advice = "move it into spec" if key == "config" else known.meant(key, keys) or _NEEDED
                subject.warn("object", text, advice, path=(*where, key))
        self._networks[namespace, name] = None
        spec = located.value.get("spec")
        if not isinstance(spec, dict):
            if spec is not None:
                subject.error("object", f"spec: an object is needed, not {gojson.kind_of(spec)}", path=("spec",))
            return
        config = spec.get("config")
        if isinstance(config, str):
            # An empty text stands for a file of the node.
            inner = self._embedded(subject, ("spec", "config"), "network-config") if config.strip() else None
            if inner is not None:
                raw, full_name = config.encode("utf-8", "surrogatepass"), f"{namespace}/{name}"
                network = configs.check(self._plugins, raw, inner, name=full_name, default_name=name)
                self._networks[namespace, name] = network
        elif config is not None:
            problem = f"config: a string is needed, not {gojson.kind_of(config)}"
            advice = 'it is JSON as text: write "config: |" and the JSON below it'
            subject.error("object", problem, advice, path=("spec", "config"))

    def _embedded(self, subject: Subject, path: Path, check: str) -> Subject | None:
        """Return the JSON object in the string at `path`; None, with a finding, if it is not one."""
        try:
            inner = subject.located.text(*path).json()
        except gojson.JsonError as error:
            configs.fault(subject, check, path, error)
            return None
        if not isinstance(inner.value, dict):
            subject.error(check, f"a JSON object is needed, not {gojson.kind_of(inner.value)}", path=path)
            return None
        subject = replace(subject, located=inner)
        if check != "daemon-config":
            # The daemon refuses them itself.
            subject.repeated("warning")
        return subject

    def _config_map(self, located: Located) -> None:
        data = object_at(located.value, ("data",))
        texts = {
            key: text
            for key, text in data.items()
            if isinstance(text, str) and (key in (_DAEMON_CONFIG, _CNI_CONFIG) or key.endswith(_CONF_SUFFIXES))
        }
        if not texts:
            return
        subject, namespace, name = self._begin(located)
        self._names(subject, namespace, name)
        for key, text in texts.items():
            if key == _DAEMON_CONFIG:
                if inner := self._embedded(subject, ("data", key), "daemon-config"):
                    self._daemon_config(text.encode(), inner)
            elif inner := self._embedded(subject, ("data", key), "network-config"):
                self._cni_config(text.encode(), inner)

    def _pod(self, located: Located, path: Path) -> None:
        """Check a pod, or the pod template at `path`."""
        subject, namespace, name = self._begin(located)
        self._names(subject, namespace, name)
        elements = pod_rules.check(subject, path, namespace, self._settings)
        self._pods.append(elements)
        if object_at(located.value, ("status",)).get("phase") not in ("Succeeded", "Failed"):
            count = object_at(located.value, ("spec",)).get("replicas") if path else 1
            for element in elements:
                self._named[not path][str(element.selection)] += count if isinstance(count, int) else 1

    def _bare(self, located: Located) -> None:
        """Check a CNI configuration or the configuration of the daemon."""
        value, name = located.value, located.source.name
        keys = {key.lower() for key in value}
        is_file = name.endswith(_CONF_SUFFIXES)
        plugin_type = gojson.get(value, "type")
        is_own = plugin_type in netconf.OWN_TYPES or "multusconfigfile" in keys
        is_network = "plugins" in keys or (isinstance(plugin_type, str) and "cniversion" in keys and not is_own)
        if not (is_file or is_network or is_own or name.endswith(_DAEMON_CONFIG) or _is_of_daemon(keys)):
            return
        self.report.objects += 1
        # The text of a JSON file still has repeated keys.
        raw = located.source.text.encode("utf-8", "surrogatepass")
        try:
            gojson.loads(raw)
        except gojson.JsonError:
            raw = gojson.dumps(value, sort_keys=False)
        if is_network or (is_file and not is_own):
            subject = Subject(self.report, "CNI configuration", located)
            subject.repeated("warning")
            self._cni_config(raw, subject)
        elif plugin_type in netconf.OWN_TYPES and "multusconfigfile" not in keys:
            self._own_config(raw, Subject(self.report, "CNI configuration of Multus", located))
        else:
            self._daemon_config(raw, Subject(self.report, "daemon configuration", located))

    def _cni_config(self, raw: bytes, subject: Subject) -> None:
        value = subject.located.value
        if gojson.get(value, "type") in netconf.OWN_TYPES and "plugins" not in value:
            self._own_config(raw, subject)
            return
        name = gojson.get(value, "name")
        subject = replace(subject, name=f"{subject.name} {name}") if isinstance(name, str) else subject
        if network := configs.check(self._plugins, raw, subject):
            self._configs.append(network)

    def _own_config(self, raw: bytes, subject: Subject) -> None:
        """Check the configuration that the runtime passes to the shim, with its delegates."""
        try:
            found = netconf.load(raw, {})
        except CniError as error:
            subject.refused("network-config", error)
            return
        for index, delegate in enumerate(found.delegates):
            key = next(key for key in subject.located.value if key.lower() == "delegates")
            inner = replace(subject, located=subject.located.below(key, index))
            if network := configs.check(self._plugins, delegate.raw, inner):
                self._configs.append(network)

    def _daemon_config(self, raw: bytes, subject: Subject) -> None:
        try:
            found = settings.parse(raw, subject.located.source.name)
        except settings.SettingsError as error:
            for problem in error.problems:
                _setting("error", subject, problem)
            return
        for problem in found.warnings:
            _setting("warning", subject, problem)
        self._settings = found
        self._own_config(gojson.dumps(subject.located.value, sort_keys=False), subject)


def _setting(severity: Severity, subject: Subject, text: str) -> None:
    key, _, rest = text.partition(": ")
    problem, comma, meant = rest.partition(", is ")
    advice = f"is {meant}" if comma else ""
    subject.add(severity, "daemon-config", f"{key}: {problem}", advice, path=guessed(subject.located.value, key))


def _is_of_daemon(keys: set[str]) -> bool:
    """Return True if most of the keys are settings of the daemon, and at least one exists only there."""
    own = {key.lower() for key in settings.known_keys()}
    shared = {"name", "type", "cniversion", "capabilities", "runtimeconfig"}
    return bool(keys & (own - shared)) and 2 * len(keys & own) > len(keys)
