"""Incidents from public reports, on upstream's real program and on ours, side by side.

    python -m tests.record [NAME...]     # or all
    python -m tests.record --page        # and write what was seen into docs/track-record.md

As root; `make record` builds the programs. The exit status is 1 if one is not as the page says.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from rich.table import Table

from multus_tools.tables import console, is_seen
from multus_tools.terminal import literal, progress, say
from tests.e2e import rights
from tests.e2e.apiserver import ApiServer
from tests.e2e.build_tools import ToolError
from tests.e2e.certificates import OpensslError
from tests.e2e.upstream import NEW, OLD
from tests.record.page import PAGE, page
from tests.record.rows import ROWS
from tests.record.run import Result, run


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.record", description="See docs/track-record.md.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--release", choices=(OLD, NEW), default=OLD, help=f"upstream's; {NEW} by UPSTREAM_NEW_*")
    parser.add_argument("--page", action="store_true", help="write what is seen into docs/track-record.md")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.names if name not in ROWS]:
        parser.error(f"no such incident: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    if given.page and given.release != OLD:
        parser.error(f"--page is of {OLD}")
    rows = [ROWS[name] for name in given.names] or list(ROWS.values())
    results = []
    with contextlib.ExitStack() as stack:
        try:
            if os.geteuid() != 0:
                raise ToolError(
                    "it needs root, and loopback: as another user `unshare -Urnm`, then `ip link set lo up`"
                )
            rights.seccomp_filter(rights.SHIPPED.capabilities)
            server = stack.enter_context(ApiServer())
        except (ToolError, OpensslError, rights.RightsError) as error:
            sys.exit(str(error))
        for number, row in enumerate(rows):
            progress(f"{number + 1} of {len(rows)}: {row.name}, on both sides")
            results.append(run(row, server, number, given.release))
            progress("")
            show(results[-1])
    return conclude(results, writes=given.page)


def show(result: Result) -> None:
    """Print an incident, both sides beside each other in a terminal."""
    colour = "red" if result.faults else "yellow" if result.skipped else "green"
    verdict = f"[{colour}]{literal(result.verdict)}[/{colour}] ({result.seconds:.0f} s)"
    say(f"[bold]{result.row.name}[/bold]  {literal(result.row.title)}", f"  {result.row.report}")
    if is_seen() and result.seen:
        table = Table(*map(literal, result.seen), expand=True)
        table.add_row(*(literal(one.text) for one in result.seen.values()))
        console().print(table)
    else:
        say(*(f"  {title}: {literal(one.text)}" for title, one in result.seen.items()))
    say(f"  {verdict}", "")
    sys.stdout.flush()


def conclude(results: Sequence[Result], *, writes: bool) -> int:
    """Print the sum, write the page if that is wanted, and return the exit status."""
    wrong = [result for result in results if result.faults]
    skipped = [result for result in results if result.skipped]
    seconds = sum(result.seconds for result in results)
    good = len(results) - len(wrong) - len(skipped)
    say(f"{good} as the page says, {len(skipped)} skipped, {len(wrong)} not as the page says; {seconds:.0f} s")
    if writes and not wrong:
        PAGE.write_text(page(ROWS.values(), results, PAGE.read_text()))
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
