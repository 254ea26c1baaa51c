"""Read files of JSON and YAML, and locate each value in the text, including values in embedded JSON strings."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import yaml

from multus_daemon.cluster.standalone import manifests
from multus_daemon.spec.cni import conf, gojson
from multus_tools.validate import positions
from multus_tools.validate.positions import Path, Span

FILE_MAX_BYTES: Final = 8 * 1024 * 1024
VALUES_MAX: Final = 200_000
"""Maximum number of values in one YAML document. An aliased value counts each time."""
EMBEDDED_VALUES_MAX: Final = 5_000
"""Maximum number of values in a JSON text within a string: the place of each takes 1 KiB and 10 us."""

_JSON_SUFFIXES: Final = (".json", ".conf", ".conflist")
_YAML_SUFFIXES: Final = (".yaml", ".yml")
_Loader: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE: Final = "tag:yaml.org,2002:merge"
# YAML 1.2 section 5.7; JSON's are among them.
_ESCAPES: Final = dict(zip('0abtnvfre "/\\N_LP', '\0\a\b\t\n\v\f\r\x1b "/\\\x85\xa0\u2028\u2029', strict=True))
_QUOTED: Final = re.compile(
    r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|.", re.DOTALL
)
"""A character between double quotes, as it is written. The first alternative is a surrogate pair."""
_PAIR_LENGTH: Final = 12


class Place(NamedTuple):
    """A line and a column in characters, both from 1."""

    line: int
    column: int


class UnreadableError(ValueError):
    """The text is neither JSON nor YAML; `place` is the place of the fault."""

    def __init__(self, message: str, place: Place) -> None:
        super().__init__(message)
        self.place = place


class Source:
    """The text of a file or an AdmissionReview, and the line and column of each character."""

    def __init__(self, name: str, data: bytes, *, is_file: bool = True) -> None:
        """Decode `data`; findings show `name`. Raises UnreadableError.

        `is_file` False: the user knows only the strings in the text. Each string is then a source of its own, named by
        its path.
        """
        self.name = name
        self.is_file = is_file
        if len(data) > FILE_MAX_BYTES:
            raise UnreadableError(f"the file is longer than {FILE_MAX_BYTES} bytes", Place(1, 1))
        try:
            self.text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise UnreadableError(f"not UTF-8: {error.reason}", Place(line, 1)) from error

    def place(self, offset: int) -> Place:
        """Return the place of the character at `offset`, from 0."""
        return Place(self.text.count("\n", 0, offset) + 1, offset - self.text.rfind("\n", 0, offset))


@dataclass(frozen=True)
class Located:
    """A value, with its place in the file and those of all values in it."""

    source: Source
    value: Any
    spans: Mapping[Path, Span]
    """Spans in characters of the file, by the path from the top of the document."""
    prefix: Path = ()
    """Path of the value in the document."""
    repeated: tuple[tuple[Path, int], ...] = field(default=(), repr=False)
    """Repeated keys, each with the offset of a repetition."""

    def below(self, *path: str | int) -> Located:
        """Return the value at `path`. Raises KeyError, IndexError."""
        return replace(self, value=value_at(self.value, path), prefix=(*self.prefix, *path))

    def place(self, path: Path = ()) -> Place:
        """Return the place of the key at `path`, or of the nearest existing key above it."""
        full = (*self.prefix, *path)
        while full and full not in self.spans:
            full = full[:-1]
        found = self.spans.get(full)
        return self.source.place(found.key) if found else Place(1, 1)

    def text(self, *path: str | int) -> Embedded:
        """Return the string at `path`. Raises KeyError, IndexError."""
        inner = self.below(*path)
        if not self.source.is_file:
            text = Source(positions.shown_path(path), inner.value.encode("utf-8", "replace"), is_file=False)
            return Embedded(text, inner.value, range(len(inner.value) + 1))
        return Embedded(self.source, inner.value, _origins(self.source.text, self.spans[inner.prefix], inner.value))


@dataclass(frozen=True)
class Embedded:
    """A string of a file, usually JSON."""

    source: Source
    text: str
    origins: Sequence[int]
    """Offset in the file of each character and of the end; if unknown, the offset of the string's beginning."""

    def place(self, offset: int) -> Place:
        """Return the place of the character of the string at `offset`, from 0."""
        return self.source.place(self._offset(offset))

    def place_at(self, line: int, column: int) -> Place:
        """Return the place of the character at a line and a column of the string, both from 1."""
        start = 0
        for _ in range(line - 1):
            start = self.text.find("\n", start) + 1
        return self.place(start + column - 1)

    def json(self) -> Located:
        """Parse the string as JSON. Raises JsonError.

        A text of more than EMBEDDED_VALUES_MAX values or CONFIG_MAX_BYTES is not read, and stands for an empty object.
        """
        values = self.text.count(",") + gojson.containers(self.text)
        if values > EMBEDDED_VALUES_MAX or len(self.text) > conf.CONFIG_MAX_BYTES:
            return Located(self.source, {}, {(): Span(*map(self._offset, (0, 0, len(self.text))))})
        value = gojson.loads(self.text)
        found, repeated = positions.positions(self.text)
        spans = {path: Span(*map(self._offset, span)) for path, span in found.items()}
        return Located(
            self.source, value, spans, repeated=tuple((path, self._offset(offset)) for path, offset in repeated)
        )

    def _offset(self, offset: int) -> int:
        return self.origins[min(offset, len(self.origins) - 1)]


