"""What a built-in plugin is: a module with a function for each verb, over one parsed call."""

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
    """`prevResult`, already read; None if there is none."""
    host_root: Path
    """Where the host's files are found: `/`, or the daemon's chrootDir. Netns paths are not below it."""
    ipam: PluginRunner
    """Runs the plugins that this one calls: the IPAM plugin that the configuration names, flannel's delegate."""
    netns: PodNetns
    """The namespace that the plugins which this one calls work in; the plugin itself gets it too."""
    tools: HostTools | None = None
    """Runs `nft` and the like; None where that is not to be had, see `Plugin.unsupported`."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """The whole configuration object; read with `cni.gojson` (keys in any case)."""
        return self.invocation.fields

    def once(self, read: Callable[[Call], T]) -> T:
        """Return `read(self)`."""
        return read(self)

    def on_host(self, path: str) -> Path:
        """An absolute path of the configuration, as seen from here; links in it are followed inside of the host's root.

        What is at the path need not be there. Raises IoFailureError.
        """
        if self.host_root == _ROOT:
            return _ROOT / path.lstrip("/")
        try:
            return Path(fs.resolve(str(self.host_root), path, missing=True))
        except OSError as error:
            raise IoFailureError(f"{path} below {self.host_root}: {error.strerror}", str(error.filename)) from error


class Plugin(Protocol):
    """A plugin of the CNI SPEC, as a module. GC needs no code: the reference plugins have none, which is success.

    Each function that is given a namespace runs in the thread that it belongs to, on the host's side. A plugin that calls
    others than its IPAM plugin has a function `called_by` too, as `ipam.called_by`; one that keeps something by which
    others are kept out, such as addresses, has `kept`, see `ports.BuiltinPlugins`.
    """

    def unsupported(self, call: Call) -> str:
        """What the configuration asks for that this plugin does not know, `key: value`; empty: nothing.

        By the configuration, and whether there are tools, alone: the answer is remembered. A configuration that can't
        be read is for the verbs to refuse. Raises JsonError for one, or nothing.
        """
        ...

    def validate(self, call: Call) -> None:
        """Read all of the configuration, by `call.once` as `add` does. Raises CniError for what `add` would refuse."""
        ...

    def add(self, call: Call, netns: PodNetns) -> Result:
        """Raises CniError, or any exception, which becomes code 999 with its text."""
        ...

    def delete(self, call: Call, netns: PodNetns) -> None:
        """Absent is done. Raises as `add` does."""
        ...

    def check(self, call: Call, netns: PodNetns) -> None:
        """Raises as `add` does."""
        ...

    def status(self, call: Call) -> None:
        """Raises as `add` does."""
        ...
