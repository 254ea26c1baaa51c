"""`multus-builtin`: a built-in plugin as an ordinary CNI plugin, for any runtime.

`multus-builtin ptp`, or a link to it named after the plugin (`/opt/cni/bin/ptp`), with the CNI environment and a
configuration on standard input (CNI SPEC section 2). What it prints and how it ends follow containernetworking/cni
`pkg/skel`: result or error on stdout, without a newline at the end, exit status 0 or 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import multus_daemon
from multus_daemon.kernel.ops import PodNetns
from multus_daemon.plugins.builtin.runner import PLUGINS, BuiltinRunner
from multus_daemon.plugins.plugin import HostTools, PluginRunner
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import result, skel, versions
from multus_daemon.spec.cni.errors import CniError, InvalidNetnsError, IoFailureError
from multus_daemon.spec.cni.result import Result

STDIN_MAX_BYTES: Final = 16 * 1024 * 1024
HOST_ROOT: Final = Path("/")
DELEGATING: Final = frozenset(PLUGINS) - {"host-local", "loopback", "passthru", "static", "tuning"}
"""The built-ins that call an IPAM plugin or a program of the host, as far as is known: an unknown one may."""
_OWN_NETNS: Final = "/proc/self/ns/net"
_USAGE_ERROR: Final = 2


def main() -> None:
    """The command. Exits."""
    sys.exit(run(sys.argv, os.environ, sys.stdin.buffer, sys.stdout.buffer, sys.stderr.buffer))


def run(argv: Sequence[str], environ: Mapping[str, str], stdin: BinaryIO, stdout: BinaryIO, stderr: BinaryIO) -> int:
    """One call of the plugin that `argv` names; the exit status: 0, 1 for a CNI error, 2 for a wrong command line."""
    plugin_type = _plugin_type(argv)
    if not plugin_type:
        stderr.write(_usage())
        return 0 if argv[1:] in (["-h"], ["--help"]) else _USAGE_ERROR
    if not environ.get("CNI_COMMAND"):
        stderr.write(_about(plugin_type))
        return 0
    try:
        output = _call(plugin_type, environ, stdin)
    except CniError as error:
        stdout.write(error.to_stdout())
        stdout.flush()
        return 1
    stdout.write(output)
    stdout.flush()
    return 0


def _plugin_type(argv: Sequence[str]) -> str:
    """The plugin's type, from the command's own name or its argument; empty where neither is a built-in's."""
    own_name = os.path.basename(argv[0])
    if own_name in PLUGINS:
        return own_name
    return argv[1] if len(argv) == 2 and argv[1] in PLUGINS else ""


def _usage() -> bytes:
    known = ", ".join(PLUGINS)
    return (
        "usage: multus-builtin TYPE    (or a link to it that is named TYPE)\n"
        f"Runs a plugin by the CNI protocol, TYPE one of: {known}.\n"
    ).encode()


def _about(plugin_type: str) -> bytes:
    return (
        f"CNI {plugin_type} plugin version {multus_daemon.__version__}\n"
        f"CNI protocol versions supported: {', '.join(versions.SUPPORTED)}\n"
    ).encode()


def _call(plugin_type: str, environ: Mapping[str, str], stdin: BinaryIO) -> bytes:
    """Check everything, then run the plugin; what belongs on stdout. Raises CniError."""
    environment = skel.environment(environ)
    if environment.verb == "VERSION":
        # Nobody has to give a configuration for it, and standard input may be a terminal.
        return skel.version_stdout()
    config = _read(stdin)
    # The runner checks it again. Here it is for the order: a bad configuration is told before a bad namespace.
    fields = skel.configuration(environment.verb, config).fields
    if environment.verb in ("ADD", "DEL") and not environment.netns_override:
        _refuse_own_netns(environment.netns)
    invocation = Invocation(
        verb=environment.verb,
        container_id=environment.container_id,
        netns=environment.netns,
        ifname=environment.ifname,
        args=environment.args,
        path=environment.path,
        fields=fields,
        raw=config,
        netns_override=environment.netns_override,
    )
    with PodNetns(environment.netns, may_be_own=environment.netns_override) as netns:
        if plugin_type not in DELEGATING:
            return _stdout(invocation, BuiltinRunner(HOST_ROOT).run(plugin_type, invocation, netns))
        runner = BuiltinRunner(HOST_ROOT, tools=_tools())
        runner.ipam = _delegation(runner, environment.path)
        return _stdout(invocation, runner.run(plugin_type, invocation, netns))


def _stdout(invocation: Invocation, made: Result) -> bytes:
    if invocation.verb != "ADD":
        return b""
    version = invocation.cni_version or versions.IMPLIED
    return result.empty_stdout(version) if made == Result() else result.to_stdout(made, version)


def _read(stdin: BinaryIO) -> bytes:
    try:
        data = stdin.read(STDIN_MAX_BYTES + 1)
    except OSError as error:
        raise IoFailureError(f"error reading from stdin: {error.strerror}") from error
    if len(data) > STDIN_MAX_BYTES:
        raise IoFailureError(f"error reading from stdin: more than {STDIN_MAX_BYTES} bytes")
    return data


def _refuse_own_netns(path: str) -> None:
    """Fail where CNI_NETNS is the namespace that this process is in.

    Before the plugin runs: the Go library looks only afterwards, when the host's own network is rearranged and an
    address is gone. A namespace that can't be looked at is left to the plugin. Raises InvalidNetnsError.
    """
    try:
        same = bool(path) and os.path.samefile(path, _OWN_NETNS)
    except OSError:
        return
    if same:
        raise InvalidNetnsError("plugin's netns and netns from CNI_NETNS should not be the same", path)


def _tools() -> HostTools:
    from multus_daemon.plugins.tools import ToolRunner
    from multus_daemon.pod import portals
    from multus_daemon.runtime.portal import OwnLoop

    return portals.Tools(ToolRunner(), OwnLoop())


def _delegation(builtin: BuiltinRunner, path: str) -> PluginRunner:
    """Runs the plugins that a built-in calls: a binary in CNI_PATH, else a built-in.

    In this order, as whoever calls us by the CNI protocol has decided what lies in CNI_PATH.
    """
    # Not at the top: what delegates nothing need not wait for it.
    from multus_daemon.plugins.process import ProcessRunner
    from multus_daemon.plugins.select import Dispatcher
    from multus_daemon.pod import portals
    from multus_daemon.runtime.portal import OwnLoop

    directories = [os.path.abspath(directory) for directory in path.split(os.pathsep) if directory]
    return Dispatcher(portals.Binaries(ProcessRunner(directories), OwnLoop()), builtin, "fallback")


if __name__ == "__main__":
    main()