def documents(source: Source) -> Iterator[Located]:
    """Yield the documents of a file that are not empty. Raises UnreadableError at the first fault."""
    suffix = PurePath(source.name).suffix
    is_json = suffix in _JSON_SUFFIXES
    if not is_json and source.text.lstrip()[:1] not in ("{", "["):
        yield from _yaml(source)
        return
    try:
        value = gojson.loads(source.text)
        found, repeated = positions.positions(source.text)
        yield Located(source, value, found, repeated=tuple(repeated))
        return
    except gojson.JsonError as error:
        message, place = positions.place_of_fault(str(error))
        fault = UnreadableError(message, Place(*place or (1, 1)))
        if is_json:
            raise fault from error
    try:
        # YAML in flow style begins with a bracket too.
        yield from _yaml(source)
    except UnreadableError as error:
        if suffix in _YAML_SUFFIXES:
            raise
        raise fault from error


def _yaml(source: Source) -> Iterator[Located]:
    try:
        # compose_all() below reports any fault that stops this, after it has yielded the documents before it.
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
        place = _place(mark) if mark else Place(1, 1)
        raise UnreadableError(f"not YAML: {error.problem or error.context}", place) from error
    except yaml.reader.ReaderError as error:
        raise UnreadableError(f"not YAML: {error.reason}", source.place(error.position)) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise UnreadableError(f"not YAML: {error}", Place(1, 1)) from error


def _place(mark: Any) -> Place:
    return Place(mark.line + 1, mark.column + 1)


class _Reader:
    """Reader of one YAML document. Keys must be strings, as in Kubernetes."""

    def __init__(self) -> None:
        self.spans: dict[Path, Span] = {}
        self.repeated: list[tuple[Path, int]] = []
        self._values = 0
        self._constructor = yaml.constructor.SafeConstructor()

    def read(self, node: Any, path: Path, key_at: int) -> Any:
        """Return the value of `node`. Raises UnreadableError."""
        self._values += 1
        place = _place(node.start_mark)
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
                raise UnreadableError("a key is not a string", _place(key.start_mark))
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
            raise UnreadableError(f"not YAML: {node.value[:80]!r} is not a valid value of its type", place) from error


def _origins(text: str, span: Span, value: str) -> list[int]:
    """Return the offset in `text` of each character of `value`, a string that is written at `span`.

    YAML styles fold and indent white space only: all other characters are in both texts, in the same order.
    """
    written = _characters(text[span.start : span.end])
    origins: list[int] = []
    after = span.start
    for character in value:
        if character.isspace():
            origins.append(after)
            continue
        shown, offset = next(written, ("", 0))
        if shown != character:
            return [span.start] * (len(value) + 1)
        origins.append(span.start + offset)
        after = span.start + offset + 1
    return [*origins, origins[-1] + 1] if origins else [span.start]


def _characters(raw: str) -> Iterator[tuple[str, int]]:
    """Yield the characters of `raw` that are not white space, each with its offset."""
    style = raw[:1]
    if style == '"':
        yield from _escaped(raw)
        return
    # Skip the header of a block scalar.
    at = raw.find("\n") + 1 if style in ("|", ">") else int(style == "'")
    while at < len(raw):
        character = raw[at]
        if not character.isspace():
            yield character, at
        at += 2 if style == "'" and character == "'" else 1


def _escaped(raw: str) -> Iterator[tuple[str, int]]:
    for token in _QUOTED.finditer(raw, 1, len(raw) - 1):
        at, text = token.start(), token[0]
        if len(text) == _PAIR_LENGTH:
            character, at = json.loads(f'"{text}"'), at + _PAIR_LENGTH // 2
        elif text[0] == "\\":
            character = chr(int(text[2:], 16)) if len(text) > 2 else _ESCAPES.get(text[1], "")
        else:
            character = text
        if character and not character.isspace():
            yield character, at


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
