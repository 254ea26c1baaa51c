"""`multusctl graph`: pods, networks, and the bridges and masters that they are on."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from multus_daemon.tools.ctl.commands import attachments, common


def add_to(groups: common.Groups) -> None:
    """Declare it."""
    parser = common.command(groups, "graph", "show pods, networks and bridges of this node as a tree", run)
    parser.add_argument("--svg", metavar="FILE", type=Path, help="write a picture, `-` for standard output")


def run(arguments: argparse.Namespace) -> int:
    """Raises CniError, CommandError, SettingsError."""
    from multus_daemon.diagnosis.attachments import graph

    found = graph(attachments.ask(arguments, {}))
    if arguments.json:
        common.print_json(found)
    elif arguments.svg:
        from multus_daemon.tools.ctl import picture

        text = picture.svg(found)
        if str(arguments.svg) == "-":
            sys.stdout.write(text)
        else:
            try:
                arguments.svg.write_text(text)
            except OSError as error:
                raise common.CommandError(f"{arguments.svg} can't be written: {error.strerror}") from error
    else:
        from multus_daemon.tools.ctl import show_graph

        show_graph.tree(found)
    return common.DONE
