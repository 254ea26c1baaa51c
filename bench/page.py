"""Make the tables and plots of the documentation from the recorded figures in bench/figures/.

    python -m bench.page            # after `python -m bench --record`

A table stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`; what is between them is replaced, in each
of PAGES. The plots go to docs/performance/. Nothing is measured here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from bench import aims, figures, plot
from bench.__main__ import RECORDED
from bench.asking import AT_ONCE as ASKING
from bench.asking import COMMANDS, TURNS
from bench.burst import AT_ONCE
from bench.density import PERCENTS, RATES
from bench.figures import ROOT, Recording
from bench.growth import ATTACHMENTS, LEASES, NETWORKS
from bench.plot import Group, Line
from bench.sides import DUAL
from bench.stats import Figure

PAGES: Final = ("docs/performance.md", "README.md", "docs/scaling.md")
PLOTS: Final = "docs/performance"
SIZES: Final = (0, 1, 4, 16)
SIDES: Final = ("ours", "binaries", "bare", "base", "peer")
NONE: Final = "not recorded"

Recordings = Mapping[str, Recording]
Row = Sequence[str]

_DENSITY: Final = {
    "all ready": "all Ready",
    "all gone": "all deleted, until they are gone",
    "sandbox": "sandbox with its networks, mean",
    "processor start": "processor time of the daemon for a pod, start",
    "processor delete": "processor time of the daemon for a pod, deletion",
    "most": "anonymous memory of the daemon, most",
}

_BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def main() -> None:
    """Write all of it."""
    found = recordings()
    for page in PAGES:
        path = ROOT / page
        path.write_text(filled(path.read_text(), found))
    for name, content in plots(found).items():
        path = ROOT / PLOTS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def recordings() -> dict[str, Recording]:
    """Load the recordings, by bench."""
    return {name: recording for name in RECORDED if (recording := figures.load(name)) is not None}


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
                rows.append([aim.text, NONE, number(aim.limit), "–", f"`{bench}`"])
                continue
            state = "within" if figure.value <= aim.limit else "**over**"
            limit = shown(Figure.exact(aim.limit, figure.unit))
            rows.append([aim.text, shown(figure, interval=True), limit, state, f"`{bench}`"])
    return table(("what", "median (95 % interval)", "at most", "", "bench"), rows)


def runs_table(found: Recordings) -> str:
    """List time and machine of each bench."""
    rows = [
        [
            f"`{name}`",
            f"{run.date}, {run.commit}",
            f"{run.load[0]:.1f}, {run.load[1]:.1f}",
            run.machine,
            "; ".join(f"{side}: {version}" for side, version in run.versions.items()) or "–",
        ]
        for name, run in found.items()
    ]
    return table(("bench", "date, commit", "load before, after", "machine", "sides"), rows)


def _by_size(bench: str, verbs: Sequence[str], sizes: Sequence[int | str]) -> Callable[[Recordings], str]:
    def make(found: Recordings) -> str:
        names = _sides(found, bench, [f"{verb} {size}" for verb in verbs for size in sizes])
        rows = [
            [f"{verb}, {_more(size)}", *(shown(_get(found, bench, f"{verb} {size} {name}")) for name in names)]
            for verb in verbs
            for size in sizes
        ]
        return table(("", *names), rows)

    return make


def _more(size: int | str) -> str:
    return "dual-stack" if size == DUAL else "cluster network only" if size == 0 else f"{size} more"


def stages_table(found: Recordings) -> str:
    """Format the stages of a request, from the daemon's own histograms."""
    stages = ("shim and socket", "request in the daemon", "plugins")
    rows = [
        [f"{verb}, {_more(size)}", *(shown(_get(found, "verbs", f"stage {verb} {size} {stage}")) for stage in stages)]
        for verb in ("ADD", "DEL")
        for size in (0, 4)
    ]
    return table(("mean", *stages), rows)


