"""Make docs/metrics.md from the declarations of the metrics (`make metrics`).

python -m tests.repo.metrics_page            # after a change of multus_daemon/metrics/declared.py, or of a page
"""

from __future__ import annotations

import functools
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from multus_daemon.metrics.declared import GROUPS, NETWORKS_MAX, PLUGINS_MAX, VERBS
from multus_daemon.metrics.registry import Declared, Label

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "metrics.md"
USERS: Final = (
    *(f"docs/{name}.md" for name in ("runbook", "operations", "troubleshooting", "reliability")),
    "manifests/monitoring",
)
"""What makes use of metrics: alerts, dashboards, and pages that say what to do."""
_NAME: Final = re.compile(r"(?:multus|process)_[a-z_*]+")
_VALUES_MAX: Final = 8

HEAD: Final = f"""# Metrics

Every metric of the [daemon](glossary.md#daemon), and the question that it answers.

`make metrics` writes this page.

With `metricsPort` the daemon serves `/metrics` ([configuration.md](configuration.md#metrics)): Prometheus' text format,
or OpenMetrics if the Accept header asks for it. Durations are in seconds. Counters end in `_total`, histograms in
`_duration_seconds` or `_wait_seconds`; the others are gauges.

**Labels are bounded.** `network` is the name of the NAD with its namespace, or of the
[cluster network](glossary.md#cluster-network); the first {NETWORKS_MAX} [networks](glossary.md#network) and the first
{PLUGINS_MAX} types of [plugins](glossary.md#plugin) since the daemon's start have series of their own, the rest is
`other`. `verb` is a CNI verb, unless the table has its values. A node with {NETWORKS_MAX} networks, 16 plugins and 250
pods has at most 3,100 series.

| outcome | meaning |
| --- | --- |
| `success` | done |
| `refused` | bad input: CNI error codes 1, 2, 3, 4, 6, 7 and 8; nothing was changed |
| `error` | any other failure |
| `timeout` | a deadline ended it |
| `cancelled` | a DEL, the client's end or the stop of the daemon ended it |
| `skipped` | left on purpose |
| `warned` | allowed with warnings |

OpenMetrics has exemplars at `multus_cni_request_duration_seconds`: `request_id` is in the lines of the log,
`trace_id` is that of the runtime's trace.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


def page() -> str:
    """Return the page."""
    tables = [f"\n## {title}\n\n{_table(group)}" for title, group in GROUPS.items()]
    return HEAD + "".join(tables)


def users(declared: Declared) -> list[str]:
    """Return the paths of `USERS` that name the metric; a name may end with `*`."""
    return [path for path in USERS if any(fnmatchcase(declared.name, name) for name in _named(ROOT / path))]


@functools.cache
def _named(path: Path) -> frozenset[str]:
    files = path.rglob("*") if path.is_dir() else [path] if path.exists() else []
    names = [name for file in files if file.is_file() for name in _NAME.findall(file.read_text())]
    return frozenset(names) | {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}


def _table(group: tuple[Declared, ...]) -> str:
    rows = [
        f"| `{item.name}` | {', '.join(map(_label, item.labels))} | {item.help} | {item.question} |" for item in group
    ]
    head = "| metric | labels | meaning | question |"
    return "\n".join([head, "|" + " --- |" * 4, *rows]) + "\n"


def _label(label: Label) -> str:
    values = sorted(label.values)
    if not 0 < len(values) <= _VALUES_MAX or label.name == "outcome" or label.values <= VERBS:
        return f"`{label.name}`"
    return f"`{label.name}` ({', '.join(values)})"


if __name__ == "__main__":
    main()
