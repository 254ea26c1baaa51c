"""docs/track-record.md: the incidents, and what was seen of each side when the page was made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.e2e.upstream import NEW, OLD
from tests.record.incident import Incident
from tests.record.run import Result

PAGE: Final = Path(__file__).parents[2] / "docs" / "track-record.md"
INTRODUCTION: Final = f"""\
# Track record

Incidents from public reports, each run on upstream's real program and on ours: same machine, same input.

```
make record            # as root; builds upstream's programs first (Go 1.26.8 or newer, minutes)
make record T=NAME     # one incident
```

The exit status is 1 if an incident is not as this page says, also if upstream no longer fails.
`python -m tests.record --page` writes what it has seen into the table. Upstream is {OLD}, the newest release that the
Go module proxy has. For {NEW} build its daemon and shim, set `UPSTREAM_NEW_DAEMON` and `UPSTREAM_NEW_SHIM` to them, and
run `python -m tests.record --release {NEW}`. Seconds and processor time vary.
"""
HEADER: Final = f"| incident | {OLD} fails | {NEW} fails | upstream {OLD} | here |\n| --- | --- | --- | --- | --- |"
SKIPPED: Final = "not run here"


def page(rows: Iterable[Incident], results: Sequence[Result], before: str) -> str:
    """The whole page; what was not run now is as in the page `before`."""
    seen = {cells[0]: cells[3:] for cells in written(before)}
    seen |= {claimed(each.row)[0]: [one.text for one in each.seen.values()] for each in results if not each.skipped}
    return "\n".join([INTRODUCTION, HEADER, *(_line(row, seen) for row in rows)]) + "\n"


def _line(row: Incident, seen: Mapping[str, Sequence[str]]) -> str:
    cells = claimed(row)
    return "| " + " | ".join([*cells, *seen.get(cells[0], [SKIPPED, SKIPPED])]) + " |"


def claimed(row: Incident) -> list[str]:
    """The cells that the rows decide, whatever was seen."""
    incident = f"[{row.title}]({row.report}) `{row.name}`"
    return [incident, *("yes" if row.upstream_fails(release) else "no" for release in (OLD, NEW))]


def written(text: str) -> list[list[str]]:
    """The page's rows, as lists of cells."""
    lines = text.rpartition("| --- |\n")[2].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