def peer_ratios_table(found: Recordings) -> str:
    """Against the other implementation."""
    whats = ("ADD", "CHECK", "DEL", "processor", "total")
    names = ("ours", "binaries")
    rows = [
        [
            f"{what}, {_more(size)}",
            *(shown(_get(found, "peer", f"{what} {size} {name}/peer"), interval=True) for name in names),
        ]
        for what in whats
        for size in SIZES
    ]
    return table(("x peer", *names), rows)


def requests_table(found: Recordings) -> str:
    """Requests to the API server, and the start."""
    run = found.get("peer")
    keys = [] if run is None else [key for key in run.figures if key.startswith("requests")]
    rows = [[key.removeprefix("requests "), shown(_get(found, "peer", key))] for key in keys]
    rows += [
        [f"exec to serving, {side}", shown(_get(found, "peer", f"start {side}"), interval=True)]
        for side in ("ours", "peer")
    ]
    return table(("", "measured"), rows)


def burst_table(found: Recordings) -> str:
    """Pods a second, and how long an ADD takes meanwhile."""
    cells = [f"{size} networks {count} at a time" for size in SIZES for count in AT_ONCE]
    names = _sides(found, "burst", [f"pods {cell}" for cell in cells])
    rows = []
    for size in SIZES:
        for count in AT_ONCE:
            cell = f"{size} networks {count} at a time"
            row = [f"{_more(size)}, {count} at a time"]
            for name in names:
                pods = _get(found, "burst", f"pods {cell} {name}")
                add = _get(found, "burst", f"ADD {cell} {name}")
                worst = _get(found, "burst", f"ADD p99 {cell} {name}")
                failed = _get(found, "burst", f"failed {cell} {name}")
                text = shown(pods)
                if add and worst:
                    text += f"; {number(add.value)}, {number(worst.value)} ms"
                row.append(text + (f"; {failed.value:.0f} failed" if failed else ""))
            rows.append(row)
    return table(("pods a second; ADD median, p99", *names), rows)


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


def growth_table(found: Recordings) -> str:
    """Each step, and its quotient."""
    rows = []
    for what, counts, prefix in (
        ("leases", LEASES, ""),
        ("leases", LEASES, "bare "),
        ("attachments", ATTACHMENTS, ""),
        ("networks", NETWORKS, ""),
    ):
        for count in counts:
            cells = [shown(_get(found, "growth", f"{what} {verb} {prefix}{count}")) for verb in ("ADD", "DEL")]
            quotient = _get(found, "growth", f"{what} ADD {prefix}{count}/{counts[0]}")
            label = f"{count:,} {what}{', bare' if prefix else ''}"
            rows.append([label, *cells, shown(quotient, interval=True)])
    return table(("", "ADD", "DEL", "ADD, against the smallest"), rows)


def asking_table(found: Recordings) -> str:
    """ADD beside questions, and without."""
    rows = []
    for count in ASKING:
        where = f"ADD {count} at a time"
        pairs = [
            (_get(found, "asking", f"{where} {turn}"), _get(found, "asking", f"{where} p99 {turn}")) for turn in TURNS
        ]
        texts = [f"{number(one.value)}, {number(worst.value)} ms" if one and worst else "–" for one, worst in pairs]
        rows.append([f"{count} at a time", *texts, shown(_get(found, "asking", f"{where} asked/quiet"), interval=True)])
    return table(("ADD median, p99", *TURNS, "asked/quiet"), rows)


def answers_table(found: Recordings) -> str:
    """List how long each command takes, beside ADDs."""
    rows = [
        [f"`multusctl {command}`", shown(_get(found, "asking", f"answer {command}"), interval=True)]
        for command in COMMANDS
    ]
    return table(("beside ADDs", "exec to exit"), rows)


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
            cells.append(several if len(values) > 1 else shown(first, interval=True))
        return cells

    rows = []
    for rate in RATES:
        for kind, text in (("servers", "web server"), ("clients", "client")):
            keys = [f"{kind} p{percent} at {rate}" for percent in PERCENTS]
            rows.append(row(f"{rate} a second: {text}, created to Ready, p50, p95, p99", *keys))
        rows += [row(f"{rate} a second: {text}", f"{key} at {rate}") for key, text in _DENSITY.items()]
    rows += [row("without pods: anonymous memory", "idle"), row("without pods: processor time", "quiet")]
    return table(("", "no Multus", "ours", "upstream"), rows)


