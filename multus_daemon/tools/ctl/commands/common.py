"""What commands share: flags, the way to the daemon, JSON on standard output, exit statuses."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from multus_daemon import settings
from multus_daemon.runtime import user
from multus_daemon.settings import Settings

if TYPE_CHECKING:
    from multus_daemon.tools.ctl.client import Client

Groups = Any
"""What `argparse.ArgumentParser.add_subparsers` gives; its class is private."""

DONE: Final = 0
FAILED: Final = 1
"""It could not be done, or what was looked at is not as it should be; the reason is on standard error."""
NO_DAEMON: Final = 3
"""No daemon answers."""

_MOUNTED: Final = Path("/host")
"""Where the manifests mount the host's directories in the daemon's pod."""


class CommandError(Exception):
    """The command can't be done; the message says why and what to do."""


def command(
    groups: Groups, name: str, meaning: str, run: Callable[[argparse.Namespace], int], *, daemon: bool = True
) -> argparse.ArgumentParser:
    """A command with the flags of all; `daemon`: and those that say where the daemon is."""
    parser: argparse.ArgumentParser = groups.add_parser(
        name, help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--config", metavar="FILE", type=Path, help="the daemon's configuration")
    if daemon:
        parser.add_argument("--socket-dir", metavar="DIR", type=Path, help="where the daemon's multus.sock is")
    parser.set_defaults(run=run)
    return parser


def pod(text: str) -> str:
    """`namespace/name` of an argument; a name alone is one of namespace `default`. Raises ArgumentTypeError."""
    if text.count("/") > 1 or not all(text.split("/")):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAMESPACE/POD")
    return text if "/" in text else f"default/{text}"


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Those of `--config`; else of the usual place, where there is one; else the defaults. Raises SettingsError."""
    usual = Path(settings.DEFAULT_CONFIG_PATH)
    path = arguments.config or (usual if usual.exists() else None)
    return settings.in_directory(settings.load(path) if path else Settings(), user.runtime_directory())


def client(arguments: argparse.Namespace) -> Client:
    """The daemon that the flags, or the configuration, lead to. Raises SettingsError."""
    from multus_daemon.tools.ctl.client import Client

    if arguments.socket_dir:
        return Client(arguments.socket_dir / "multus.sock")
    path = Path(settings_of(arguments).socket.directory) / "multus.sock"
    mounted = _MOUNTED / path.relative_to("/") if path.is_absolute() else path
    return Client(mounted if mounted.exists() and not path.exists() else path)


def cni_dir(arguments: argparse.Namespace) -> Path:
    """Where the daemon keeps its records. Raises SettingsError."""
    return Path(settings_of(arguments).paths.cni_dir)


def print_json(found: Mapping[str, Any]) -> None:
    """On standard output."""
    sys.stdout.write(json.dumps(found, indent=4) + "\n")
