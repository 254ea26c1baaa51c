"""`multusctl sandbox`: play the container runtime for a daemon."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from multus_daemon.runtime import user
from multus_daemon.tools.ctl.commands import common


def add_to(groups: common.Groups) -> None:
    """Declare it."""
    run_directory = user.runtime_directory() or Path("/run")
    sandbox = groups.add_parser("sandbox", help="play the container runtime for a daemon")
    verbs = sandbox.add_subparsers(dest="verb", required=True)
    for verb, meaning in (
        ("up", "make a network namespace for the pod and have its networks attached (ADD)"),
        ("check", "have the pod's networks checked (CHECK)"),
        ("down", "have the pod's networks detached (DEL) and remove the namespace; can be repeated"),
    ):
        command = common.command(verbs, verb, meaning, run, daemon=False)
        command.add_argument("pod", metavar="NAMESPACE/POD", type=common.pod)
        command.add_argument("--standalone", metavar="DIR", type=Path, help="the daemon's directory of manifests")
        command.add_argument(
            "--state-dir",
            metavar="DIR",
            type=Path,
            default=run_directory / "multusctl",
            help="where sandboxes are remembered (default: %(default)s)",
        )
        command.add_argument(
            "--netns-dir",
            metavar="DIR",
            type=Path,
            default=run_directory / "netns",
            help="where network namespaces are kept (default: %(default)s; `ip netns` has them in /run/netns)",
        )
        command.add_argument("--shim", metavar="PATH", type=Path, help="the shim (default: the installed one)")
        command.add_argument(
            "--ifname", default="eth0", help="interface of the cluster network (default: %(default)s); for `up`"
        )


def run(arguments: argparse.Namespace) -> int:
    """Raises CniError, CommandError, SettingsError."""
    from multus_daemon.tools.ctl.sandbox import Places, SandboxError, Sandboxes

    options = {"--config": arguments.config, "--standalone": arguments.standalone or Path("DIR")}
    words = [str(word) for option in options.items() if option[1] for word in option]
    places = Places(
        state=arguments.state_dir,
        netns=arguments.netns_dir,
        shim=arguments.shim,
        standalone=arguments.standalone and arguments.standalone.absolute(),
        start=shlex.join(["multus-daemon", "run", *words]),
    )
    sandboxes = Sandboxes(common.settings_of(arguments), places)
    namespace, _, name = arguments.pod.partition("/")
    try:
        if arguments.verb == "up":
            outcome = sandboxes.up(namespace, name, arguments.ifname)
        elif arguments.verb == "check":
            outcome = sandboxes.check(namespace, name)
        else:
            outcome = sandboxes.down(namespace, name)
    except SandboxError as error:
        raise common.CommandError(str(error)) from error
    if arguments.json:
        common.print_json(outcome.to_object())
    else:
        from multus_daemon.tools.ctl import show

        show.outcome(arguments.verb, arguments.pod, outcome)
    return common.DONE
