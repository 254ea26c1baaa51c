"""`multus-daemon`: run the daemon or what stands beside it, check a configuration, put the shim on a node and take it
off again, the version.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from multus_daemon import __version__, logs, settings
from multus_daemon.runtime import user
from multus_daemon.settings import Settings, SettingsError

COMMANDS = (
    "run",
    "check-config",
    "cert-approver",
    "webhook",
    "kubeconfig-generator",
    "install",
    "uninstall",
    "version",
)
UPSTREAM_PROGRAMS = {
    "install_multus": "install",
    "cert-approver": "cert-approver",
    "kubeconfig_generator": "kubeconfig-generator",
}
"""Programs of upstream's image that are links to this one in ours -> the command that each is."""
FLAGS: Final = MappingProxyType(
    {
        # Upstream's first thick release.
        "additional-bin-dir": "binDir",
        "binDir": "binDir",
        "cni-config-dir": "cniConfigDir",
        "cni-version": "cniVersion",
        "cniDir": "cniDir",
        "force-cni-version": "forceCNIVersion",
        "global-namespaces": "globalNamespaces",
        "multus-autoconfig-dir": "multusAutoconfigDir",
        "multus-conf-file": "multusConfigFile",
        "multus-kubeconfig-file-host": "kubeconfig",
        "multus-log-file": "logFile",
        "multus-log-level": "logLevel",
        "multus-log-to-stderr": "logToStderr",
        "multus-master-cni-file": "multusMasterCNI",
        "multus-rundir": "socketDir",
        "namespace-isolation": "namespaceIsolation",
        "override-network-name": "overrideNetworkName",
        "readiness-indicator-file": "readinessindicatorfile",
        # Ours, which the manifests and the documentation use.
        "cni-dir": "cniDir",
        "conf-dir": "confDir",
        "kubeconfig": "kubeconfig",
        "log-level": "logLevel",
        "metrics-port": "metricsPort",
        "per-node-certificate": "perNodeCertificate",
        "socket-dir": "socketDir",
    }
)
"""Settings that the command line can set: the flag, without dashes -> the key."""
_BOOLEANS: Final = frozenset({"forceCNIVersion", "logToStderr", "namespaceIsolation", "overrideNetworkName"})
_JSON: Final = frozenset({"metricsPort", "perNodeCertificate"})
_OF_A_CLIENT: Final = frozenset({"kubeconfig", "logFile", "logLevel", "logToStderr", "perNodeCertificate"})
_OF_THE_NODE: Final = frozenset({"socketDir", "cniDir", "cniConfigDir", "confDir"})
_GO_BOOLEANS: Final = MappingProxyType(
    {
        **dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True),
        **dict.fromkeys(("0", "f", "F", "FALSE", "false", "False"), False),
    }
)
WEBHOOK_PORT = 8443
HOST_BIN_DIR = Path("/host/opt/cni/bin")
"""Where the manifests mount the node's plugin directory, as upstream's do."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exit status: 0 done or stopped by a signal, 1 bad configuration, 2 usage, 3 can't be done."""
    if argv is None:
        program = UPSTREAM_PROGRAMS.get(os.path.basename(sys.argv[0]))
        argv = [program, *sys.argv[1:]] if program else sys.argv[1:]
    words = _upstream_spelling(list(argv))
    arguments = parser().parse_args(words)
    if arguments.command == "version":
        print(f"multus-daemon: version {__version__}")
        return
    if arguments.command == "install":
        sys.exit(_install(arguments))
    if arguments.command == "kubeconfig-generator":
        sys.exit(_generate_kubeconfig(arguments))
    try:
        standalone = getattr(arguments, "standalone", None) is not None
        optional = standalone or arguments.command in ("cert-approver", "webhook", "uninstall") or bool(arguments.flags)
        found = _settings(arguments.config, arguments.flags, optional=optional)
    except SettingsError as error:
        print(f"{error.source}: {len(error.problems)} problem(s)", file=sys.stderr)
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
        sys.exit(1)
    if arguments.command == "check-config":
        print(json.dumps(found.effective(), indent=4))
        for warning in found.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        return
    others = {"uninstall": _uninstall, "cert-approver": _run_companion, "webhook": _run_companion}
    sys.exit(others.get(arguments.command, _run)(found, arguments))


