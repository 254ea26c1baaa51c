"""Collect findings, each with its place in a file."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from multus_daemon.spec.cni.errors import CniError
from multus_tools.validate.located import Located, Place, value_at
from multus_tools.validate.positions import Path, shown_path

Severity = Literal["error", "warning"]

_WORD: Final = re.compile(r"[A-Za-z][\w-]*(?:(?:\.[A-Za-z][\w-]*)|(?:\[[0-9]+\]))*")
_LABEL: Final = re.compile(rf"({_WORD.pattern}):")
_QUOTED: Final = re.compile(r"""['"]([^'"]+)['"]""")
_VALUE_MIN: Final = 3
"""Minimum characters of a value that is searched for in a message."""
_WORDS_MAX: Final = 50
"""Maximum number of words of a message that are compared with keys."""
_GUESSED_MAX: Final = 1_000
"""Maximum number of values of an object that is searched."""
_SEARCHED_MAX: Final = 300
"""Maximum characters of a message that are searched for keys and values."""
# Many messages contain these values, as the name of the plugin or network.
_NAMES: Final = frozenset({"type", "name"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault in a file."""

    file: str
    place: Place
    severity: Severity
    """Error: pods can't start. Warning: pods usually start, but something is ignored."""
    check: str
    subject: str
    """`kind namespace/name` or a similar name; empty if the finding is about the whole file."""
    key: str
    """Path of the key in the object, or in the JSON text that the object carries; may be empty."""
    problem: str
    advice: str
    """The likely intention, or what to do; may be empty."""

    def to_object(self) -> dict[str, Any]:
        """Return the finding in the format of `multusctl.validate/v1`."""
        line, column = self.place
        texts = {name: getattr(self, name) for name in ("severity", "check", "subject", "key", "problem", "advice")}
        return {"file": self.file, "line": line, "column": column, **texts}


class Report:
    """All findings of a run."""

    def __init__(self) -> None:
        self.findings: dict[Finding, None] = {}
        """The keys are the findings, each once, in the order in which they were added."""
        self.objects = 0
        """Number of objects that were checked."""
        self.passed_over: list[tuple[str, str]] = []
        """Files with nothing to check, and the reasons."""

    def add(self, finding: Finding) -> None:
        """Add a finding, unless the report has an equal one."""
        self.findings[finding] = None

    def count(self, severity: Severity) -> int:
        """Return the number of findings of the severity."""
        return sum(item.severity == severity for item in self.findings)

    def to_object(self) -> dict[str, Any]:
        """Return the report in the format of `multusctl.validate/v1`."""
        return {
            "schema": "multusctl.validate/v1",
            "objects": self.objects,
            "errors": self.count("error"),
            "warnings": self.count("warning"),
            "findings": [item.to_object() for item in self.sorted()],
            "passedOver": [{"file": file, "why": why} for file, why in self.passed_over],
        }

    def sorted(self) -> list[Finding]:
        """Return the findings by file, in the order in which the files were given, then by place."""
        files = list(dict.fromkeys(item.file for item in self.findings))
        return sorted(self.findings, key=lambda item: (files.index(item.file), item.place))


