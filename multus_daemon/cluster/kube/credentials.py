"""How the API server is reached and who we are to it: the pod's service account, or a kubeconfig.

A `Source` is read in a thread, because kubernetes_asyncio's loaders block. Tokens in files are read again while they
are in use: the kubelet replaces a service account's before it expires. (kubernetes_asyncio would do that once a
minute, never after a 401, and with the file's newline in the header.)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from multus_daemon.cluster.kube.errors import ConfigurationError
from multus_daemon.cluster.kube.library import (
    SERVICE_CERT_FILENAME,
    SERVICE_TOKEN_FILENAME,
    ConfigException,
    Configuration,
    InClusterConfigLoader,
    kubeconfig_loader,
)
from multus_daemon.runtime import fs

TOKEN_SECONDS: Final = 10.0
"""A token's file is read again when its content is older. It is on a tmpfs, a read takes microseconds."""
TOKEN_MAX_BYTES: Final = 1024 * 1024
KUBECONFIG_MAX_BYTES: Final = 4 * 1024 * 1024
_PATHS: Final = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


class TokenFile:
    """A bearer token in a file that somebody else replaces."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._token = ""
        self._read_at = float("-inf")

    def token(self, *, fresh: bool = False) -> str:
        """The token, at most `TOKEN_SECONDS` old, read now where `fresh`.

        The last one as long as the file can't be read. Raises ConfigurationError where there has been none.
        """
        if fresh or self._clock() - self._read_at >= TOKEN_SECONDS:
            try:
                found = fs.read_limited(self._path, limit=TOKEN_MAX_BYTES).decode("ascii").strip()
                problem = "it is empty"
            except (OSError, UnicodeDecodeError) as error:
                found = ""
                problem = str(error.strerror or error) if isinstance(error, OSError) else "it is not ASCII"
            if found:
                self._token, self._read_at = found, self._clock()
            elif not self._token:
                raise ConfigurationError(f"token in {self._path} can't be read: {problem}")
        return self._token


@dataclass(frozen=True, slots=True)
class Access:
    """What a source says now."""

    configuration: Any = field(repr=False)
    """kubernetes_asyncio's Configuration: host, CA, client certificate, proxy."""
    authorization: str = field(default="", repr=False)
    """Value of the Authorization header; empty where a file has the token, or there is none."""
    token_file: TokenFile | None = None

    def header(self, *, fresh: bool = False) -> str:
        """Value of the Authorization header; empty for none. Raises ConfigurationError."""
        return f"Bearer {self.token_file.token(fresh=fresh)}" if self.token_file else self.authorization


class Source(Protocol):
    """Where the way to the API server is written down."""

    def load(self) -> Access:
        """Read it, all of it, as it is now. Blocks. Raises ConfigurationError."""
        ...


