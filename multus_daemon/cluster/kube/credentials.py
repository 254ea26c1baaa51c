"""The address of the API server and the credentials for it: the pod's service account, or a kubeconfig.

Token files are read again while they are in use: the kubelet replaces a service account's token before it expires.
(kubernetes_asyncio does that once a minute, never after a 401, and puts the file's newline into the header.)

The credential loaders of kubernetes_asyncio are imported without its 860 modules generated from the API's definition
(docs/architecture.md, "Decisions"): the packages below are known by their directories and never run; their submodules
are imported from there. urllib3 (1.8 MiB) is imported by `client.configuration` for a method that is not used here.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from multus_daemon.cluster.kube.errors import ConfigurationError
from multus_daemon.runtime import fs

for _name in ("urllib3", "kubernetes_asyncio", "kubernetes_asyncio.config", "kubernetes_asyncio.client"):
    if _name not in sys.modules and (_spec := importlib.util.find_spec(_name)):
        sys.modules[_name] = importlib.util.module_from_spec(_spec)

# NB: these imports must follow the loop; the order saves the memory.
from kubernetes_asyncio.client.configuration import Configuration  # noqa: E402

# `kube_config` imports both; the class that is used here makes no client.
vars(sys.modules["kubernetes_asyncio.client"]).update(Configuration=Configuration, ApiClient=None)
from kubernetes_asyncio.config.config_exception import ConfigException  # noqa: E402
from kubernetes_asyncio.config.incluster_config import (  # noqa: E402
    SERVICE_CERT_FILENAME,
    SERVICE_TOKEN_FILENAME,
    InClusterConfigLoader,
)

TOKEN_SECONDS: Final = 10.0  # maximum age of a token; a read takes microseconds
TOKEN_MAX_BYTES: Final = 1024 * 1024
KUBECONFIG_MAX_BYTES: Final = 4 * 1024 * 1024
_PATHS: Final = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


class TokenFile:
    """A bearer token in a file that another program replaces."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token = ""
        self._read_at = float("-inf")

    def token(self, *, fresh: bool = False) -> str:
        """Return the token; `fresh`: read the file now. If the file can't be read, the last token stays in use.

        Raises ConfigurationError if no token was ever read.
        """
        if fresh or time.monotonic() - self._read_at >= TOKEN_SECONDS:
            token, problem = "", "it is empty"
            try:
                token = fs.read_limited(self._path, limit=TOKEN_MAX_BYTES).decode("ascii").strip()
            except OSError as error:
                problem = str(error.strerror or error)
            except UnicodeDecodeError:
                problem = "it is not ASCII"
            if token:
                self._token, self._read_at = token, time.monotonic()
            elif not self._token:
                raise ConfigurationError(f"token in {self._path} can't be read: {problem}")
        return self._token


@dataclass(frozen=True, slots=True)
class Access:
    """The address and credentials that a source has now."""

    configuration: Any = field(repr=False)  # kubernetes_asyncio's: host, CA, client certificate, proxy
    authorization: str = field(default="", repr=False)
    token_file: TokenFile | None = None

    def header(self, *, fresh: bool = False) -> str:
        """Return the value of the Authorization header; empty for no header. Raises ConfigurationError."""
        return f"Bearer {self.token_file.token(fresh=fresh)}" if self.token_file else self.authorization


@dataclass(frozen=True, slots=True)
class InCluster:
    """The service account of the daemon's own pod."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    token_file: Path = Path(SERVICE_TOKEN_FILENAME)
    ca_file: Path = Path(SERVICE_CERT_FILENAME)

    def load(self) -> Access:
        """Read the service account's files. Blocks. Raises ConfigurationError."""
        configuration = Configuration()
        try:
            # The library's annotation of `environ` is too narrow.
            loader = InClusterConfigLoader(str(self.token_file), str(self.ca_file), False, dict(self.environ))
            loader.load_and_set(configuration)
        except (ConfigException, OSError) as error:
            raise ConfigurationError(
                f"the pod has no service account for the API server: {error}; outside of a cluster set kubeconfig"
            ) from error
        return Access(configuration, token_file=TokenFile(self.token_file))