@dataclass(frozen=True)
class Subject:
    """An object or a configuration under examination, and the report for its findings."""

    report: Report
    name: str
    """The text that its findings have as `subject`."""
    located: Located

    def add(
        self,
        severity: Severity,
        check: str,
        problem: str,
        advice: str = "",
        *,
        path: Path = (),
        place: Place | None = None,
    ) -> None:
        """Report a finding at the key `path`, or at `place` if it is given."""
        place = place or self.located.place(path)
        self.report.add(
            Finding(self.located.source.name, place, severity, check, self.name, shown_path(path), problem, advice)
        )

    def error(self, check: str, problem: str, advice: str = "", *, path: Path = ()) -> None:
        """Report an error at the key `path`."""
        self.add("error", check, problem, advice, path=path)

    def warn(self, check: str, problem: str, advice: str = "", *, path: Path = ()) -> None:
        """Report a warning at the key `path`."""
        self.add("warning", check, problem, advice, path=path)

    def repeated(self, severity: Severity, advice: str = "the last one counts") -> None:
        """Report each key that the object's text has twice."""
        own, located = self.located.prefix, self.located
        for path, offset in located.repeated:
            if path[: len(own)] == own:
                problem, place = f"key {path[-1]!r} is there twice", located.source.place(offset)
                self.add(severity, "repeated-key", problem, advice, path=path[len(own) :], place=place)

    def refused(self, check: str, error: CniError, *, path: Path = (), after: bool = False) -> Path:
        """Report an error of reading or planning, at the key below `path` that its message mentions.

        Returns the path of that key; `path` if there is none. `after`: refused keys were removed before. Then an error
        that mentions no value is about a removed key, and is not reported.
        """
        error = innermost(error)
        at = guessed(self.located.value, error.msg, error.explanation, base=path)
        if after and (at == path or isinstance(value_at(self.located.value, at), dict | list)):
            return path
        self.error(check, error.msg, error.explanation, path=at)
        return at

    def without(self, path: Path) -> Subject:
        """Return the subject without the key at `path`. Raises LookupError if there is none."""
        return replace(self, located=replace(self.located, value=without(self.located.value, path)))


def without(value: Any, path: Path) -> Any:
    """Return a copy without the key at `path`. Raises LookupError if there is none."""
    if not path or isinstance(path[-1], int):
        raise KeyError("no key")
    value = copy.deepcopy(value)
    del value_at(value, path[:-1])[path[-1]]
    return value


def innermost(error: CniError) -> CniError:
    """Return the first error, before context was added to its message: a finding shows its place itself."""
    while isinstance(cause := error.__cause__, CniError) and error.msg.startswith(f"{cause.msg} ("):
        error = cause
    return error


def guessed(value: Any, message: str, details: str = "", *, base: Path = ()) -> Path:
    """Return the key path below `base` that a message mentions, by key or by value; `base` if it mentions none.

    Readers mention the place in their own words: `ipam.subnet: …`, `invalid CIDR address: 10.1`.
    """
    # The value of a text that is too large is empty.
    below = dict(itertools.islice(_below(value_at(value, base), ()), _GUESSED_MAX)) if value else {}
    if len(below) == _GUESSED_MAX:
        return base
    message, details = message[:_SEARCHED_MAX], details[:_SEARCHED_MAX]
    said = f"{message}; {details}"
    by_name: dict[str, list[Path]] = {}
    for path in below:
        by_name.setdefault(shown_path(path).lower(), []).append(path)
        if isinstance(path[-1], str):
            by_name.setdefault(path[-1].lower(), []).append(path)
    leaves = {path: inner for path, inner in below.items() if path[-1] not in _NAMES and _is_in(inner, said)}
    # Details are sentences: only a word with a colon behind it is a key there.
    words = [*_QUOTED.findall(message), *_WORD.findall(message), *_LABEL.findall(details)][:_WORDS_MAX]
    named = [path for word in words for path in _ending_in(word, by_name)]
    both = [path for path in named if path in leaves]
    for candidates in (both, list(leaves) if len(leaves) == 1 else [], named):
        if candidates:
            best = candidates[0]
            for path in candidates[1:]:
                best = path if path[: len(best)] == best else best
            return (*base, *best)
    return base


def _ending_in(word: str, by_name: dict[str, list[Path]]) -> list[Path]:
    """Return the paths that end in `word`, such as `a.b`; without such paths, those that end in `a`, and so on."""
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
    items: Iterator[tuple[str | int, Any]] = iter(())
    if isinstance(value, dict):
        items = iter(value.items())
    elif isinstance(value, list):
        items = enumerate(value)
    for name, inner in items:
        yield (*path, name), inner
        yield from _below(inner, (*path, name))