def readme_table(found: Recordings) -> str:
    """Make the README's table: upstream, built-in plugins and, where plugins run, plugin binaries."""
    rows = (
        ("the shim alone", "shim", "{} time"),
        ("ADD, cluster network only", "peer", "ADD 0 {}"),
        ("ADD, 4 more networks", "peer", "ADD 4 {}"),
        ("DEL, cluster network only", "peer", "DEL 0 {}"),
        ("DEL, 4 more networks", "peer", "DEL 4 {}"),
        ("processor time of ADD and DEL, shim and plugins included", "peer", "total 0 {}"),
        ("requests to the API server for a pod", "peer", "requests {}"),
        ("pods a second, 16 at a time", "burst", "pods 0 networks 16 at a time {}"),
        ("exec to serving", "peer", "start {}"),
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
    "verbs": _by_size("verbs", ("ADD", "CHECK", "DEL"), (*SIZES, DUAL)),
    "processor": _by_size("verbs", ("processor", "total"), SIZES),
    "stages": stages_table,
    "peer": _by_size("peer", ("ADD", "CHECK", "DEL", "total"), SIZES),
    "peer-ratios": peer_ratios_table,
    "requests": requests_table,
    "burst": burst_table,
    "memory": memory_table,
    "growth": growth_table,
    "asking": asking_table,
    "answers": answers_table,
    "density": density_table,
    "shim": shim_table,
    "readme": readme_table,
}

# --- plots -----------------------------------------------------------------------------------------------------------


def plots(found: Recordings) -> dict[str, str]:
    """File name -> SVG, of what has been recorded."""
    made: dict[str, str] = {}
    for bench, title in (
        ("verbs", "ADD and DEL of a pod, without an API server"),
        ("peer", "ADD and DEL of a pod, with an API server"),
    ):
        groups = _groups(found, bench)
        if groups:
            made[f"{bench}.svg"] = plot.dots(title, "milliseconds, median and its 95 % interval", groups)
    for size in (0, 4):
        lines = [
            Line(side, points)
            for side in SIDES
            if (points := _points(found, "burst", f"pods {size} networks {{}} at a time {side}", AT_ONCE))
        ]
        if lines:
            title = f"Pods a second, {_more(size)}"
            made[f"burst-{size}.svg"] = plot.lines(title, "pods a second", "pods at a time", lines)
    growing = [
        Line(name, points)
        for name, key in (("ours", "leases ADD {}"), ("bare", "leases ADD bare {}"))
        if (points := _points(found, "growth", key, LEASES))
    ]
    if growing:
        made["leases.svg"] = plot.lines(
            "ADD by the number of leases in the network", "milliseconds, median", "leases", growing
        )
    return made


def _groups(found: Recordings, bench: str) -> list[Group]:
    groups = []
    for verb in ("ADD", "DEL"):
        for size in SIZES:
            figures_of = [(side, _get(found, bench, f"{verb} {size} {side}")) for side in SIDES]
            rows = [(side, figure) for side, figure in figures_of if figure is not None]
            if rows:
                groups.append(Group(f"{verb}, {size} more" if size else f"{verb}, cluster only", rows))
    return groups


def _points(found: Recordings, bench: str, key: str, counts: Sequence[int]) -> list[tuple[float, Figure]]:
    pairs = [(count, _get(found, bench, key.format(count))) for count in counts]
    return [(float(count), figure) for count, figure in pairs if figure is not None]


if __name__ == "__main__":
    main()