@dataclass(frozen=True, slots=True)
class Kubeconfig:
    """A context of a kubeconfig file; paths in it are relative to its directory."""

    path: Path
    certificate: Path | None = None  # has client certificate and key, which replace all other credentials
    context: str = ""
    others: tuple[Path, ...] = ()  # merged as kubectl merges the files of the variable KUBECONFIG

    def load(self) -> Access:
        """Read the files; runs the user's exec plugin, if any. Blocks. Raises ConfigurationError."""
        # Not at the top: it imports yaml.
        from kubernetes_asyncio.config.kube_config import KubeConfigLoader

        with self._as_configuration_error():
            document = self._document()
            configuration = Configuration()
            user = _current_user(document)
            if self.certificate:
                user.clear()
            # The loader would read the file only once.
            token_file = user.pop("tokenFile", None)
            loader = KubeConfigLoader(config_dict=document, config_base_path=str(self.path.absolute().parent))
            work = loader.load_and_set(configuration)
            if "exec" in user or "auth-provider" in user:
                asyncio.run(work)
            else:
                # It reads files and never waits: it would block an event loop.
                with contextlib.suppress(StopIteration):
                    work.send(None)
            if self.certificate:
                configuration.cert_file = configuration.key_file = str(self.certificate)
                return Access(configuration)
            authorization = (configuration.api_key.get("BearerToken") or "").strip()
            if token_file and not authorization:
                return Access(configuration, token_file=TokenFile(Path(token_file)))
            return Access(configuration, authorization=authorization)

    def namespace(self) -> str:
        """Return the namespace of the context, empty if it has none. Blocks. Raises ConfigurationError."""
        with self._as_configuration_error():
            return str(_current_context(self._document()).get("namespace") or "")

    def for_certificate(self, certificate: Path) -> bytes:
        """Return a kubeconfig for the same cluster with the given client certificate. Raises ConfigurationError."""
        with self._as_configuration_error():
            document = self._document()
            name = _current_context(document)["cluster"]
            cluster = next(item["cluster"] for item in document["clusters"] if item["name"] == name)
        user = {"client-certificate": str(certificate.absolute()), "client-key": str(certificate.absolute())}
        context = {"cluster": "default-cluster", "user": "default-auth"}
        return msgspec.json.encode(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "default-cluster", "cluster": cluster}],
                "users": [{"name": "default-auth", "user": user}],
                "contexts": [{"name": "default-context", "context": context}],
                "current-context": "default-context",
            }
        )

    def _document(self) -> dict[str, Any]:
        """Return the merged content of the files with absolute paths; entries of earlier files win."""
        # Not at the top: a daemon with a service account needs no YAML.
        import yaml

        merged: dict[str, Any] = {"clusters": [], "contexts": [], "users": [], "current-context": self.context}
        for path in (self.path, *self.others):
            document = yaml.safe_load(fs.read_limited(path, limit=KUBECONFIG_MAX_BYTES))
            directory = path.absolute().parent
            merged["current-context"] = merged["current-context"] or document.get("current-context")
            for key in ("clusters", "contexts", "users"):
                known = {item["name"] for item in merged[key]}
                items = [item for item in document.get(key) or () if item["name"] not in known]
                merged[key] += [_with_absolute_paths(item, directory) for item in items]
        return merged

    @contextlib.contextmanager
    def _as_configuration_error(self) -> Iterator[None]:
        name = ":".join(str(path) for path in (self.path, *self.others))
        try:
            yield
        except (ConfigException, OSError) as error:
            raise ConfigurationError(f"kubeconfig {name} can't be used: {error}") from error
        except Exception as error:
            # The loader raises anything for a malformed kubeconfig. YAML's messages quote the file and its credentials.
            raise ConfigurationError(f"kubeconfig {name} can't be used: {type(error).__name__}") from None


Source = InCluster | Kubeconfig


def _current_context(document: dict[str, Any]) -> Any:
    """Return the current context. Raises ConfigException if it does not exist."""
    name, contexts = document["current-context"], document["contexts"]
    for item in contexts:
        if item["name"] == name:
            return item["context"]
    raise ConfigException(f"it has no context {name!r}, but {', '.join(str(item['name']) for item in contexts)}")


def _current_user(document: dict[str, Any]) -> Any:
    """Return the user of the current context, to be changed in place; adds one without credentials if missing."""
    context = _current_context(document)
    users: list[dict[str, Any]] = [item for item in document["users"] if item["name"] == context.get("user")]
    if not users:
        context["user"] = context.get("user") or "anonymous"
        users = [{"name": context["user"]}]
        document["users"] += users
    users[0]["user"] = users[0].get("user") or {}
    return users[0]["user"]


def _with_absolute_paths(item: dict[str, Any], directory: Path) -> dict[str, Any]:
    for fields in filter(None, (item.get("cluster"), item.get("user"))):
        for key in _PATHS:
            if fields.get(key):
                fields[key] = str(directory / fields[key])
        command = (fields.get("exec") or {}).get("command") or ""
        if "/" in command:
            fields["exec"]["command"] = str(directory / command)
    return item
