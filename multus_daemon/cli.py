"""`multus-daemon`: the commands of the daemon's program.

They run the daemon, the approver or the webhook, check a configuration, and install or remove the shim on a node.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from multus_daemon import __version__, logs, settings
from multus_daemon.settings import FLAGS, Settings, SettingsError
from multus_daemon.settings.keys import MetricsSettings

log = logging.getLogger(__name__)

UPSTREAM_PROGRAMS = {
    "install_multus": "install",
    "cert-approver": "cert-approver",
    "kubeconfig_generator": "kubeconfig-generator",
}
"""Programs of upstream's image, which are links to `multus-daemon` in ours: the command that each one runs."""
WEBHOOK_PORT = 8443
HOST_BIN_DIR = Path("/host/opt/cni/bin")
"""Mount of the node's plugin directory in the manifests, as in upstream's."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program. Exit status: 0 success or stopped by a signal, 1 bad configuration, 2 usage, 3 failure."""
    if argv is None:
        program = UPSTREAM_PROGRAMS.get(os.path.basename(sys.argv[0]))
        argv = [program, *sys.argv[1:]] if program else sys.argv[1:]
    arguments = parser().parse_args(_upstream_spelling(list(argv)))
    arguments.flags = dict(arguments.flags)
    try:
        status = _COMMANDS[arguments.command][0](arguments)
    except SettingsError as error:
        print(f"{error.source}: {len(error.problems)} problem(s)", file=sys.stderr)
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
        status = 1
    if status is not None:
        sys.exit(status)


def _upstream_spelling(argv: list[str]) -> list[str]:
    """Translate upstream's command line, without a command and with a single dash: `multus-daemon -config FILE`."""
    single = {f"-{name}" for name in {*FLAGS, "config", "version"}}
    argv = [f"-{word}" if word.partition("=")[0] in single else word for word in argv]
    if argv and argv[0] == "--version":
        return ["version"]
    return argv if argv and (argv[0] in COMMANDS or argv[0] in ("-h", "--help")) else ["run", *argv]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="multus-daemon", description="Sets up every network of a pod.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, text, keys) in _COMMANDS.items():
        usage = "%(prog)s [OPTION ...] [FLAG ...]" if keys else None
        command = commands.add_parser(
            name, help=text, usage=usage, allow_abbrev=False, formatter_class=settings.FlagsFormatter
        )
        command.epilog = f"example: {command.prog} {_EXAMPLES.get(name, '')}"
        for users, names, options in _ARGUMENTS:
            if name in users.split():
                command.add_argument(*names.split(), **options)
        command.set_defaults(flags=[])
        if keys:
            settings.add_flags(command.add_argument_group("settings", _OF_SETTINGS), keys)
    return parser


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:6]) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535")
    return int(text)


def _settings(arguments: argparse.Namespace, *, optional: bool) -> Settings:
    """Read `--config` or the default file, and the flags. `optional`: no file is needed. Raises SettingsError."""
    path: Path | None = arguments.config
    default = Path(settings.DEFAULT_CONFIG_PATH)
    # Not `exists`, which raises if an ordinary user has no access to the directory: then the file is not theirs either.
    if path is None and (optional or arguments.flags) and not os.access(default, os.F_OK):
        return settings.from_object({}, "command line", arguments.flags)
    return settings.load(path or default, arguments.flags)


def _version(_arguments: argparse.Namespace) -> None:
    print(f"multus-daemon: version {__version__}")


def _check_config(arguments: argparse.Namespace) -> None:
    given = _settings(arguments, optional=False)
    print(json.dumps(given.effective(), indent=4))
    for warning in given.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _run(arguments: argparse.Namespace) -> int:
    given = _settings(arguments, optional=arguments.standalone is not None)
    # Imported here: `version` and `check-config` do not need aiohttp.
    with _no_system_certificates():
        from multus_daemon import daemon

    if arguments.standalone is not None:
        given = settings.for_standalone(settings.in_directory(given, settings.runtime_directory()))
    return _until_ended(given, functools.partial(daemon.run, given, standalone=arguments.standalone))


def _approve_certificates(arguments: argparse.Namespace) -> int:
    given = _settings(arguments, optional=True)

    def run() -> None:
        from multus_daemon.runtime.aio import StartError

        try:
            with _no_system_certificates():
                from multus_tools import approver
        except ImportError as error:
            raise StartError(f"cert-approver: {error}; install multus-daemon[certificates]") from error
        approver.run(given)

    return _until_ended(given, run)


def _serve_webhook(arguments: argparse.Namespace) -> int:
    given = _settings(arguments, optional=True)
    with _no_system_certificates():
        from multus_tools.webhook import server

    # The file is the daemon's: its keys of the metrics are about the node's port.
    port = given.metrics.port if "metricsPort" in arguments.flags else None
    given = replace(given, metrics=MetricsSettings(port))
    where = (arguments.cert, arguments.key, arguments.port, arguments.address)
    return _until_ended(given, functools.partial(server.run, given, *where))