def _upstream_spelling(argv: list[str]) -> list[str]:
    """Upstream's daemon has no commands, and Go's single dash: `multus-daemon -config FILE`."""
    single = {f"-{name}" for name in {*FLAGS, "config", "version"}}
    argv = [f"-{word}" if word.partition("=")[0] in single else word for word in argv]
    if argv and argv[0] == "--version":
        return ["version"]
    return argv if argv and (argv[0] in COMMANDS or argv[0] in ("-h", "--help")) else ["run", *argv]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(prog="multus-daemon", description="Sets up every network of a pod.")
    commands = parser.add_subparsers(dest="command", required=True)
    of_settings = "A flag of a setting wins over the configuration; docs/configuration.md has all settings."
    run = commands.add_parser(
        "run",
        help="run the daemon in the foreground",
        usage="%(prog)s [--config FILE] [--standalone DIR] [FLAG ...]",
        description=of_settings,
        allow_abbrev=False,
    )
    run.add_argument(
        "--standalone",
        metavar="DIR",
        type=Path,
        help="take pods and NetworkAttachmentDefinitions from the manifests in DIR: no cluster is needed",
    )
    approver = commands.add_parser(
        "cert-approver", help="approve the nodes' requests for certificates of their own", allow_abbrev=False
    )
    generator = commands.add_parser(
        "kubeconfig-generator",
        help="keep a kubeconfig with a client certificate of this node's own for other programs, until a signal",
        allow_abbrev=False,
    )
    for flag, default, text in (
        ("--certdir", "/tmp", "directory of the certificate; it has to be there"),  # noqa: S108 - upstream's default
        ("--bootstrap-config", "/tmp/kubeconfig", "kubeconfig of a user who may ask for the certificate"),  # noqa: S108
        ("--kubeconfig", "/run/multus/kubeconfig", "the file to write"),
        ("--cert-duration", "10m", "how long a certificate is valid, as Go writes durations"),
    ):
        generator.add_argument(flag, metavar="TEXT", default=default, help=f"{text} (default: %(default)s)")
    webhook = commands.add_parser(
        "webhook",
        help="refuse networks that can't be used, and warn about pods, when they are applied",
        usage="%(prog)s --cert FILE --key FILE [--port PORT] [--address ADDRESS] [--config FILE] [FLAG ...]",
        allow_abbrev=False,
    )
    for name, text in (("--cert", "the server's certificate, PEM"), ("--key", "its key, PEM")):
        webhook.add_argument(name, metavar="FILE", type=Path, required=True, help=f"{text}; read again when it changes")
    webhook.add_argument("--port", type=_port, default=WEBHOOK_PORT, help="TCP port (default: %(default)s)")
    webhook.add_argument("--address", default="", help="address that the port binds to (default: all of them)")
    check = commands.add_parser(
        "check-config",
        help="check a configuration and print the settings in force",
        usage="%(prog)s [--config FILE] [FLAG ...]",
        description=of_settings,
        allow_abbrev=False,
    )
    install = commands.add_parser("install", help="put the shim into the node's plugin directory", allow_abbrev=False)
    install.add_argument("--shim", metavar="FILE", type=Path, help="the shim (default: the one installed with this)")
    install.add_argument(
        *("-t", "--type"),
        choices=("thick",),
        help="as upstream's install_multus: the plugin passthru too; there is no thin plugin",
    )
    uninstall = commands.add_parser(
        "uninstall",
        help="take everything of ours off the node, once its daemon has stopped",
        usage="%(prog)s [--config FILE] [--bin-dir DIR] [--force] [--purge] [FLAG ...]",
        allow_abbrev=False,
    )
    uninstall.add_argument("--force", action="store_true", help="even if pods have additional networks")
    uninstall.add_argument("--purge", action="store_true", help="and forget what is attached: remove cniDir")
    for command in (install, uninstall):
        command.add_argument(
            *(("--bin-dir", "-d", "--dest-dir") if command is install else ("--bin-dir",)),
            metavar="DIR",
            type=Path,
            dest="bin_dir",
            default=HOST_BIN_DIR,
            help="the node's plugin directory (default: %(default)s)",
        )
    for command in (run, approver, webhook, check, uninstall):
        command.add_argument(
            "--config",
            metavar="FILE",
            type=Path,
            help=f"configuration, JSON (default: {settings.DEFAULT_CONFIG_PATH})",
        )
    for command in (run, check):
        _add_flags(command, frozenset(FLAGS.values()))
    _add_flags(approver, _OF_A_CLIENT)
    _add_flags(webhook, _OF_A_CLIENT | {"metricsPort"})
    _add_flags(uninstall, _OF_THE_NODE)
    commands.add_parser("version", help="print the version")
    return parser


class _Set(argparse.Action):
    """Keep the flag as it was spelt, and its value, in the dict `flags` of the namespace: `settings.Flags`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        namespace.flags = {**namespace.flags, self.dest: (option_string, _value(self.dest, str(values)))}


def _add_flags(parser: argparse.ArgumentParser, keys: frozenset[str]) -> None:
    """Add the flags of these settings. What is given of them is in `flags` of the parsed namespace."""
    parser.set_defaults(flags={})
    group = parser.add_argument_group("settings")
    for flag, key in FLAGS.items():
        if key in keys:
            sort = "BOOL" if key in _BOOLEANS else "JSON" if key in _JSON else "TEXT"
            optional: dict[str, Any] = {"nargs": "?", "const": "true"} if sort == "BOOL" else {}
            group.add_argument(
                f"--{flag}", action=_Set, dest=key, metavar=sort, help=key, default=argparse.SUPPRESS, **optional
            )


def _value(key: str, text: str) -> Any:
    """Return `text` as JSON has it. A malformed value stays text: `settings` refuses it and names the flag."""
    if key in _BOOLEANS:
        return _GO_BOOLEANS.get(text, text)
    if key in _JSON:
        try:
            return msgspec.json.decode(text)
        except (ValueError, RecursionError):
            return text
    return text


def _port(text: str) -> int:
    """Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:6]) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535")
    return int(text)