@dataclass(frozen=True, slots=True)
class InCluster:
    """The service account of the daemon's own pod."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    token_file: Path = Path(SERVICE_TOKEN_FILENAME)
    ca_file: Path = Path(SERVICE_CERT_FILENAME)

    def load(self) -> Access:
        """See `Source`."""
        configuration = Configuration()
        try:
            # The annotation there is narrower than what the code takes.
            loader = InClusterConfigLoader(str(self.token_file), str(self.ca_file), False, dict(self.environ))
            loader.load_and_set(configuration)
        except (ConfigException, OSError) as error:
            raise ConfigurationError(
                f"no service account to reach the API server with: {error}; outside of a cluster set kubeconfig"
            ) from error
        return Access(_prepared(configuration), token_file=TokenFile(self.token_file))


@dataclass(frozen=True, slots=True)
class Kubeconfig:
    """A context of a kubeconfig file; paths in it are relative to its directory."""

    path: Path
    certificate: Path | None = None
    """A file with client certificate and key, in place of all credentials of the kubeconfig."""
    context: str = ""
    """Its name; empty: the current one."""
    others: tuple[Path, ...] = ()
    """Files that add what the ones before them do not have, as those of the variable KUBECONFIG do."""

    def load(self) -> Access:
        """See `Source`. Runs the exec plugin of the user, where it has one."""
        with self._told():
            return self._read(self._found())

    def namespace(self) -> str:
        """The namespace of the context; empty where it names none. Blocks. Raises ConfigurationError."""
        with self._told():
            return str(_context_of(self._found()).get("namespace") or "")

    def _found(self) -> Any:
        """What the files say together, its current context the one that is wanted."""
        # Not at the top: a daemon that has a service account needs no YAML.
        import yaml

        paths = (self.path, *self.others)
        read = [(path, yaml.safe_load(fs.read_limited(path, limit=KUBECONFIG_MAX_BYTES))) for path in paths]
        found = read[0][1] if len(read) == 1 else _merged(read)
        if self.context:
            found["current-context"] = self.context
        return found

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What is wrong within the block becomes a ConfigurationError."""
        name = ":".join(str(path) for path in (self.path, *self.others))
        try:
            yield
        except (ConfigException, OSError) as error:
            raise ConfigurationError(f"kubeconfig {name} can't be used: {error}") from error
        except Exception as error:
            # The loader trips over what is no kubeconfig in any way. YAML's messages quote the file, credentials too.
            raise ConfigurationError(f"kubeconfig {name} can't be used: {type(error).__name__}") from None

    def for_certificate(self, certificate: Path) -> bytes:
        """A kubeconfig for the same cluster whose user has client certificate and key in the file `certificate`.

        Blocks. Raises ConfigurationError.
        """
        import yaml

        try:
            found = yaml.safe_load(fs.read_limited(self.path, limit=KUBECONFIG_MAX_BYTES))
            context = _named(found["contexts"], found["current-context"])["context"]
            cluster = dict(_named(found["clusters"], context["cluster"])["cluster"])
            if authority := cluster.get("certificate-authority"):
                cluster["certificate-authority"] = str(self.path.absolute().parent / authority)
        except OSError as error:
            raise ConfigurationError(f"kubeconfig {self.path} can't be used: {error}") from error
        except Exception as error:
            raise ConfigurationError(f"kubeconfig {self.path} can't be used: {type(error).__name__}") from None
        user = {"client-certificate": str(certificate.absolute()), "client-key": str(certificate.absolute())}
        return msgspec.json.encode(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "default-cluster", "cluster": cluster}],
                "users": [{"name": "default-auth", "user": user}],
                "contexts": [
                    {"name": "default-context", "context": {"cluster": "default-cluster", "user": "default-auth"}}
                ],
                "current-context": "default-context",
            }
        )

    def _read(self, found: Any) -> Access:
        directory = self.path.absolute().parent
        configuration = Configuration()
        user = _current_user(found)
        if self.certificate:
            user.clear()
        # This one is read again and again, not by the loader, which does it once.
        token_file = user.pop("tokenFile", None)
        loader = kubeconfig_loader()(config_dict=found, config_base_path=str(directory))
        _finish(loader.load_and_set(configuration), awaits="exec" in user or "auth-provider" in user)
        _prepared(configuration)
        if self.certificate:
            configuration.cert_file = configuration.key_file = str(self.certificate)
            return Access(configuration)
        authorization = (configuration.api_key.get("BearerToken") or "").strip()
        if token_file and not authorization:
            return Access(configuration, token_file=TokenFile(directory / token_file))
        return Access(configuration, authorization=authorization)


def _current_user(found: Any) -> dict[str, Any]:
    """The user of the current context, to be changed in place; a new one without credentials where there is none."""
    context = _context_of(found)
    users = found["users"] = found.get("users") or []
    for user in users:
        if user["name"] == context.get("user"):
            chosen: dict[str, Any] = user.get("user") or {}
            user["user"] = chosen
            return chosen
    context["user"] = context.get("user") or "nobody"
    nobody: dict[str, Any] = {}
    users.append({"name": context["user"], "user": nobody})
    return nobody


def _named(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The item of a kubeconfig's list that has the name. Raises StopIteration."""
    return next(item for item in items if item["name"] == name)


def _context_of(found: Any) -> Any:
    """The current context. Raises ConfigException where it is not there."""
    name, contexts = found["current-context"], found["contexts"]
    for item in contexts:
        if item["name"] == name:
            return item["context"]
    raise ConfigException(f"it has no context {name!r}, but {', '.join(str(item['name']) for item in contexts)}")


def _merged(read: Sequence[tuple[Path, Any]]) -> dict[str, Any]:
    """The files' contents as one, each with its path: what a file has goes before what those after it have."""
    merged: dict[str, Any] = {key: [] for key in ("clusters", "contexts", "users")}
    for path, found in read:
        directory = path.absolute().parent
        merged["current-context"] = merged.get("current-context") or found.get("current-context")
        for key in ("clusters", "contexts", "users"):
            known = {item["name"] for item in merged[key]}
            merged[key] += [_placed(item, directory) for item in found.get(key) or () if item["name"] not in known]
    return merged


def _placed(item: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The entry of a kubeconfig with its relative paths made absolute."""
    for fields in filter(None, (item.get("cluster"), item.get("user"))):
        for key in _PATHS:
            if fields.get(key):
                fields[key] = str(directory / fields[key])
        command = (fields.get("exec") or {}).get("command") or ""
        if "/" in command:
            fields["exec"]["command"] = str(directory / command)
    return item


def _finish(work: Coroutine[Any, Any, None], *, awaits: bool) -> None:
    """Run `work` to its end, in this thread, where no event loop runs."""
    if awaits:
        asyncio.run(work)
        return
    try:
        # What only reads files needs no event loop, and would block one.
        work.send(None)
    except StopIteration:
        return
    work.close()
    raise ConfigException("its credentials take more than reading files, in a way that is not known here")


def _prepared(configuration: Any) -> Any:
    # Python 3.13 refuses certificates without an authority key identifier; Go, and so every other client, takes them.
    configuration.disable_strict_ssl_verification = True
    return configuration