def _generate_kubeconfig(arguments: argparse.Namespace) -> int:
    certificate = {
        "enabled": True,
        "bootstrapKubeconfig": arguments.bootstrap_config,
        "certDir": arguments.certdir,
        "certDuration": arguments.cert_duration,
    }
    given = settings.from_object({"perNodeCertificate": certificate}, "command line")
    with _no_system_certificates():
        from multus_daemon.cluster.kube import connect

    run = functools.partial(connect.keep_kubeconfig, given.kubernetes, Path(arguments.kubeconfig))
    return _until_ended(given, run, "multus-daemon kubeconfig-generator")


def _until_ended(given: Settings, run: Callable[[], None], name: str = "multus-daemon") -> int:
    """Configure malloc and logs, call `run`, and return the exit status; log the reason of a failed start."""
    from multus_daemon.runtime import malloc
    from multus_daemon.runtime.aio import StartError

    malloc.settle()
    if sys.__stderr__ is not None:
        # A crash of the interpreter, or of a library in C, prints the stack of each thread.
        faulthandler.enable(sys.__stderr__)
    wanted = given.logs
    try:
        logs.configure(
            wanted.level,
            wanted.to_stderr,
            file=wanted.file,
            options=msgspec.to_builtins(wanted.options),
            line_format=wanted.line_format,
        )
    except (OSError, ValueError) as error:
        print(f"{name}: logFile: {error}", file=sys.stderr)
        return 3
    problem, is_printed = "", wanted.line_format == "text"
    # Closing the logs redirects a blocked standard error, so `print` comes after it.
    with contextlib.closing(logs):
        try:
            run()
        except StartError as error:
            problem = str(error)
            # Readers of the other formats get nothing but records.
            if not is_printed:
                log.critical("%s", problem)
        except Exception as error:
            # A root task has failed: a fault of the program.
            problem, is_printed = f"{type(error).__name__}: {error}", False
            log.critical("%s", problem, exc_info=error)
    if problem and (is_printed or not wanted.to_stderr):
        print(f"{name}: {problem}", file=sys.stderr)
    return 3 if problem else 0


@contextlib.contextmanager
def _no_system_certificates() -> Iterator[None]:
    """Context manager: in its block, OpenSSL does not find the system's CA certificates.

    When it is imported, aiohttp reads them all into two unused TLS contexts, which takes a quarter of the daemon's
    start and 2 MB. The context for the API server is made later (`cluster.kube.client`).
    """
    before = os.environ.copy()
    os.environ.update(SSL_CERT_FILE=os.devnull, SSL_CERT_DIR=os.devnull)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _install(arguments: argparse.Namespace) -> int:
    import multus_shim
    from multus_daemon.node import install

    try:
        source = arguments.shim or multus_shim.binary()
        # Pods that the thin plugin attached, and its configuration, call the plugin by that name.
        is_thin = arguments.thin or (arguments.bin_dir / install.THIN).exists()
        others = {install.PASSTHRU: arguments.type, install.THIN: is_thin}
        for name in (install.SHIM, *(name for name, is_wanted in others.items() if is_wanted)):
            done = install.install_shim(source, arguments.bin_dir, name=name)
            state = "installed" if done else "was there already"
            print(f"{arguments.bin_dir / name}: {state}, version {__version__}")
    except (FileNotFoundError, install.InstallError) as error:
        print(f"multus-daemon install: {error}", file=sys.stderr)
        return 3
    return 0


def _uninstall(arguments: argparse.Namespace) -> int:
    given = _settings(arguments, optional=True)
    from multus_daemon.node import install
    from multus_daemon.plugins.cache import ResultCache
    from multus_daemon.pod.store import FileStore
    from multus_daemon.spec.cni.errors import as_on_host

    cni_dir = Path(given.paths.cni_dir)
    node = install.Node(
        *(arguments.bin_dir, Path(given.primary.config_dir), Path(given.socket.directory), cni_dir),
        Path(given.paths.conf_dir),
    )
    store = FileStore(cni_dir, ResultCache(cni_dir))

    def free() -> dict[str, str]:
        with _no_system_certificates():
            from multus_daemon import daemon
        from multus_daemon.runtime.aio import StartError

        logs.configure(given.logs.level)
        try:
            with contextlib.closing(logs):
                return daemon.free(given)
        except (StartError, OSError) as error:
            return {"": str(error)}

    try:
        done = install.uninstall(node, store, free, force=arguments.force, purge=arguments.purge)
    except install.InstallError as error:
        print(f"multus-daemon uninstall: {as_on_host(str(error))}", file=sys.stderr)
        return 3
    print(as_on_host("\n".join(done)) or "there was nothing to remove")
    return 0


