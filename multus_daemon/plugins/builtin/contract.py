"""The interface of a built-in plugin: a module with a function for each verb, over one parsed call.

And what the built-ins share: calling the IPAM plugin (CNI SPEC section 4, "Plugin Delegation"), and undoing an ADD.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from multus_daemon import deadlines
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import configuration
from multus_daemon.plugins.plugin import Aspect, HostTools, Plugin
from multus_daemon.runtime import deadline, fs
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.errors import InternalError, InvalidNetworkConfigError, IoFailureError
from multus_daemon.spec.cni.result import Result

log = logging.getLogger(__name__)

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
    plugin_for: Callable[[str, Invocation], Plugin]
    """Returns the plugin of a type for a call that this one makes: the IPAM plugin, flannel's delegate."""
    netns: PodNetns
    """The namespace for the plugins that this one calls; the plugin itself gets it too."""
    tools: HostTools | None = None
    """Runs `nft` and the like; None if they are not available, see `Module.unsupported`."""
    not_compared: frozenset[Aspect] = frozenset()
    """For `differences`: what other plugins of the list may have set on the pod's interface since."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """The whole configuration object; read with `cni.gojson` (keys in any case)."""
        return self.invocation.fields

    def on_host(self, path: str) -> Path:
        """Return where an absolute path of the configuration is, with links followed inside of the host's root.

        The path need not exist. Raises IoFailureError.
        """
        if self.host_root == _ROOT:
            return _ROOT / path.lstrip("/")
        try:
            return Path(fs.resolve(str(self.host_root), path, missing=True))
        except OSError as error:
            raise IoFailureError(f"{path} cannot be followed on the host: {error.strerror}") from error


class Module(Protocol):
    """A plugin of the CNI SPEC, as a module with these functions.

    Each function with a namespace runs in the thread that the namespace belongs to, on the host's side. A verb raises
    CniError, or any exception, which becomes code 999 with its text. A module may also have

    - `validate(call)`, which reads all of the configuration and raises CniError if `add` would refuse it;
    - `check(call, netns)` and `status(call)`; one without succeeds, as the reference plugin does;
    - `called_by(call)`, like that of this module, if it calls others than its IPAM plugin;
    - `keeps(call)`, `sets(fields)` and `differences(call, netns)` for the methods of `Plugin` of these names.
    """

    def unsupported(self, call: Call) -> str:
        """Return a part of the configuration that this plugin does not support, as `key`, or as `key: value` for a
        key that it knows; empty if none.

        Depends only on the configuration and on whether there are tools: the answer is cached. May raise JsonError for
        a configuration that cannot be read, which the verbs refuse.
        """

    def add(self, call: Call, netns: PodNetns) -> Result:
        """Do the work of ADD."""

    def delete(self, call: Call, netns: PodNetns) -> None:
        """Do the work of DEL. Treats absent objects as removed."""


def called_by(call: Call) -> Mapping[str, Invocation]:
    """Return the call of the IPAM plugin by its type; empty if there is none. Raises DecodingFailureError."""
    plugin_type = ipam_type(call)
    return {plugin_type: call.invocation} if plugin_type else {}


def ipam_type(call: Call) -> str:
    """Return `ipam.type`, empty if there is none. Raises DecodingFailureError."""
    with configuration.reading(call.name, "ipam"):
        return conf.once(
            call.fields, ipam_type, lambda: gojson.get_str(gojson.get_object(call.fields, "ipam") or {}, "type") or ""
        )


def required_ipam_type(call: Call) -> str:
    """Return `ipam.type`. Raises DecodingFailureError; InvalidNetworkConfigError if there is none."""
    plugin_type = ipam_type(call)
    if not plugin_type:
        raise InvalidNetworkConfigError("no plugin name provided", f"network {call.name!r}: set ipam.type")
    return plugin_type


def run_ipam(call: Call, verb: str) -> Result:
    """Run a verb of the IPAM plugin; an ADD must return between 1 and ADDRESSES_MAX addresses.

    Raises CniError, the IPAM plugin's own unchanged.
    """
    plugin_type = required_ipam_type(call)
    # Only an undo has another verb than its call.
    invocation = call.invocation if call.invocation.verb == verb else replace(call.invocation, verb=verb)
    answer = call.plugin_for(plugin_type, invocation).run(invocation, call.netns)
    if verb == "ADD" and not 0 < len(answer.ips) <= conf.ADDRESSES_MAX:
        too_many = f"{len(answer.ips)} addresses, and at most {conf.ADDRESSES_MAX} are taken"
        problem = too_many if answer.ips else "missing IP config"
        raise InternalError(f"IPAM plugin returned {problem}", f"ipam.type {plugin_type!r}")
    return answer


class Undo:
    """Run the armed steps in reverse if the `with` block raises; forget them if it succeeds.

    Arm a step before the action that it undoes; the step must succeed if there is nothing to undo. Each step has a
    deadline of its own. A step that fails is logged, and the others still run.
    """

    def __init__(self, *, seconds_for_each: float = deadlines.BUILTIN_UNDO_SECONDS) -> None:
        self._stack = contextlib.ExitStack()
        self._seconds = seconds_for_each

    def arm(self, what: str, step: Callable[[], object]) -> None:
        """Add a step; `what` names it in the log."""
        self._stack.callback(self._run, what, step)

    def _run(self, what: str, step: Callable[[], object]) -> None:
        try:
            with deadline.shielded(self._seconds):
                step()
        except deadline.ExpiredError:
            log.warning("undo of a failed ADD: %s: did not end within %g s", what, self._seconds)
        except Exception as error:
            log.warning("undo of a failed ADD: %s: %s", what, str(error) or type(error).__name__)

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        steps = self._stack.pop_all()
        if error is not None:
            steps.close()


def read_file(path: Path, *, limit: int = fs.DEFAULT_READ_LIMIT) -> bytes | None:
    """Return the content of a file that ADD keeps for DEL, None if there is none. Raises OSError."""
    try:
        return fs.read_limited(path, limit=limit)
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_file(path: Path, content: bytes | None, *, fsync: bool = True) -> None:
    """Write such a file with its directory, or remove it if `content` is None. Raises OSError."""
    if content is None:
        fs.remove(path)
        return
    fs.ensure_directory(path.parent)
    fs.write_atomic(path, content, fsync=fsync)
