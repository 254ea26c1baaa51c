"""`multusctl attachments`: what is attached to the pods of this node."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any, Final

from multus_daemon import deadlines
from multus_daemon.tools.ctl.client import NoDaemonError
from multus_daemon.tools.ctl.commands import common

FORGET: Final = "forget"
FORGET_MEANING: Final = "forget a container that can't be deleted; asks; refuses while its network namespace exists"


def add_to(groups: common.Groups) -> None:
    """Declare it."""
    parser = common.command(groups, "attachments", "show what is attached to the pods of this node", run)
    parser.add_argument("pod", metavar="NAMESPACE/POD", nargs="?", help="default: all pods")
    parser.add_argument("container", metavar=f"or {FORGET} CONTAINER", nargs="?", help=FORGET_MEANING)
    parser.add_argument("--check", action="store_true", help="run CHECK too; exit status 1 where it fails")
    parser.add_argument("--leaks", action="store_true", help="only what nobody will delete, and why")
    parser.add_argument("--yes", action="store_true", help=f"{FORGET} without asking")
    parser.set_defaults(words={FORGET: FORGET_MEANING})


def run(arguments: argparse.Namespace) -> int:
    """Raises CniError, NoDaemonError, CommandError, SettingsError."""
    if arguments.pod == FORGET:
        return _forget(arguments)
    if arguments.container:
        raise common.CommandError(f"{arguments.container!r} is one word too many; see multusctl attachments --help")
    try:
        pod = common.pod(arguments.pod) if arguments.pod else ""
    except argparse.ArgumentTypeError as error:
        raise common.CommandError(str(error)) from error
    query = {
        "pod": pod,
        "check": "true" if arguments.check else "",
        "leaks": "true" if arguments.leaks else "",
    }
    found = ask(arguments, query)
    if arguments.json:
        common.print_json(found)
    else:
        from multus_daemon.tools.ctl import show_attachments

        show_attachments.containers(found, leaks=arguments.leaks)
    return common.FAILED if any(item["check"] for item in found["containers"]) else common.DONE


def _forget(arguments: argparse.Namespace) -> int:
    """Raises CniError, NoDaemonError, CommandError, SettingsError."""
    if not arguments.container:
        raise common.CommandError(f"{FORGET} needs a CONTAINER: multusctl attachments --leaks names them")
    if not arguments.yes:
        _confirm(arguments.container)
    found = common.client(arguments).order("forget", {"container": arguments.container})
    if arguments.json:
        common.print_json(found)
    else:
        from multus_daemon.tools.ctl import show_attachments

        show_attachments.forgotten(found)
    return common.DONE


def _confirm(container: str) -> None:
    """Ask whoever sits at the terminal. Raises CommandError where the answer is no, or nobody can be asked."""
    if not sys.stdin.isatty():
        raise common.CommandError(f"{FORGET} asks on a terminal; elsewhere say --yes")
    sys.stderr.write(f"Nobody will free what container {container} still holds. Forget it? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise common.CommandError("nothing is forgotten")


def ask(arguments: argparse.Namespace, query: Mapping[str, str]) -> dict[str, Any]:
    """The daemon's answer, else what the records on this node say. Raises CniError, CommandError, SettingsError.

    Raises NoDaemonError where only a daemon can do what the query wants: CHECK.
    """
    check = bool(query.get("check"))
    try:
        seconds = deadlines.ADMIN_SECONDS if check else deadlines.CTL_SECONDS
        return common.client(arguments).ask("attachments", query, timeout=seconds)
    except NoDaemonError as error:
        if check:
            raise
        from multus_daemon.tools.ctl import offline

        sys.stderr.write(f"multusctl: {error}; what follows is from the records on this node\n")
        return offline.attachments(common.cni_dir(arguments), pod=query.get("pod", ""), leaks=bool(query.get("leaks")))