_EXAMPLES: Final = {
    "run": "--standalone manifests/",
    "check-config": "--config daemon-config.json",
    "webhook": "--cert tls.crt --key tls.key",
    "install": "--bin-dir /opt/cni/bin",
    "uninstall": "--force --purge",
}
_ALL_KEYS: Final = frozenset(FLAGS.values())
_CLIENT_KEYS: Final = frozenset({"kubeconfig", "logFile", "logLevel", "logToStderr", "perNodeCertificate"})
_NODE_KEYS: Final = frozenset({"chrootDir", "socketDir", "cniDir", "cniConfigDir", "confDir"})
_NO_KEYS: Final[frozenset[str]] = frozenset()
_OF_SETTINGS = "A flag of a setting overrides the configuration; docs/configuration.md has all settings."

_COMMANDS: Final[Mapping[str, tuple[Callable[[argparse.Namespace], int | None], str, frozenset[str]]]] = {
    "run": (_run, "run the daemon in the foreground", _ALL_KEYS),
    "check-config": (_check_config, "check a configuration and print the settings in force", _ALL_KEYS),
    "cert-approver": (_approve_certificates, "approve the nodes' requests for client certificates", _CLIENT_KEYS),
    "webhook": (
        _serve_webhook,
        "refuse unusable networks, and warn about pods, when they are applied",
        _CLIENT_KEYS | {"metricsPort"},
    ),
    "kubeconfig-generator": (
        _generate_kubeconfig,
        "keep a kubeconfig with the node's own client certificate for other programs, until a signal",
        _NO_KEYS,
    ),
    "install": (_install, "copy the shim into the node's plugin directory", _NO_KEYS),
    "uninstall": (_uninstall, "remove everything of ours from the node, once its daemon has stopped", _NODE_KEYS),
    "version": (_version, "print the version", _NO_KEYS),
}
"""By command: its function, which returns the exit status or raises SettingsError; its help; settings with flags."""
COMMANDS = tuple(_COMMANDS)

_FILE: Final[dict[str, Any]] = {"metavar": "FILE", "type": Path}
_DIR: Final[dict[str, Any]] = {"metavar": "DIR", "type": Path}
_BIN_DIR = _DIR | {"dest": "bin_dir", "default": HOST_BIN_DIR, "help": "the node's plugin directory (%(default)s)"}
_ADDRESS = {"default": "", "help": "address that the port binds to (default: all of them)"}
_STANDALONE = "take pods and NetworkAttachmentDefinitions from the manifests in DIR: no cluster is needed"
_THICK = "as upstream's install_multus: passthru too; a thin plugin does not exist, and one on the node is replaced"
_THIN = "in the place of a thin plugin that was removed, too; in the place of one that is there without this"
_CONFIG = f"configuration, JSON (default: {settings.DEFAULT_CONFIG_PATH})"


def _text(default: str, text: str) -> dict[str, Any]:
    return {"metavar": "TEXT", "default": default, "help": f"{text} (default: %(default)s)"}


_ARGUMENTS: Final[Sequence[tuple[str, str, dict[str, Any]]]] = (
    ("run", "--standalone", _DIR | {"help": _STANDALONE}),
    ("webhook", "--cert", _FILE | {"required": True, "help": "the server's certificate, PEM; reloaded"}),
    ("webhook", "--key", _FILE | {"required": True, "help": "its key, PEM; reloaded"}),
    ("webhook", "--port", {"type": _port, "default": WEBHOOK_PORT, "help": "TCP port (default: %(default)s)"}),
    ("webhook", "--address", _ADDRESS),
    # The defaults are upstream's.
    ("kubeconfig-generator", "--certdir", _text("/tmp", "directory of the certificate; must exist")),  # noqa: S108
    ("kubeconfig-generator", "--bootstrap-config", _text("/tmp/kubeconfig", "kubeconfig to ask with")),  # noqa: S108
    ("kubeconfig-generator", "--kubeconfig", _text("/run/multus/kubeconfig", "the file to write")),
    ("kubeconfig-generator", "--cert-duration", _text("10m", "validity, as Go writes durations")),
    ("install", "--shim", _FILE | {"help": "the shim (default: the one installed with this)"}),
    ("install", "-t --type", {"choices": ("thick",), "help": _THICK}),
    ("install", "--bin-dir -d --dest-dir", _BIN_DIR),
    ("install", "--thin", {"action": "store_true", "help": _THIN}),
    ("uninstall", "--bin-dir", _BIN_DIR),
    ("uninstall", "--force", {"action": "store_true", "help": "even if pods have additional networks"}),
    ("uninstall", "--purge", {"action": "store_true", "help": "also remove cniDir with upstream's files"}),
    ("run check-config cert-approver webhook uninstall", "--config", _FILE | {"help": _CONFIG}),
)
"""For each argument: the commands that have it, its name, and the options for `add_argument`."""


if __name__ == "__main__":
    main()
