"""The text of a file, the values in it, and where in the file each of them is: JSON, YAML, JSON inside of either."""

from __future__ import annotations

import bisect
import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import yaml

from multus_daemon.cluster.standalone import manifests
from multus_daemon.runtime import jsontext
from multus_daemon.runtime.jsontext import Path, Span
from multus_daemon.spec.cni import gojson

FILE_MAX_BYTES: Final = 8 * 1024 * 1024
VALUES_MAX: Final = 200_000
"""In one YAML document, what an alias stands for counted each time."""

_JSON_SUFFIXES: Final = (".json", ".conf", ".conflist")
_YAML_SUFFIXES: Final = (".yaml", ".yml")
_Loader: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE: Final = "tag:yaml.org,2002:merge"
# YAML 1.2 section 5.7; JSON's are among them.
_ESCAPES: Final = dict(zip('0abtnvfre "/\\N_LP', '\0\a\b\t\n\v\f\r\x1b "/\\\x85\xa0\u2028\u2029', strict=True))
_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_HIGH_SURROGATE: Final = re.compile("[\ud800-\udbff]")


class Place(NamedTuple):
    """Both from 1; a column counts characters."""

    line: int
    column: int


class UnreadableError(ValueError):
    """The text is neither JSON nor YAML; the message says what is wrong, `place` where."""

    def __init__(self, message: str, place: Place) -> None:
        super().__init__(message)
        self.place = place


class Source:
    """A file, or what stands for one."""

    def __init__(self, name: str, data: bytes, *, is_file: bool = True) -> None:
        """`name` as findings have it. Raises UnreadableError.

        `is_file`: there is such a text for people to look at. Of what is not, the strings in it are: each is a source
        of its own, with its path for a name.
        """
        self.name = name
        self.is_file = is_file
        if len(data) > FILE_MAX_BYTES:
            raise UnreadableError(f"longer than {FILE_MAX_BYTES} bytes", Place(1, 1))
        try:
            self.text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise UnreadableError(f"not UTF-8: {error.reason}", Place(line, 1)) from error
        self._ends = [found.start() for found in re.finditer("\n", self.text)]

    def place(self, offset: int) -> Place:
        """Of a character, counted from 0."""
        line = bisect.bisect_left(self._ends, offset)
        return Place(line + 1, offset - (self._ends[line - 1] + 1 if line else 0) + 1)

    def line(self, number: int) -> str:
        """A line of the text, counted from 1."""
        start = self._ends[number - 2] + 1 if number > 1 else 0
        return self.text[start : self._ends[number - 1] if number <= len(self._ends) else None].rstrip("\r")


@dataclass(frozen=True)
class Located:
    """A value, and where it and what is in it are."""

    source: Source
    value: Any
    spans: Mapping[Path, Span]
    """In characters of the file, from the top of the document; `start` and `end` are those of the value as written."""
    prefix: Path = ()
    """The value's own place in the document."""
    repeated: tuple[tuple[Path, int], ...] = field(default=(), repr=False)
    """Keys that a YAML document has more than once, with the offset of the last of each."""

    def below(self, *path: str | int) -> Located:
        """The value at `path`, which is there."""
        value = self.value
        for name in path:
            value = value[name]
        return Located(self.source, value, self.spans, (*self.prefix, *path), self.repeated)

    def place(self, path: Path = ()) -> Place:
        """Of the key at `path`, or of the nearest that there is above it."""
        full = (*self.prefix, *path)
        while full and full not in self.spans:
            full = full[:-1]
        found = self.spans.get(full)
        return self.source.place(found.key) if found else Place(1, 1)

    def text(self, *path: str | int) -> Embedded:
        """The string at `path`, which is there."""
        inner = self.below(*path)
        if not self.source.is_file:
            text = Source(jsontext.shown_path(path), inner.value.encode("utf-8", "replace"))
            return Embedded(text, inner.value, list(range(len(inner.value))), Span(0, 0, len(inner.value)))
        span = self.spans[inner.prefix]
        return Embedded(self.source, inner.value, _origins(self.source.text[span.start : span.end], inner.value), span)


@dataclass(frozen=True)
class Embedded:
    """A string of a file, which is JSON as a rule."""

    source: Source
    text: str
    origins: list[int] | None
    """Where each character is written, from the beginning of the string in the file; None where that can't be told."""
    span: Span

    def place(self, offset: int) -> Place:
        """Of a character of the string, counted from 0."""
        return self.source.place(self._offset(offset))

    def place_at(self, line: int, column: int) -> Place:
        """Of a character of the string by its line and column in it, from 1."""
        start = 0
        for _ in range(line - 1):
            start = self.text.find("\n", start) + 1
        return self.place(start + column - 1)

    def json(self) -> Located:
        """The value of the JSON text. Raises JsonError."""
        value = gojson.loads(self.text)
        spans = {
            path: Span(*(self._offset(offset) for offset in span))
            for path, span in jsontext.positions(self.text).items()
        }
        return Located(self.source, value, spans)

    def _offset(self, offset: int) -> int:
        if not self.origins:
            return self.span.start
        if offset >= len(self.origins):
            return self.span.start + self.origins[-1] + 1
        return self.span.start + self.origins[offset]


# --- files -----------------------------------------------------------------------------------------------------------


