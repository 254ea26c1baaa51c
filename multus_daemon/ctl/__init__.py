"""`multusctl`: what a person asks a node's daemon; for now, to play the container runtime for it (`sandbox`)."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from multus_daemon import settings
from multus_daemon.base import user
from multus_daemon.cni.errors import CniError
from multus_daemon.ctl.sandbox import Outcome, Places, SandboxError, Sandboxes
from multus_daemon.settings import Settings, SettingsError


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exit status: 0 done, 1 it failed (the reason is on standard error), 2 usage."""
    arguments = _parser().parse_args(argv)
    try:
        outcome = _run(arguments)
    except CniError as error:
        # Here and below, not at the top: rich takes as long to load as all the rest, and JSON does without.
        from multus_daemon.ctl import show

        show.cni_error(error)
        sys.exit(1)
    except (SandboxError, SettingsError) as error:
        sys.stderr.write(f"multusctl: {error}\n")
        sys.exit(1)
    if arguments.json:
        sys.stdout.write(json.dumps(outcome.to_object(), indent=4) + "\n")
    else:
        from multus_daemon.ctl import show

        show.outcome(arguments.verb, arguments.pod, outcome)


def _run(arguments: argparse.Namespace) -> Outcome:
    found = settings.load(arguments.config) if arguments.config else Settings()
    found = settings.in_directory(found, user.runtime_directory())
    options = {"--config": arguments.config, "--standalone": arguments.standalone or Path("DIR")}
    start = shlex.join(
        ["multus-daemon", "run", *(str(word) for option in options.items() if option[1] for word in option)]
    )
    places = Places(
        state=arguments.state_dir,
        netns=arguments.netns_dir,
        shim=arguments.shim,
        standalone=arguments.standalone and arguments.standalone.absolute(),
        start=start,
    )
    sandboxes = Sandboxes(found, places)
    namespace, _, name = arguments.pod.partition("/")
    if arguments.verb == "up":
        return sandboxes.up(namespace, name, arguments.ifname)
    if arguments.verb == "check":
        return sandboxes.check(namespace, name)
    return sandboxes.down(namespace, name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="multusctl", description="Talks to the multus daemon of this node.")
    run = user.runtime_directory() or Path("/run")
    groups = parser.add_subparsers(dest="group", required=True)
    sandbox = groups.add_parser("sandbox", help="play the container runtime for a daemon")
    verbs = sandbox.add_subparsers(dest="verb", required=True)
    for verb, meaning in (
        ("up", "make a network namespace for the pod and have its networks attached (ADD)"),
        ("check", "have the pod's networks checked (CHECK)"),
        ("down", "have the pod's networks detached (DEL) and remove the namespace; can be repeated"),
    ):
        command = verbs.add_parser(verb, help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}.")
        command.add_argument("pod", metavar="NAMESPACE/POD", type=_pod)
        command.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
        command.add_argument("--config", metavar="FILE", type=Path, help="the daemon's configuration")
        command.add_argument("--standalone", metavar="DIR", type=Path, help="the daemon's directory of manifests")
        command.add_argument(
            "--state-dir",
            metavar="DIR",
            type=Path,
            default=run / "multusctl",
            help="where sandboxes are remembered (default: %(default)s)",
        )
        command.add_argument(
            "--netns-dir",
            metavar="DIR",
            type=Path,
            default=run / "netns",
            help="where network namespaces are kept (default: %(default)s; `ip netns` has them in /run/netns)",
        )
        command.add_argument("--shim", metavar="PATH", type=Path, help="the shim (default: the installed one)")
        command.add_argument(
            "--ifname", default="eth0", help="interface of the cluster network (default: %(default)s); for `up`"
        )
    return parser


def _pod(text: str) -> str:
    if text.count("/") > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAMESPACE/POD")
    return text if "/" in text else f"default/{text}"
