"""`kubectl multus validate`: what is wrong in the networks and annotations of the cluster."""

from __future__ import annotations

import argparse
import functools

from multus_daemon.tools.kubectl.commands import common


def add_to(groups: common.Groups) -> None:
    """Declare it."""
    meaning = "look for what is wrong in networks and pods' annotations; exit status 1 where there is an error"
    parser = common.command(groups, "validate", meaning, run)
    parser.add_argument("--strict", action="store_true", help="exit status 1 for a warning, too")


def run(arguments: argparse.Namespace) -> int:
    """Raises CommandError."""
    from multus_daemon.tools.kubectl import show, validate

    found = common.ask(arguments, functools.partial(validate.look, namespace=arguments.namespace), show.validate)
    return common.FAILED if found["errors"] or (arguments.strict and found["findings"]) else common.DONE