def documents(source: Source) -> Iterator[Located]:
    """The documents of a file, empty ones passed over. Raises UnreadableError, once those before have been given."""
    suffix = PurePath(source.name).suffix
    is_json = suffix in _JSON_SUFFIXES
    if not is_json and source.text.lstrip()[:1] not in ("{", "["):
        yield from _yaml(source)
        return
    try:
        yield _json(source)
        return
    except gojson.JsonError as error:
        message, place = jsontext.place_of_fault(str(error))
        fault = UnreadableError(f"not JSON: {message.removeprefix('JSON is malformed: ')}", Place(*place or (1, 1)))
        if is_json:
            raise fault from error
    try:
        # That begins so, too.
        yield from _yaml(source)
    except UnreadableError as error:
        if suffix in _YAML_SUFFIXES:
            raise
        raise fault from error


def _json(source: Source) -> Located:
    """Raises JsonError."""
    return Located(source, gojson.loads(source.text), jsontext.positions(source.text))


def _yaml(source: Source) -> Iterator[Located]:
    try:
        # Where it stops at a fault, so does what follows, which tells of it, and of the documents before.
        with contextlib.suppress(yaml.YAMLError):
            manifests.refuse_depth(source.text)
        for node in yaml.compose_all(source.text, Loader=_Loader):
            reader = _Reader()
            value = reader.read(node, (), node.start_mark.index)
            if value is not None:
                yield Located(source, value, reader.spans, repeated=tuple(reader.repeated))
    except manifests.ManifestError as error:
        raise UnreadableError(str(error), Place(1, 1)) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(mark.line + 1, mark.column + 1) if mark else Place(1, 1)
        raise UnreadableError(f"not YAML: {error.problem or error.context}", place) from error
    except yaml.reader.ReaderError as error:
        raise UnreadableError(f"not YAML: {error.reason}", source.place(error.position)) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise UnreadableError(f"not YAML: {error}", Place(1, 1)) from error


class _Reader:
    """One document of YAML, as Kubernetes takes it: keys are strings."""

    def __init__(self) -> None:
        self.spans: dict[Path, Span] = {}
        self.repeated: list[tuple[Path, int]] = []
        self._values = 0
        self._constructor = yaml.constructor.SafeConstructor()

    def read(self, node: Any, path: Path, key_at: int) -> Any:
        """The value of `node`. Raises UnreadableError."""
        self._values += 1
        place = Place(node.start_mark.line + 1, node.start_mark.column + 1)
        if self._values > VALUES_MAX:
            raise UnreadableError(f"more than {VALUES_MAX} values", place)
        if len(path) > manifests.NESTING_MAX:
            raise UnreadableError(f"nested deeper than {manifests.NESTING_MAX}", place)
        self.spans[path] = Span(key_at, node.start_mark.index, node.end_mark.index)
        match node:
            case yaml.MappingNode():
                return self._mapping(node, path)
            case yaml.SequenceNode():
                return [self.read(item, (*path, index), item.start_mark.index) for index, item in enumerate(node.value)]
            case _:
                return self._scalar(node, place)

    def _mapping(self, node: Any, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                place = Place(key.start_mark.line + 1, key.start_mark.column + 1)
                raise UnreadableError("a key is no string", place)
            if key.tag == _MERGE:
                for item in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if isinstance(item, yaml.MappingNode):
                        merged = self._mapping(item, path) | merged
                continue
            if key.value in found:
                self.repeated.append(((*path, key.value), key.start_mark.index))
            found[key.value] = self.read(value, (*path, key.value), key.start_mark.index)
        return merged | found

    def _scalar(self, node: Any, place: Place) -> Any:
        try:
            return self._constructor.construct_object(node)
        except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
            raise UnreadableError(f"not YAML: {node.value[:80]!r} is no value of its kind", place) from error


# --- strings ---------------------------------------------------------------------------------------------------------


def _origins(raw: str, value: str) -> list[int] | None:
    """For each character of the string `value`, that `raw` is written for, its offset in there; None: can't be told.

    Whatever the style folds or indents, what is not white space is in both, in the same order.
    """
    written = _characters(raw)
    found: list[int] = []
    last = 0
    for character in value:
        if character.isspace():
            found.append(last)
            continue
        shown, offset = next(written, ("", 0))
        if shown != character:
            return None
        found.append(offset)
        last = offset + 1
    return found


def _characters(raw: str) -> Iterator[tuple[str, int]]:
    """What is written in `raw` but white space, each with its offset."""
    style = raw[:1]
    if style == '"':
        yield from _escaped(raw)
        return
    # The header of a block has no part in it.
    at = raw.find("\n") + 1 if style in ("|", ">") else int(style == "'")
    while at < len(raw):
        character = raw[at]
        if not character.isspace():
            yield character, at
        at += 2 if style == "'" and character == "'" else 1


def _escaped(raw: str) -> Iterator[tuple[str, int]]:
    at = 1
    high = ""
    while at < len(raw) - 1:
        start, character = at, raw[at]
        at += 1
        if character == "\\":
            letter = raw[at]
            at += 1
            if size := _DIGITS.get(letter):
                character = chr(int(raw[at : at + size], 16))
                at += size
            else:
                character = _ESCAPES.get(letter, "")
        if _HIGH_SURROGATE.match(character) and raw[at : at + 2] == "\\u":
            high = character
            continue
        if high:
            pair = high + character
            character, high = pair.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), ""
        if character and not character.isspace():
            yield character, start


def value_at(value: Any, path: Path) -> Any:
    """Return what is at `path`. Raises KeyError, IndexError."""
    for name in path:
        value = value[name]
    return value


def object_at(value: Any, path: Path) -> Mapping[str, Any]:
    """Return the object at `path`; empty if there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}
