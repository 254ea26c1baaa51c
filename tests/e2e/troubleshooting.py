"""`docs/troubleshooting.md`: broken situations, as the tests of `test_troubleshooting.py` have seen them.

    python -m tests.e2e.troubleshooting     run these tests and write the page

A test shows what it sees to a `Section`. At its end the section is compared with the page; under this program it is
written down instead. What varies from run to run (times, ids, paths, MACs, what machine it is) is replaced before.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from tests.e2e.node import Node

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "troubleshooting.md"
MODULE: Final = ROOT / "tests" / "e2e" / "test_troubleshooting.py"
RECORD: Final = "MULTUS_TROUBLESHOOTING"
"""The environment variable with the directory that sections are written to."""
COLUMNS: Final = 100

INTRODUCTION: Final = """\
# Troubleshooting

Fourteen causes why a pod does not start or does not terminate, each with its Event and its fix.

If a pod hangs in ContainerCreating, run `kubectl multus why NS/POD` ([kubectl-multus.md](kubectl-multus.md)). It asks
the API server and the daemon of the pod's node, and prints the cause and the fix. If you may not run commands in the
daemon's pods, read the pod's Events (`kubectl describe pod`).

On the node, as root or in the daemon's pod (`kubectl -n kube-system exec DAEMON -- multusctl ...`, see
[multusctl.md](multusctl.md)):

| symptom | command |
| --- | --- |
| a pod does not start | `multusctl explain NS/POD` |
| many pods of a node do not start | `multusctl doctor` |
| a pod does not terminate, or its address or device stays in use | `multusctl attachments --leaks -o wide` |

Each situation below has the cause, the Warning Event, a command with the lines of its output that matter, and the fix.
The Event, the kubelet's own Event and the daemon's log (level `error`) name the same cause. `make troubleshooting`
writes this page from tests.
"""

_ALWAYS: Final = (
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+[+-]\d\d:\d\d", "2026-01-01T12:00:00.000+00:00"),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "2026-01-01T12:00:00Z"),
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "11111111-2222-3333-4444-555555555555"),
    (r"([0-9a-f]{2}:){5}[0-9a-f]{2}", "02:00:00:00:00:01"),
    # In a table each is on a line of its own.
    (r"\b\d{4}-\d\d-\d\d\b", "2026-01-01"),
    (r"(?<![:\d])\d\d:\d\d:\d\d(?![:\d])", "12:00:00"),
    (r"seconds=[0-9.]+", "seconds=0.010"),
    (r"\brequest [0-9a-f]{8}\b", "request 1a2b3c4d"),
    (r"127\.0\.0\.1(:|', )\d+", r"10.96.0.1\g<1>443"),
    (r"mlt\d+n\d+-\d+", "cni-0001"),
    (r" +$", ""),
)
_DETAIL: Final = re.compile(r"  (ok|no) |  \d{4}-\d\d-\d\d")
"""A step of `why`, a request or an Event, below cause and advice."""


def normalised(text: str, node: Node) -> str:
    """`text` with what varies replaced; of the same width, where a table may have it."""
    places = {
        node.bin_dir: "/opt/cni/bin",
        node.networks_dir: "/var/lib/cni/networks",
        node.cni_dir: "/var/lib/cni/multus",
        node.root / "run": "/run/multus",
        node.root / "net.d": "/etc/cni/net.d",
        node.config: "/etc/cni/net.d/multus.d/daemon-config.json",
        node.root: "/root-of-the-node",
    }
    for path, shown in places.items():
        text = text.replace(str(path), shown)
    text = text.replace(os.uname().machine, "x86_64")
    for pattern, shown in _ALWAYS:
        text = re.sub(pattern, shown, text, flags=re.MULTILINE)
    return "\n".join(line for each in text.rstrip("\n").split("\n") for line in wrapped(each))


def wrapped(line: str) -> list[str]:
    """The line in pieces of the terminal's width, broken at spaces; what follows stands below its beginning."""
    indent = " " * (len(line) - len(line.lstrip(" ")))
    pieces = textwrap.wrap(
        line, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
    return pieces if len(line) > COLUMNS else [line]


def shortened(output: str) -> str:
    """The output without the steps and the requests that a command lists below its cause and its advice."""
    return "\n".join(line for line in output.splitlines() if not _DETAIL.match(line))


class Section:
    """What one situation shows; its title and first paragraphs are the test's docstring."""

    def __init__(self, test: Callable[..., Any], node: Node) -> None:
        self.name = test.__name__
        self._line = inspect.unwrap(test).__code__.co_firstlineno
        self._node = node
        self._parts = [heading(inspect.getdoc(test) or "")]

    def say(self, text: str) -> None:
        """A paragraph."""
        self._parts.append(text)

    def show(self, output: str, command: str = "") -> None:
        """A block of output; of a command, where one is given."""
        prompt = f"$ {command}\n" if command else ""
        self._parts.append(f"```console\n{prompt}{normalised(output, self._node)}\n```")

    def event(self, text: str) -> None:
        """The reason of an Event, whose message the command below repeats; all of another text."""
        if reasons := re.findall(r"(?m)^Warning  (\w+)  ", text):
            self.say(f"Event: {', '.join(f'`{reason}`' for reason in reasons)}.")
        else:
            self.show(text)

    def close(self) -> None:
        """Write the section down where that is asked for; else it must be what the page says."""
        text = "\n\n".join(self._parts) + "\n"
        if directory := os.environ.get(RECORD):
            Path(directory, f"{self._line:05}").write_text(text)
            return
        title = self._parts[0].partition("\n")[0]
        assert sections(PAGE.read_text()).get(title) == text, f"make troubleshooting: the page is stale:\n{text}"


def heading(docstring: str) -> str:
    """The beginning of a section, from a test's docstring: its first sentence is the title."""
    first, _, rest = docstring.partition("\n")
    return f"## {first.rstrip('.')}\n{rest}".rstrip("\n")


def sections(page: str) -> dict[str, str]:
    """The page's sections, by the line of their title."""
    parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: part.rstrip("\n") + "\n" for part in parts}


def page(parts: Iterable[str]) -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *parts])


def main() -> None:
    """Run the tests that show something, and write the page from that."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pytest", "-q", "--numprocesses", "0", str(MODULE), *sys.argv[1:]]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, RECORD: directory}, check=False)
        if done.returncode:
            sys.exit("the tests have failed, or were not run: the page stays as it is")
        written = sorted(Path(directory).iterdir())
        if not written:
            sys.exit("nothing was shown: the tests were skipped; see what they need above")
        PAGE.write_text(page(path.read_text() for path in written))


if __name__ == "__main__":
    main()
