"""`multus-daemon`: run the daemon, check a configuration, tell the version."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from multus_daemon import __version__, settings
from multus_daemon.settings import Settings, SettingsError

COMMANDS = ("run", "check-config", "cert-approver", "version")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exit status: 0 done or stopped by a signal, 1 bad configuration, 2 usage, 3 can't start."""
    arguments = _parser().parse_args(_upstream_spelling(list(sys.argv[1:] if argv is None else argv)))
    if arguments.command == "version":
        print(f"multus-daemon: version {__version__}")
        return
    try:
        optional = arguments.command == "cert-approver" or getattr(arguments, "standalone", None) is not None
        found = _settings(arguments.config, optional=optional)
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
    if arguments.kubeconfig:
        found = replace(found, kubernetes=replace(found.kubernetes, kubeconfig=arguments.kubeconfig))
    sys.exit(_run(found, arguments))


def _upstream_spelling(argv: list[str]) -> list[str]:
    """Upstream's daemon has no commands, and Go's single dash: `multus-daemon -config FILE`."""
    argv = [f"-{word}" if word.split("=")[0] in ("-config", "-version") else word for word in argv]
    if argv and argv[0] == "--version":
        return ["version"]
    return argv if argv and (argv[0] in COMMANDS or argv[0] in ("-h", "--help")) else ["run", *argv]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="multus-daemon", description="Sets up every network of a pod.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run the daemon in the foreground")
    run.add_argument(
        "--standalone",
        metavar="DIR",
        type=Path,
        help="take pods and NetworkAttachmentDefinitions from the manifests in DIR: no cluster is needed",
    )
    approver = commands.add_parser("cert-approver", help="approve the nodes' requests for certificates of their own")
    for command in (run, approver):
        command.add_argument(
            "--kubeconfig",
            metavar="FILE",
            help="how to reach the API server (default: the key kubeconfig, else the pod's)",
        )
    check = commands.add_parser("check-config", help="check a configuration and print the settings in force")
    for command in (run, approver, check):
        command.add_argument(
            "--config",
            metavar="FILE",
            type=Path,
            help=f"configuration, JSON (default: {settings.DEFAULT_CONFIG_PATH})",
        )
    commands.add_parser("version", help="print the version")
    return parser


def _settings(path: Path | None, *, optional: bool) -> Settings:
    """The settings in `path`, or in the usual place; `optional`: where nothing is there, the defaults."""
    default = Path(settings.DEFAULT_CONFIG_PATH)
    if path is None and optional and not default.exists():
        return Settings()
    return settings.load(path or default)


def _run(found: Settings, arguments: argparse.Namespace) -> int:
    # Imported here: `version` and `check-config` need neither aiohttp nor pyroute2.
    from multus_daemon import daemon

    try:
        if arguments.command == "cert-approver":
            daemon.approve_certificates(found)
        else:
            daemon.run(found, standalone=arguments.standalone)
    except daemon.StartError as error:
        print(f"multus-daemon: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    main()
