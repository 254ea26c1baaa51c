"""The objects of a manifest: which of them are looked at, and what is wrong with each by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from multus_daemon import settings
from multus_daemon.cluster.standalone.manifests import DEFAULT_NAMESPACE
from multus_daemon.diagnosis.validate import configs, known, pods
from multus_daemon.diagnosis.validate.configs import Network, Plugins
from multus_daemon.diagnosis.validate.pods import Element
from multus_daemon.diagnosis.validate.report import Report, guessed
from multus_daemon.diagnosis.validate.source import Located, Source, documents, object_at, value_at
from multus_daemon.runtime.jsontext import Path
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.nad import definition
from multus_daemon.spec.nad.definition import NetworkAttachmentDefinition
from multus_daemon.spec.nad.names import label_problem, subdomain_problem
from multus_daemon.spec.netconf import model, primary

OBJECTS_MAX: Final = 20_000
"""In all files together."""

_API_VERSION: Final = f"{definition.GROUP}/{definition.VERSION}"
_CONF_SUFFIXES: Final = (".conf", ".conflist")
_DAEMON_CONFIG: Final = "daemon-config.json"
_CNI_CONFIG: Final = "cni-conf.json"
"""What the ConfigMaps of networks have it under."""


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
            self._pod(located, ())
        elif kind == "ConfigMap":
            self._config_map(located)
        elif path := _template(value):
            self._pod(located, path)

    def _begin(self, located: Located) -> tuple[str, str, str]:
        """Namespace, name, and what findings call the object."""
        self.report.objects += 1
        value = located.value
        metadata = object_at(value, ("metadata",))
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
        generated = object_at(located.value, ("metadata",)).get("generateName")
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
        pods.check_keys(self.report, located, ("metadata",), subject, ())
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
        text = value_at(located.value, path)
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
        data = object_at(located.value, ("data",))
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

    def _pod(self, located: Located, path: Path) -> None:
        """The pod at `path` of the object `located`; a template where that is not empty."""
        namespace, name, subject = self._begin(located)
        self._names(located, namespace, name, subject)
        self.pods.append(pods.check(self.report, located, path, subject, namespace, self.settings))

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
            found = model.load(raw, {})
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


def _template(value: Mapping[str, Any]) -> Path:
    """The path of the pod that a workload makes; empty where the object makes none."""
    paths: tuple[Path, ...] = (("spec", "template"), ("spec", "jobTemplate", "spec", "template"))
    for path in paths:
        if isinstance(object_at(value, path).get("spec"), dict):
            return path
    return ()


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
