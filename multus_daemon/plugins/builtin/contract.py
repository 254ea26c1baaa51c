"""The interface of a built-in plugin: a module with a function for each verb, over one parsed call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from multus_daemon.kernel.ops import PodNetns
from multus_daemon.plugins.plugin import HostTools, PluginRunner
from multus_daemon.runtime import fs
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni.errors import IoFailureError
from multus_daemon.spec.cni.result import Result

T = TypeVar("T")

_ROOT: Final = Path("/")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a built-in: the invocation, its configuration parsed and checked, and the host it acts on."""

    invocation: Invocation
    name: str
    """The network's name, checked."""
    cni_version: str
    """The configuration's version, one of `versions.SUPPORTED`."""
    prev_result: Result | None
    """`prevResult`, already parsed; None if there is none."""
    host_root: Path
    """Root of the host's files: `/`, or the daemon's chrootDir. Netns paths are not below it."""
    ipam: PluginRunner
    """Runs the plugins that this one calls: the IPAM plugin of the configuration, flannel's delegate."""
    netns: PodNetns
    """The namespace for the plugins that this one calls; the plugin itself gets it too."""
    tools: HostTools | None = None
    """Runs `nft` and the like; None if they are not available, see `Plugin.unsupported`."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """The whole configuration object; read with `cni.gojson` (keys in any case)."""
        return self.invocation.fields

    def once(self, read: Callable[[Call], T]) -> T:
        """Return `read(self)`."""
        return read(self)

    def on_host(self, path: str) -> Path:
        """Return where an absolute path of the configuration is, with links followed inside of the host's root.

        The path need not exist. Raises IoFailureError.
        """
        if self.host_root == _ROOT:
            return _ROOT / path.lstrip("/")
        try:
            return Path(fs.resolve(str(self.host_root), path, missing=True))
        except OSError as error:
            raise IoFailureError(f"{path} below {self.host_root}: {error.strerror}", str(error.filename)) from error


class Plugin(Protocol):
    """A plugin of the CNI SPEC, as a module. GC needs no code: the reference plugins have none, which is success.

    Each function with a namespace runs in the thread that the namespace belongs to, on the host's side. A plugin that
    calls others than its IPAM plugin has a function `called_by` too, like `ipam.called_by`; a plugin that keeps
    something others need, such as addresses, has `kept`, see `BuiltinRunner.kept`.
    """

    def unsupported(self, call: Call) -> str:
        """Return a part of the configuration that this plugin does not support, as `key: value`; empty if none.

        Depends only on the configuration and on whether there are tools: the answer is cached. May raise JsonError for
        a configuration that cannot be read, which the verbs refuse.
        """
        ...

    def validate(self, call: Call) -> None:
        """Read all of the configuration, by `call.once` as `add` does. Raises CniError if `add` would refuse it."""
        ...

    def add(self, call: Call, netns: PodNetns) -> Result:
        """Raises CniError, or any exception, which becomes code 999 with its text."""
        ...

    def delete(self, call: Call, netns: PodNetns) -> None:
        """Treats absent objects as removed. Raises as `add` does."""
        ...

    def check(self, call: Call, netns: PodNetns) -> None:
        """Raises as `add` does."""
        ...

    def status(self, call: Call) -> None:
        """Raises as `add` does."""
        ...
