"""Recorded figures: one JSON file for each bench in bench/figures/, with the machine, the date and its load."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.stats import Figure

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).with_name("figures")


@dataclass(frozen=True)
class Recording:
    """Figures of one run of one bench."""

    bench: str
    commit: str
    """The last one of this checkout that changed the daemon or the shim; see `commit`."""
    date: str
    machine: str
    versions: dict[str, str]
    """Versions of the programs that ran beside ours: name of a side to the version that it reports."""
    load: tuple[float, float]
    """The load average of one minute, before the run and after it."""
    options: dict[str, Any]
    figures: dict[str, Figure] = field(default_factory=dict)

    def save(self, folder: Path) -> Path:
        """Write `<folder>/<bench>.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.bench}.json"
        content = dataclasses.asdict(self)
        content["figures"] = {key: _rounded(value) for key, value in content["figures"].items()}
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path


def load(bench: str, folder: Path = FOLDER) -> Recording | None:
    """Return the recording of a bench, None if there is none."""
    path = folder / f"{bench}.json"
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    content["figures"] = {key: Figure(**value) for key, value in content["figures"].items()}
    content["load"] = tuple(content["load"])
    return Recording(**content)


def machine() -> str:
    """Processor, memory and kernel."""
    model = re.search(r"(?m)^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"(?m)^MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    gibibytes = int(memory[1]) / (1 << 20) if memory else 0
    name = model[1] if model else platform.machine()
    kernel = platform.release().split("-")[0]
    return f"{os.cpu_count()} CPUs ({name}), {gibibytes:.0f} GiB, Linux {kernel}, Python {platform.python_version()}"


def commit(checkout: Path = ROOT) -> str:
    """The last commit that changed the daemon or the shim; `+` after it where there are changes without a commit."""
    measured = ("--", "multus_daemon", "multus_shim")
    git = ["git", "-C", str(checkout)]
    last = [*git, "log", "-1", "--format=%h", "--abbrev=7", *measured]
    found, changed = (
        subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        for command in (last, [*git, "status", "--porcelain", *measured])
    )
    return (found or "unknown") + ("+" if changed else "")


def today() -> str:
    """The date in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime())


def _rounded(figure: dict[str, Any]) -> dict[str, Any]:
    """Four significant digits: more would be noise in the diff."""
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in figure.items()}
