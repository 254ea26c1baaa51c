"""One call of a plugin from outside, by the built-in and by the reference alike: bytes in, result or error out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multus_daemon.plugins.builtin.registry import Builtin
from multus_daemon.plugins.leases import Leases
from multus_daemon.plugins.plugin import HostTools, Plugin
from multus_daemon.plugins.process import ProcessRunner
from multus_daemon.plugins.select import Mode, Plugins
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import gojson, result, versions
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.result import Result
from tests.calls import run
from tests.netns import reference

PluginFor = Callable[[str, Invocation], Plugin]


@dataclass(frozen=True)
class Outcome:
    """Holds the outcome of a call; `result` is None where the call printed nothing."""

    result: dict[str, Any] | None = None
    msg: str = ""
    code: int = 0
    details: str = field(default="", compare=False)

    @property
    def failed(self) -> bool:
        return bool(self.code)

    @property
    def words(self) -> set[str]:
        """Return the words of the message, to compare messages that differ only in wording."""
        return {word.strip("\"'():;,[].").lower() for word in self.msg.replace("=", " ").split()}


def _decoded(stdout: bytes) -> dict[str, Any] | None:
    if not stdout:
        return None
    found: dict[str, Any] = json.loads(stdout)
    # v1.1.1 writes an empty dns, which newer ones leave out from 1.0.0 on.
    return {key: value for key, value in found.items() if value}


def _printed(verb: str, made: Result, version: str) -> bytes:
    """Return the stdout of a plugin with this result; an ADD without a result prints only its version."""
    if made != Result():
        return result.to_stdout(made, version)
    return result.empty_stdout(version) if verb == "ADD" else b""


def builtin(
    plugin: str,
    verb: str,
    path: str,
    config: dict[str, Any],
    *,
    ifname: str = "eth0",
    container: str = "container1",
    args: str = "",
    host_root: Path = Path("/"),
    ipam: PluginFor | None = None,
    tools: HostTools | None = None,
    leases: Leases | None = None,
) -> Outcome:
    """The built-in's outcome; `ipam`: what runs the plugins that it calls, the built-ins where it is None."""
    raw = json.dumps(config).encode()
    fields = gojson.loads_object(raw)
    invocation = Invocation(verb, container, path, ifname, args, str(reference.DIRECTORY), fields, raw=raw)
    try:
        made = run(Builtin(plugin, host_root, plugin_for=ipam, tools=tools, leases=leases), invocation)
        return Outcome(_decoded(_printed(verb, made, invocation.cni_version or versions.IMPLIED)))
    except CniError as error:
        return Outcome(msg=error.msg, code=error.code, details=error.details)


def _asked(config: dict[str, Any]) -> Invocation:
    return Invocation("ADD", "container1", "/nowhere", "eth0", "", "", config)


def refusal(plugin: str, config: dict[str, Any], leases: Leases) -> CniError | None:
    """The error with which the plan refuses a configuration."""
    return Builtin(plugin, Path("/"), leases=leases).refusal(_asked(config))


def unsupported(plugin: str, config: dict[str, Any], leases: Leases | None) -> str:
    """The part of the configuration that leaves it to the binary."""
    return Builtin(plugin, Path("/"), leases=leases).unsupported(_asked(config))


def dispatched(
    mode: Mode, tools: HostTools | None = None, *, bin_dirs: Sequence[Path] = (reference.DIRECTORY,)
) -> Plugins:
    """Built-ins and binaries, chosen as the daemon does."""
    return Plugins(ProcessRunner([str(directory) for directory in bin_dirs]), mode, tools=tools)


def of_reference(plugin: str, verb: str, path: str, config: dict[str, Any], **options: Any) -> Outcome:
    """The reference's; options as for `reference.call`."""
    done = reference.call(plugin, verb, path, config, **options)
    if done.returncode == 0:
        return Outcome(_decoded(done.stdout))
    error = json.loads(done.stdout)
    return Outcome(msg=error["msg"], code=error["code"], details=error.get("details", ""))


def require_same_failure(ours: Outcome, theirs: Outcome) -> None:
    """Both failed, and for one reason: three words in common, or all that the reference has.

    Of a value whose JSON type is wrong Go tells the name of its own type: there our code (6) must say that.
    """
    assert ours.failed, f"the built-in did it; the reference: {theirs.msg}"
    assert theirs.failed, f"the reference did it; the built-in: {ours.msg}"
    if "json: cannot unmarshal" in theirs.msg:
        assert ours.code == 6, (ours.msg, theirs.msg)
        return
    assert len(ours.words & theirs.words) >= min(3, len(theirs.words)), (ours.msg, theirs.msg)
