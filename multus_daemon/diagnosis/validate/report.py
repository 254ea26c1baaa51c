"""What is wrong in files, and where in them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from multus_daemon.diagnosis.validate.source import Located, Place, Source
from multus_daemon.runtime.jsontext import Path, shown_path
from multus_daemon.spec.cni.errors import CniError

SCHEMA: Final = "multusctl.validate/v1"
Severity = Literal["error", "warning"]

_WORD: Final = re.compile(r"[A-Za-z][\w-]*(?:(?:\.[A-Za-z][\w-]*)|(?:\[[0-9]+\]))*")
_LABEL: Final = re.compile(rf"({_WORD.pattern}):")
_QUOTED: Final = re.compile(r"""['"]([^'"]+)['"]""")
_VALUE_MIN: Final = 3
"""Characters of a value that is looked for in a message."""
_WORDS_MAX: Final = 50
"""Of a message that are looked for among the keys."""
_GUESSED_MAX: Final = 20_000
"""In an object with more values than that nothing is looked for."""
# Their values are in many a message as the name of what the message is about.
_NAMES: Final = frozenset({"type", "name"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    file: str
    place: Place
    severity: Severity
    """An error keeps pods from starting; a warning is passed over, or not what is meant, as a rule."""
    check: str
    subject: str
    """`kind namespace/name`, or what else it is; empty where it is about the whole file."""
    key: str
    """The path of the key in the object, or in the JSON text that the object carries; may be empty."""
    problem: str
    advice: str
    """What is meant, or what to do; may be empty."""

    def to_object(self) -> dict[str, Any]:
        """As `multusctl.validate/v1` has it."""
        return {
            "file": self.file,
            "line": self.place.line,
            "column": self.place.column,
            "severity": self.severity,
            "check": self.check,
            "subject": self.subject,
            "key": self.key,
            "problem": self.problem,
            "advice": self.advice,
        }


class Report:
    """Findings, and what there was to be looked at."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.objects = 0
        """How many were looked at."""
        self.passed_over: list[tuple[str, str]] = []
        """Files in which there is nothing to look at, and why."""

    def add(
        self,
        severity: Severity,
        check: str,
        subject: str,
        located: Located,
        problem: str,
        advice: str = "",
        *,
        path: Path = (),
    ) -> None:
        """A finding at the key `path` of `located`."""
        self.add_at(severity, check, subject, located.source, located.place(path), problem, advice, path=path)

    def add_at(
        self,
        severity: Severity,
        check: str,
        subject: str,
        source: Source,
        place: Place,
        problem: str,
        advice: str = "",
        *,
        path: Path = (),
    ) -> None:
        """A finding at a place of a file. What has been told of the same place is not told again."""
        finding = Finding(source.name, place, severity, check, subject, shown_path(path), problem, advice)
        if finding not in self.findings:
            self.findings.append(finding)

    def refused(self, check: str, subject: str, located: Located, error: CniError, *, path: Path = ()) -> None:
        """What a reader of ours refuses, at the key that its message is about, `path` or below."""
        error = innermost(error)
        at = guessed(located.value, error.msg, error.details, base=path)
        self.add("error", check, subject, located, error.msg, error.details, path=at)

    def count(self, severity: Severity) -> int:
        """How many findings are of the severity."""
        return sum(item.severity == severity for item in self.findings)

    def to_object(self) -> dict[str, Any]:
        """`{"schema", "objects", "errors", "warnings", "findings": […], "passedOver": [{"file", "why"}]}`."""
        return {
            "schema": SCHEMA,
            "objects": self.objects,
            "errors": self.count("error"),
            "warnings": self.count("warning"),
            "findings": [item.to_object() for item in self.sorted()],
            "passedOver": [{"file": file, "why": why} for file, why in self.passed_over],
        }

    def sorted(self) -> list[Finding]:
        """The findings by file, in the order in which files were given, and by place."""
        files = list(dict.fromkeys(item.file for item in self.findings))
        return sorted(self.findings, key=lambda item: (files.index(item.file), item.place))


def innermost(error: CniError) -> CniError:
    """The error before anybody said whose it is: a finding has that beside it."""
    while isinstance(cause := error.__cause__, CniError) and error.msg.startswith(f"{cause.msg} ("):
        error = cause
    return error


def guessed(value: Any, message: str, details: str = "", *, base: Path = ()) -> Path:
    """The path below `base` that a message is about; `base` where it names no key and no value that is there.

    Readers say where something is in the words that they have for it: `ipam.subnet: …`, `invalid CIDR address: 10.1`.
    """
    for name in base:
        value = value[name]
    below = dict(itertools.islice(_below(value, ()), _GUESSED_MAX))
    if len(below) == _GUESSED_MAX:
        return base
    by_name: dict[str, list[Path]] = {}
    for path in below:
        by_name.setdefault(shown_path(path).lower(), []).append(path)
        if isinstance(path[-1], str):
            by_name.setdefault(path[-1].lower(), []).append(path)
    leaves = [
        path for path, found in below.items() if _is_in(found, f"{message}; {details}") and path[-1] not in _NAMES
    ]
    # Details are sentences: a key in them that is what it is about has a colon behind it.
    words = [*_QUOTED.findall(message), *_WORD.findall(message), *_LABEL.findall(details)][:_WORDS_MAX]
    named = [path for word in words for path in _ending_in(word, by_name)]
    both = [path for path in named if path in leaves]
    for candidates in (both, leaves if len(leaves) == 1 else [], named):
        if candidates:
            best = candidates[0]
            for path in candidates[1:]:
                best = path if path[: len(best)] == best else best
            return (*base, *best)
    return base


def _ending_in(word: str, by_name: dict[str, list[Path]]) -> list[Path]:
    """The paths that `word`, a key or several, is or ends in; less of its end where that is not there."""
    while word:
        found = by_name.get(word.lower()) or [
            path for name, paths in by_name.items() if name.endswith(f".{word.lower()}") for path in paths
        ]
        if found or not re.search(r"[.\[]", word):
            return found
        word = re.split(r"[.\[][^.\[]*$", word)[0]
    return []


def _is_in(value: Any, message: str) -> bool:
    if not isinstance(value, str) or len(value) < _VALUE_MIN or value not in message:
        return False
    return re.search(rf"(?<![\w.:/-]){re.escape(value)}(?![\w:/-])", message) is not None


def _below(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    items: Iterator[tuple[str | int, Any]]
    if isinstance(value, dict):
        items = iter(value.items())
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return
    for name, inner in items:
        yield (*path, name), inner
        yield from _below(inner, (*path, name))
