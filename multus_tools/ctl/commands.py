"""The command line of `multusctl`: a table of its commands and their options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from multus_tools import command_line
from multus_tools.command_line import ALL, BUNDLE_FILE, DONE, FAILED, JSON, LIST, NAMESPACE, ONE, Command, option
from multus_tools.ctl import actions
from multus_tools.ctl.actions import FORGET

_FORGET_MEANING: Final = "forget a container that can't be deleted; asks; refuses while its network namespace exists"
_ALL_PODS: Final = "default: all pods"
_PODS: Final = "explain this pod; may be repeated (default: pods with failed requests or leftovers)"
_FILES: Final = (
    "NetworkAttachmentDefinitions, pods, workloads, ConfigMaps, CNI configurations, the daemon's; as YAML or JSON; a "
    "directory: all such files below it; -: standard input"
)
_BIN_DIR: Final = "directory of plugin binaries; a plugin neither there nor built in is an error; may be repeated"
_FORMATS: Final = ("text", "json", "github")
_IN_RUN: Final = "where {0} (default: /run/{1}; with a user's own runtime directory $XDG_RUNTIME_DIR/{1})"


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. docs/multusctl.md lists the exit statuses."""
    try:
        command_line.finish(parser(), argv)
    except Exception as error:
        # `--help` does not load the errors.
        from multus_daemon.spec.cni.errors import CniError

        if not isinstance(error, CniError):
            raise
        from multus_tools.ctl import show

        show.cni_error(error)
        sys.exit(FAILED)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    return command_line.parser("multusctl", "Asks the multus daemon of this node.", COMMANDS, ())


def shell_completion(arguments: argparse.Namespace) -> int:
    """Print the completion script for your shell."""
    from argcomplete.shell_integration import shellcode

    sys.stdout.write(shellcode(["multusctl"], shell=arguments.shell))
    return DONE


_CONFIG: Final = (JSON, option("--config", metavar="FILE", type=Path, help="the daemon's configuration"))
_LOCAL: Final = (*ONE, *_CONFIG)
_SOCKET: Final = option("--socket-dir", metavar="DIR", type=Path, help="directory of the daemon's multus.sock")
_NODE: Final = (*_LOCAL, _SOCKET)
_LISTED: Final = (*LIST, *_CONFIG, _SOCKET, NAMESPACE, ALL)
_POD: Final = option("pod", metavar="[NAMESPACE/]POD", type=actions.pod_name)
_ANY_POD: Final = option("pod", metavar="[NAMESPACE/]POD", type=actions.pod_name, nargs="?", help=_ALL_PODS)
_SANDBOX: Final = (
    actions.sandbox,
    (
        *(*_LOCAL, NAMESPACE, _POD),
        option("--standalone", metavar="DIR", type=Path, help="the daemon's directory of manifests"),
        option("--state-dir", metavar="DIR", type=Path, help=_IN_RUN.format("sandboxes are remembered", "multusctl")),
        option("--netns-dir", metavar="DIR", type=Path, help=_IN_RUN.format("network namespaces are kept", "netns")),
        option("--shim", metavar="PATH", type=Path, help="the shim (default: the installed one)"),
        option("--ifname", default="eth0", help="interface of the cluster network (default: %(default)s); for `up`"),
    ),
)

COMMANDS: Final = (
    Command("Show how the daemon of this node is; exit status 1 if it is not ready.", actions.status, _NODE),
    Command(
        "Show what is attached to the pods of this node.",
        actions.attachments,
        (
            *_LISTED,
            option("pod", metavar="[NAMESPACE/]POD", type=actions.pod_name, nargs="?", help=_ALL_PODS, words=(FORGET,)),
            option("container", metavar=f"or {FORGET} CONTAINER", nargs="?", help=_FORGET_MEANING),
            option("--check", action="store_true", help="run CHECK too; exit status 1 if it fails"),
            option("--leaks", action="store_true", help="only attachments that nothing will delete, and why"),
            option("--yes", action="store_true", help=f"{FORGET} without asking"),
        ),
    ),
    Command(
        "Show how the pods' attachments differ from their records; exit status 1 if anything differs.",
        actions.drift,
        (*_LISTED, _ANY_POD),
    ),
    Command(
        "Repair the attachments of a pod; exit status 1 if anything still differs.",
        actions.repair,
        (*_NODE, NAMESPACE, _POD, option("--dry-run", action="store_true", help="only say what would be done")),
    ),
    Command(
        "Show what would be attached to a pod, and why; touches nothing; exit status 1 if an ADD would fail.",
        actions.explain,
        (*_NODE, NAMESPACE),
        one_of=(
            option("pod", metavar="[NAMESPACE/]POD", type=actions.pod_name, nargs="?"),
            option("--file", metavar="FILE", type=Path, help="a manifest with the pod, which need not be applied"),
        ),
    ),
    Command(
        "Show what the daemon did for a pod, with the time of each step.",
        actions.trace,
        (
            *(*_NODE, NAMESPACE, ALL, _ANY_POD),
            option("--last", metavar="N", type=int, default=20, help="number of requests (default: %(default)s)"),
        ),
    ),
    Command("Show the plugins of this node and what serves each of them.", actions.plugins, (*LIST, *_CONFIG)),
    Command(
        "Find problems in manifests and configurations; exit status 1 if there is an error.",
        actions.validate,
        (
            *_LOCAL,
            option("files", metavar="FILE", nargs="+", help=_FILES),
            option("--strict", action="store_true", help="exit status 1 for a warning, too"),
            option("--format", choices=_FORMATS, default="text", help="github: annotations of a workflow's log"),
            option("--bin-dir", metavar="DIR", action="append", default=[], help=_BIN_DIR),
        ),
    ),
    Command(
        "Find what is wrong with this node; exit status 1 if there is an error.",
        actions.doctor,
        (*_NODE, option("--fix", action="store_true", help="repair what is safe to repair, and say what was done")),
    ),
    Command(
        "Write an archive for a bug report, without secrets; exit status 1 if something is missing in it.",
        actions.bundle,
        (
            *(*BUNDLE_FILE, _CONFIG[1], _SOCKET),
            option("--pod", metavar="[NAMESPACE/]POD", type=actions.pod_name, action="append", default=[], help=_PODS),
        ),
    ),
    Command(
        "Play the container runtime for a daemon.",
        actions.sandbox,
        commands=(
            Command("Make a network namespace for the pod and attach its networks (ADD).", *_SANDBOX, called="up"),
            Command("Check the pod's networks (CHECK).", *_SANDBOX, called="check"),
            Command(
                "Detach the pod's networks (DEL), remove the namespace; can be repeated.", *_SANDBOX, called="down"
            ),
        ),
    ),
    Command(
        "Print the completion script for your shell.",
        shell_completion,
        (option("shell", choices=("bash", "zsh", "fish")),),
        called="completion",
    ),
)
"""The commands in the order of `--help`."""
