"""`multus-builtin`: run a built-in plugin as an ordinary CNI plugin, for any runtime.

`multus-builtin ptp`, or a link to it named after the plugin (`/opt/cni/bin/ptp`), takes the CNI environment and a
configuration on standard input (CNI SPEC section 2). Output and exit status follow containernetworking/cni `pkg/skel`:
result or error on stdout, without a newline at the end, exit status 0 or 1. So do the order, texts and codes of the
errors, as conformance tests check which one comes first. CNI_PATH is required; in the specification it is optional.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import multus_daemon
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin.registry import PLUGINS, Builtin
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import conf, gojson, names, result, versions
from multus_daemon.spec.cni.errors import CniError, InvalidEnvironmentError, InvalidNetnsError, IoFailureError
from multus_daemon.spec.cni.result import Result

STDIN_MAX_BYTES: Final = 16 * 1024 * 1024
HOST_ROOT: Final = Path("/")
DELEGATING: Final = frozenset(PLUGINS) - {
    *("bandwidth", "dhcp", "host-local", "loopback", "passthru", "static", "tuning", "vrf", "whereabouts")
}
"""The built-ins that may call an IPAM plugin or a program of the host."""
VERSION_STDOUT: Final = (
    gojson.dumps({"cniVersion": versions.CURRENT, "supportedVersions": versions.SUPPORTED}, sort_keys=False) + b"\n"
)
"""Output of the verb VERSION, whatever version is asked for (CNI SPEC section 2)."""
_CONTAINER_VERBS: Final = frozenset({"ADD", "DEL", "CHECK"})
# Variable, verbs that need it, and the check of its value. "" is the verb of a call without CNI_COMMAND.
_VARIABLES: Final[tuple[tuple[str, frozenset[str], Callable[[str], str] | None], ...]] = (
    ("CNI_COMMAND", frozenset({""}), None),
    ("CNI_CONTAINERID", _CONTAINER_VERBS, names.container_id_problem),
    ("CNI_NETNS", frozenset({"ADD", "CHECK"}), None),
    ("CNI_IFNAME", _CONTAINER_VERBS, names.ifname_problem),
    ("CNI_PATH", _CONTAINER_VERBS | {"STATUS", "GC"}, None),
)
_OWN_NETNS: Final = "/proc/self/ns/net"
_USAGE_ERROR: Final = 2
_USAGE: Final = (
    "usage: multus-builtin TYPE    (or a link to it that is named TYPE)\n"
    f"Runs a plugin by the CNI protocol, TYPE one of: {', '.join(PLUGINS)}.\n"
)


def main() -> None:
    """Entry point. Exits."""
    sys.exit(run(sys.argv, os.environ, sys.stdin.buffer, sys.stdout.buffer, sys.stderr.buffer))


def run(argv: Sequence[str], environ: Mapping[str, str], stdin: BinaryIO, stdout: BinaryIO, stderr: BinaryIO) -> int:
    """Run the plugin that `argv` names. Return the exit status: 0, 1 for a CNI error, 2 for a wrong command line."""
    plugin_type = _plugin_type(argv)
    if not plugin_type:
        stderr.write(_USAGE.encode())
        return 0 if argv[1:] in (["-h"], ["--help"]) else _USAGE_ERROR
    if not environ.get("CNI_COMMAND"):
        about = f"CNI {plugin_type} plugin version {multus_daemon.__version__}\n"
        stderr.write(f"{about}CNI protocol versions supported: {', '.join(versions.SUPPORTED)}\n".encode())
        return 0
    try:
        status, output = 0, _call(plugin_type, environ, stdin)
    except CniError as error:
        status, output = 1, error.to_stdout()
    stdout.write(output)
    stdout.flush()
    return status


def _plugin_type(argv: Sequence[str]) -> str:
    """Return the type that the program's name or its argument gives; empty if neither is a built-in's."""
    own_name = os.path.basename(argv[0])
    if own_name in PLUGINS:
        return own_name
    return argv[1] if len(argv) == 2 and argv[1] in PLUGINS else ""


def environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the variables that the verb needs, as fields of an `Invocation`. Raises InvalidEnvironmentError.

    The first invalid value is an error at once; missing variables are collected into one error. Variables that the verb
    does not need may be empty. An unknown verb is refused later, by `conf.configuration`, as in the Go library.
    """
    verb = environ.get("CNI_COMMAND", "")
    missing = []
    for name, needed_by, problem_of in _VARIABLES:
        if verb not in needed_by:
            continue
        value = environ.get(name, "")
        if not value:
            missing.append(name)
        elif problem_of and (problem := problem_of(value)):
            raise InvalidEnvironmentError(problem, _details(name, value))
    if missing:
        raise InvalidEnvironmentError(f"required env variables [{','.join(missing)}] missing")
    keys = {"container_id": "CONTAINERID", "netns": "NETNS", "ifname": "IFNAME", "args": "ARGS", "path": "PATH"}
    values = {key: environ.get(f"CNI_{name}", "") for key, name in keys.items()}
    return {"verb": verb, **values, "netns_override": names.netns_override(environ)}


def _details(name: str, value: str) -> str:
    if name == "CNI_CONTAINERID":
        return value
    too_long = len(value.encode("utf-8", "surrogatepass")) > names.IFNAME_MAX_BYTES
    return f"interface name should be less than {names.IFNAME_MAX_BYTES + 1} characters" if too_long else ""


def _call(plugin_type: str, environ: Mapping[str, str], stdin: BinaryIO) -> bytes:
    """Check the request, run the plugin, and return its output. Raises CniError."""
    variables = environment(environ)
    if variables["verb"] == "VERSION":
        # It needs no configuration, and standard input may be a terminal.
        return VERSION_STDOUT
    config = _read(stdin)
    # The plugin checks it again. Here, a bad configuration is reported before a bad namespace.
    invocation = Invocation(**variables, fields=conf.configuration(variables["verb"], config), raw=config)
    path = invocation.netns
    if invocation.verb in ("ADD", "DEL") and path and not invocation.netns_override:
        # Before the plugin runs: the Go library looks only afterwards, when the host's own network is changed. A
        # namespace that can't be read is left to the plugin.
        with contextlib.suppress(OSError):
            if os.path.samefile(path, _OWN_NETNS):
                raise InvalidNetnsError("plugin's netns and netns from CNI_NETNS should not be the same", path)
    with PodNetns(path, may_be_own=invocation.netns_override) as netns:
        made = _plugin(plugin_type, invocation.path).run(invocation, netns)
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


def _plugin(plugin_type: str, path: str) -> Builtin:
    """Return the built-in; it calls plugins as binaries in CNI_PATH (`path`) if they are there, else as built-ins."""
    if plugin_type not in DELEGATING:
        return Builtin(plugin_type, HOST_ROOT)
    # Not at the top: a plugin that delegates nothing need not wait for these imports.
    from multus_daemon.plugins.process import ProcessRunner, ToolRunner
    from multus_daemon.plugins.select import Plugins

    tools = ToolRunner()
    directories = [os.path.abspath(directory) for directory in path.split(os.pathsep) if directory]
    plugins = Plugins(ProcessRunner(directories), "fallback", host_root=HOST_ROOT, tools=tools)
    return Builtin(plugin_type, HOST_ROOT, plugin_for=plugins.recorded, tools=tools)


if __name__ == "__main__":
    main()
