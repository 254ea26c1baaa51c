"""Make the tables of the documentation from the recorded figures in bench/figures/.

    python -m bench.page            # after `python -m bench --record`

A table stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`; what is between them is replaced, in each
of PAGES. Nothing is measured here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from bench import aims, figures
from bench.__main__ import RECORDED
from bench.density import PERCENTS, RATES
from bench.figures import ROOT, Recording
from bench.stats import Figure

PAGES: Final = ("docs/performance.md", "README.md", "docs/scaling.md")
SIZES: Final = (0, 4, 16)
"""Networks beside the cluster network."""
SIDES: Final = ("ours", "binaries", "bare", "peer")
AT_ONCE: Final = (1, 16)
"""Pods at a time."""
NONE: Final = "not recorded"

Recordings = Mapping[str, Recording]
Row = Sequence[str]

_DENSITY: Final = {
    "all ready": "all Ready, at 1 and at 10 a second",
    "all gone": "all gone",
    "sandbox": "sandbox with its networks",
    "processor start": "processor time of the daemon, start of a pod",
    "processor delete": "processor time of the daemon, deletion",
    "most": "anonymous memory of the daemon, most",
}

_BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def main() -> None:
    """Write all of it."""
    found = recordings()
    for page in PAGES:
        path = ROOT / page
        path.write_text(filled(path.read_text(), found))


def recordings() -> dict[str, Recording]:
    """Load the recordings, by bench."""
    return {name: recording for name in RECORDED if (recording := figures.load(name)) is not None}


def used(recording: Recording) -> dict[str, Figure]:
    """Return the figures of a recording that a table or an aim reads; the others are not kept."""
    read: set[str] = set(aims.AIMS.get(recording.bench, ()))

    class Watched(dict[str, Figure]):
        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return super().get(key, default)

    found = {recording.bench: dataclasses.replace(recording, figures=Watched(recording.figures))}
    for make in TABLES.values():
        make(found)
    return {key: figure for key, figure in recording.figures.items() if key in read}


def filled(text: str, found: Recordings) -> str:
    """A page with its tables. Raises KeyError for a table that does not exist."""
    return _BLOCK.sub(lambda block: f"{block[1]}{TABLES[block[2]](found)}{block[3]}", text)


# --- tables ----------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three digits, as a person reads them."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def shown(figure: Figure | None, *, interval: bool = False) -> str:
    """A cell."""
    if figure is None:
        return "–"
    bounds = f" ({number(figure.low)} to {number(figure.high)})" if interval and figure.low != figure.high else ""
    return f"{number(figure.value)} {figure.unit}{bounds}"


def table(head: Row, rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _get(found: Recordings, bench: str, key: str) -> Figure | None:
    return found[bench].figures.get(key) if bench in found else None


def _sides(found: Recordings, bench: str, keys: Sequence[str]) -> list[str]:
    return [side for side in SIDES if any(_get(found, bench, f"{key} {side}") for key in keys)]


def aims_table(found: Recordings) -> str:
    """Every figure that has an aim."""
    rows = []
    for bench, judged in aims.AIMS.items():
        for key, aim in judged.items():
            figure = _get(found, bench, key)
            if figure is None:
                rows.append([aim.text, NONE, number(aim.limit)])
                continue
            limit = shown(Figure.exact(aim.limit, figure.unit)) + ("" if figure.value <= aim.limit else ", **over**")
            rows.append([aim.text, shown(figure, interval=True), limit])
    return table(("what", "median (95 % interval)", "at most"), rows)


def runs_table(found: Recordings) -> str:
    """List time and commit of each bench."""
    rows = [[f"`{name}`", run.date, run.commit] for name, run in found.items()]
    return table(("bench", "date", "commit"), rows)


def _by_verb(bench: str, verbs: Sequence[str]) -> Callable[[Recordings], str]:
    def make(found: Recordings) -> str:
        names = _sides(found, bench, [f"{verb} {size}" for verb in verbs for size in SIZES])
        rows = [[verb, *(_sizes(found, bench, f"{verb} {{}} {name}") for name in names)] for verb in verbs]
        return table(("", *names), rows)

    return make


def _sizes(found: Recordings, bench: str, key: str) -> str:
    """One cell: a value for each of SIZES."""
    values = [_get(found, bench, key.format(size)) for size in SIZES]
    unit = next((figure.unit for figure in values if figure), "")
    return f"{', '.join(number(figure.value) if figure else '–' for figure in values)} {unit}".strip()


def burst_table(found: Recordings) -> str:
    """Pods a second, and how long an ADD takes meanwhile."""
    names = _sides(found, "burst", [f"pods {size} networks {count} at a time" for size in SIZES for count in AT_ONCE])
    rows = [
        [
            f"{count} at a time: {text}",
            *(_sizes(found, "burst", f"{key} {{}} networks {count} at a time {name}") for name in names),
        ]
        for count in AT_ONCE
        for key, text in (("pods", "pods a second"), ("ADD", "ADD, median"), ("ADD p99", "ADD, p99"))
    ]
    return table(("", *names), rows)


def memory_table(found: Recordings) -> str:
    """Anonymous memory."""
    names = _sides(found, "memory", ["idle"])
    texts = {"idle": "idle", "burst": "most in a burst of 64 pods with 4 networks", "after pods": "after many pods"}
    rows = []
    for what, text in texts.items():
        cells = [(name, _get(found, "memory", f"{what} {name}")) for name in names]
        counts = [f"{figure.n:,} {name}" for name, figure in cells if figure] if what == "after pods" else []
        label = f"{text} ({', '.join(counts)})" if counts else text
        rows.append([label, *(shown(figure) for _, figure in cells)])
    return table(("anonymous memory", *names), rows)


def shim_table(found: Recordings) -> str:
    """The shim alone."""
    names = ("ours", "peer", "true")
    rows = [
        [text, *(shown(_get(found, "shim", f"{name} {what}")) for name in names)]
        for what, text in (
            ("time", "time of a DEL that is answered at once"),
            ("processor", "processor time"),
            ("file", "size of the file"),
            ("anonymous", "anonymous memory while it waits"),
            ("resident", "resident memory while it waits"),
        )
    ]
    return table(("", *names), rows)


def density_table(found: Recordings) -> str:
    """List how long pods take to start on a node, and what the daemon takes meanwhile."""

    def row(text: str, *keys: str) -> list[str]:
        cells = [text]
        for side in ("none", "ours", "peer"):
            values = [figure for key in keys if (figure := _get(found, "density", f"{key} {side}"))]
            first = values[0] if values else None
            several = f"{', '.join(number(one.value) for one in values)} {first.unit if first else ''}"
            cells.append(several if len(values) > 1 else shown(first))
        return cells

    rows = [
        row(
            f"{text}, {rate} a second: created to Ready, p50, p95, p99",
            *(f"{kind} p{percent} at {rate}" for percent in PERCENTS),
        )
        for rate in RATES
        for kind, text in (("servers", "web server"), ("clients", "client"))
    ]
    rows += [row(text, *(f"{key} at {rate}" for rate in RATES)) for key, text in _DENSITY.items()]
    rows += [row("without pods: anonymous memory", "idle"), row("without pods: processor time", "quiet")]
    return table(("", "no Multus", "ours", "upstream"), rows)


_CHAINS: Final = {
    "kind": "kind: `[ptp, portmap]`",
    "port": "the same, with a host port",
    "full": "`[ptp, portmap, bandwidth]`",
    "k3s": "k3s: `[flannel, portmap, bandwidth]`",
    "calico": "`[a foreign binary, bandwidth, portmap]`",
}


def chains_table(found: Recordings) -> str:
    """List the lists of plugins that clusters have."""
    names = _sides(found, "chains", [f"ADD {chain}" for chain in _CHAINS])
    rows = [
        [f"{verb}, {text}", *(shown(_get(found, "chains", f"{verb} {chain} {name}")) for name in names)]
        for chain, text in _CHAINS.items()
        for verb in ("ADD", "DEL")
        if _get(found, "chains", f"{verb} {chain} ours")
    ]
    return table(("", *names), rows)


def readme_table(found: Recordings) -> str:
    """Make the README's table: upstream, built-in plugins and, where plugins run, plugin binaries."""
    rows = (
        ("ADD, `[ptp, portmap]` as in kind", "chains", "ADD kind {}"),
        ("DEL, `[ptp, portmap]` as in kind", "chains", "DEL kind {}"),
        ("ADD, the same with a host port", "chains", "ADD port {}"),
        ("ADD, `[ptp]` and 4 more networks", "peer", "ADD 4 {}"),
        ("DEL, `[ptp]` and 4 more networks", "peer", "DEL 4 {}"),
        ("pods a second of `[ptp, portmap, bandwidth]`, 16 at a time", "chains", "pods full networks 16 at a time {}"),
        ("the shim alone", "shim", "{} time"),
        ("processor time of ADD and DEL, shim and plugins included", "peer", "total 0 {}"),
        ("requests to the API server for a pod", "peer", "requests {}"),
        ("anonymous memory, idle", "memory", "idle {}"),
    )
    cells = [
        [text, *(shown(_get(found, bench, key.format(side))) for side in ("peer", "ours", "binaries"))]
        for text, bench, key in rows
    ]
    return table(("with an API server", "upstream", "here, built-in plugins", "here, plugin binaries"), cells)


TABLES: Final[Mapping[str, Callable[[Recordings], str]]] = {
    "aims": aims_table,
    "runs": runs_table,
    "verbs": _by_verb("verbs", ("ADD", "CHECK", "DEL", "total")),
    "peer": _by_verb("peer", ("ADD", "CHECK", "DEL", "total")),
    "burst": burst_table,
    "chains": chains_table,
    "memory": memory_table,
    "density": density_table,
    "shim": shim_table,
    "readme": readme_table,
}


if __name__ == "__main__":
    main()