def _settings(path: Path | None, given: settings.Flags, *, optional: bool) -> Settings:
    """The settings in `path`, or in the usual place, and those of the command line.

    `optional`: where nothing is in the usual place, the defaults.
    """
    default = Path(settings.DEFAULT_CONFIG_PATH)
    # Not `exists`, which raises where an ordinary user may not look into the directory: then it is not theirs either.
    if path is None and optional and not os.access(default, os.F_OK):
        return settings.from_object({}, "command line", given)
    return settings.load(path or default, given)


def _run(found: Settings, arguments: argparse.Namespace) -> int:
    # Imported here: `version` and `check-config` do not need aiohttp.
    with _no_system_certificates():
        from multus_daemon import daemon
        from multus_daemon.runtime import malloc

    malloc.settle()
    if arguments.standalone is not None:
        found = settings.in_directory(found, user.runtime_directory())
    return _until_ended(found, functools.partial(daemon.run, found, standalone=arguments.standalone))


def _run_companion(found: Settings, arguments: argparse.Namespace) -> int:
    # Not the daemon, of which it needs little.
    with _no_system_certificates():
        from multus_daemon import companions

    if arguments.command == "cert-approver":
        return _until_ended(found, functools.partial(companions.approve_certificates, found))
    given = (arguments.cert, arguments.key, arguments.port, arguments.address)
    return _until_ended(found, functools.partial(companions.serve_webhook, found, *given))


def _until_ended(found: Settings, run: Callable[[], None], name: str = "multus-daemon") -> int:
    """Configure the logs, run, and return the exit status. The reason of a failed start goes to standard error."""
    from multus_daemon.runtime.tasks import StartError

    if sys.__stderr__ is not None:
        # A crash of the interpreter, or of a library in C, says in which threads what was done.
        faulthandler.enable(sys.__stderr__)
    wanted = found.logs
    try:
        logs.configure(wanted.level, wanted.to_stderr, file=wanted.file, options=wanted.options)
    except (OSError, ValueError) as error:
        print(f"{name}: logFile: {error}", file=sys.stderr)
        return 3
    try:
        # Closing the logs takes a blocked standard error away, so `print` comes after it.
        with contextlib.closing(logs):
            run()
    except StartError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 3
    return 0


@contextlib.contextmanager
def _no_system_certificates() -> Iterator[None]:
    """OpenSSL finds no CA of the system in the block.

    When it is imported, aiohttp reads all of them into two TLS contexts: a quarter of the work of the daemon's start,
    and 2 MB for good. Neither context is used. The one for the API server is made later (`cluster.kube.client`).
    """
    hidden = {"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull}
    before = {name: os.environ.get(name) for name in hidden}
    os.environ.update(hidden)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _install(arguments: argparse.Namespace) -> int:
    import multus_shim
    from multus_daemon.node import install

    try:
        source = arguments.shim or multus_shim.binary()
        for name in (install.SHIM, install.PASSTHRU) if arguments.type else (install.SHIM,):
            done = install.install_shim(source, arguments.bin_dir, name=name)
            state = "installed" if done else "was there already"
            print(f"{arguments.bin_dir / name}: {state}, version {__version__}")
    except (FileNotFoundError, install.InstallError) as error:
        print(f"multus-daemon install: {error}", file=sys.stderr)
        return 3
    return 0


def _generate_kubeconfig(arguments: argparse.Namespace) -> int:
    found = settings.from_object(
        {
            "logLevel": "verbose",
            "perNodeCertificate": {
                "enabled": True,
                "bootstrapKubeconfig": arguments.bootstrap_config,
                "certDir": arguments.certdir,
                "certDuration": arguments.cert_duration,
            },
        },
        "command line",
    )
    with _no_system_certificates():
        from multus_daemon import companions

    run = functools.partial(companions.generate_kubeconfig, found, Path(arguments.kubeconfig))
    return _until_ended(found, run, "multus-daemon kubeconfig-generator")


def _uninstall(found: Settings, arguments: argparse.Namespace) -> int:
    from multus_daemon.node import install
    from multus_daemon.plugins.cache import ResultCache
    from multus_daemon.pod.store import FileStore

    cni_dir = Path(found.paths.cni_dir)
    node = install.Node(
        *(arguments.bin_dir, Path(found.primary.config_dir), Path(found.socket.directory), cni_dir),
        Path(found.paths.conf_dir),
    )
    store = FileStore(cni_dir, ResultCache(cni_dir))
    try:
        done = install.uninstall(node, store, force=arguments.force, purge=arguments.purge)
    except install.InstallError as error:
        print(f"multus-daemon uninstall: {error}", file=sys.stderr)
        return 3
    print("\n".join(done) or "there was nothing to remove")
    return 0


if __name__ == "__main__":
    main()
