"""Remove secrets from what leaves the node: JSON values and texts. Pure.

Six rules, each on its own:

- the value of a key that looks like a secret's: `password`, `clientKey`, `AUTH_TOKEN`, in JSON, in `key=value` and
  `key: value`, as a flag, and beside a `name` that looks like one;
- values of an environment (`env`), whatever their names;
- patterns in any text: PEM private keys, bearer tokens, JWTs, bootstrap tokens, user and password of a URL, cookies and
  `X-...` headers, what follows the word `password` and has a digit;
- in YAML, all lines below a key that looks like a secret's;
- JSON in a string, and in base64, is searched like other JSON;
- what one of the rules removed under the key of a password or token is removed wherever it appears later.

If in doubt, a rule removes. True, false, null and empty values stay: they are no secrets.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

REMOVED: Final = "<removed>"
"""The text that replaces each removed value."""
DEPTH_MAX: Final = 80
"""Maximum nesting of objects, arrays and JSON in strings; deeper values are removed."""
KNOWN_MAX: Final = 1000
"""Maximum number of removed values that are looked for elsewhere."""
_KNOWN_LENGTH: Final = range(8, 4096)
"""Lengths of removed values that are looked for elsewhere. A shorter one may be an ordinary word."""
_PATH_MAX: Final = 200

BY_KEY: Final = "the key looks like a secret's"
BY_NAME: Final = "the name beside it looks like a secret's"
ENVIRONMENT: Final = "value of an environment"
KNOWN: Final = "was removed elsewhere"
BEFORE: Final = "was removed before, by the daemon"
_OF_PEM: Final = "PEM private key"
TOO_DEEP: Final = "nested too deep to be searched"

_WORDS: Final = r"passw(?:or)?d|passphrase|pwd|secret|token|credential|auth|private|key|psk"
_SHORT_WORDS: Final = r"pass|pw|creds?|pin|otp"
_KEY: Final = re.compile(_WORDS, re.IGNORECASE)
_SHORT_KEY: Final = re.compile(_SHORT_WORDS, re.IGNORECASE)
_STRONG_KEY: Final = re.compile(r"passw(?:or)?d|passphrase|pwd|secret|token|psk|private", re.IGNORECASE)
_PARTS: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_ENVIRONMENTS: Final = frozenset({"env", "environ", "environment"})
_FLAG: Final = re.compile(rf"--?[\w.-]*(?:{_WORDS}|{_SHORT_WORDS})[\w.-]*", re.IGNORECASE)
_IN_TEXT: Final = re.compile(
    # The separator of `key=value`, `"key": "value"`, `\"key\": ...`; not that of a URL. Or a flag's blank.
    rf"(?:{_WORDS}|(?<![a-z])(?:{_SHORT_WORDS}|env(?:iron(?:ment)?)?(?=\\*[\"'])))[\w.\-\[\]]{{0,64}}(?:\\*[\"'])?\s{{0,8}}(?P<separator>[:=])(?!//)\s*"
    rf"|(?<![\w-])--?[\w.-]{{0,64}}?(?:{_WORDS})[\w.-]{{0,64}} +(?!-)",
    re.IGNORECASE,
)
_QUOTE: Final = re.compile(r"(\\*)([\"'])")
_OPENING: Final = re.compile(r"[{\[]|\"(?=[\s\\\"]{0,16}[{\[])")
"""Where JSON, or JSON in a string, may begin in a text."""
_TRIED_MAX: Final = 32
"""Maximum number of places in a line at which JSON is tried."""
_NAME_BEFORE: Final = re.compile(r"[\w.\-]{0,64}\Z")
_ASCII_ESCAPE: Final = re.compile(r"\\u00([0-7][0-9a-fA-F])")
_BASE64_OF_JSON: Final = re.compile(r"(?<![A-Za-z0-9+/])(?:[eW][w-z0-9+/]|I[g-v])[A-Za-z0-9+/]{6,}={0,2}")
_PEM_END: Final = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----")
_PEM: Final = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|\Z)", re.DOTALL
)
_PATTERNS: Final = (
    ("JWT", re.compile(r"(?<![\w-])eyJ[\w-]{4,}\.[\w-]{4,}(?:\.[\w-]*){0,3}")),
    ("bearer token", re.compile(r"(?<=\bbearer\s)\s*(?!<removed>)[^\s\"'\\]+", re.IGNORECASE)),
    ("bootstrap token", re.compile(r"\b(?=[a-z]*[0-9])[a-z0-9]{6}\.(?=[a-z]*[0-9])[a-z0-9]{16}\b")),
    # A password may have a slash that is not escaped.
    ("user of a URL", re.compile(r"(?<=://)(?!<removed>@)(?:[^\s/:@]*:[^\s\"']+|[^\s/]+)(?=@)")),
    (
        "header",
        re.compile(
            r"(?P<kept>\b(?:X-[a-z0-9-]{1,64}|(?:Set-)?Cookie)\s{0,2}[:=]\s{0,4})(?!\s*<removed>)[^\s\"'\\][^\r\n\"'\\]*",
            re.IGNORECASE,
        ),
    ),
    (
        "word after a secret's name",
        re.compile(
            r"(?P<kept>(?<![\w-])(?:passw(?:or)?d|passphrase|pwd|secret|token)\s{1,4}(?:is\s{1,4})?[\"']?)"
            r"(?!<removed>)(?=[^\s\"']*[0-9])(?=[^\s\"']*[a-z])[^\s\"']{6,}",
            re.IGNORECASE,
        ),
    ),
)
_BLOCK: Final = re.compile(
    rf"(\s*)(?:- +)?[\"']?[\w./-]*(?:{_WORDS})[\w./-]*[\"']?:\s*(?:[|>][-+0-9]*\s*)?(?:#.*)?", re.IGNORECASE
)
"""A line of YAML with a secret's key, whose value is in the more indented lines below it."""
_BASE64_CHARACTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=\\ \t\r\n"


@dataclass(frozen=True, slots=True)
class Removal:
    """Where a value was removed, and by which rule; without the value."""

    where: str
    """Path of the key, such as `plugins[0].password`, or `line 7: token`."""
    reason: str


def looks_secret(key: str) -> bool:
    """Return True if a value under this key is removed."""
    return bool(_KEY.search(key)) or any(map(_SHORT_KEY.fullmatch, _PARTS.findall(key)))


class Scrubber:
    """Removes secrets, and remembers them to remove them elsewhere: give it texts with secrets under keys first."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        """`known`: secrets to look for from the beginning."""
        self._known: dict[str, None] = {}
        self._removals: list[Removal] = []
        for value in known:
            self._learn(value)

    def value(self, value: Any) -> tuple[Any, list[Removal]]:
        """Return a JSON value without secrets, and what was removed."""
        self._removals = []
        return self._value(value, "", DEPTH_MAX), self._removals

    def text(self, text: str) -> tuple[str, list[Removal]]:
        """Return a text without secrets, and what was removed. The text is JSON, JSON lines, or lines of any form."""
        self._removals = []
        cleaned = self._embedded(text, "", DEPTH_MAX)
        if cleaned is None:
            # A key in PEM has several lines.
            lines = self._blocks(self._private_keys(text, ""), "").split("\n")
            cleaned = "\n".join(self._string(line, f"line {number}", DEPTH_MAX) for number, line in enumerate(lines, 1))
        return cleaned, self._removals

    def _learn(self, value: str) -> None:
        # A word without a digit is rarely a secret, and often stands elsewhere.
        if len(value) in _KNOWN_LENGTH and len(self._known) < KNOWN_MAX and any(map(str.isdigit, value)):
            self._known[value] = None

    def _value(self, value: Any, path: str, levels: int) -> Any:
        if isinstance(value, str):
            before = len(self._removals)
            cleaned = self._string(value, path, levels)
            if REMOVED in value and len(self._removals) == before:
                self._remove(value, path, BEFORE)
            return cleaned
        if not isinstance(value, Mapping | list | tuple):
            return value
        if levels <= 0:
            return self._remove(value, path, TOO_DEEP)
        if isinstance(value, Mapping):
            return self._object(value, path, levels - 1)
        return self._array(value, path, levels - 1)

    def _object(self, items: Mapping[str, Any], path: str, levels: int) -> dict[str, Any]:
        cleaned: dict[str, Any] = {}
        beside = {key.lower(): item for key, item in items.items() if isinstance(item, str)}
        is_named = any(looks_secret(beside.get(key, "")) for key in ("name", "key"))
        for key, item in items.items():
            name = self._text(key, path)
            where = f"{path}.{name}" if path else name
            while name in cleaned:
                name += "'"
            if looks_secret(key):
                cleaned[name] = self._remove(item, where, BY_KEY, strong=bool(_STRONG_KEY.search(key)))
            elif key.lower() in _ENVIRONMENTS:
                cleaned[name] = self._environment(item, where)
            elif is_named and key.lower() == "value":
                cleaned[name] = self._remove(item, where, BY_NAME, strong=True)
            else:
                cleaned[name] = self._value(item, where, levels)
        return cleaned

    def _array(self, items: Iterable[Any], path: str, levels: int) -> list[Any]:
        items = list(items)
        cleaned = []
        before = ""
        for index, item in enumerate(items):
            where = f"{path}[{index}]"
            is_pair = len(items) == 2 and index == 1 and looks_secret(before)
            if isinstance(item, str) and (is_pair or _FLAG.fullmatch(before)):
                cleaned.append(self._remove(item, where, BY_NAME, strong=True))
            else:
                cleaned.append(self._value(item, where, levels))
            before = item if isinstance(item, str) else ""
        return cleaned

    def _environment(self, value: Any, path: str) -> Any:
        """Remove the values of environment variables, and keep their names."""
        if isinstance(value, Mapping):
            return {name: self._remove(item, f"{path}.{name}", ENVIRONMENT) for name, item in value.items()}
        if not isinstance(value, list | tuple):
            return self._remove(value, path, ENVIRONMENT)
        return [self._variable(item, f"{path}[{index}]") for index, item in enumerate(value)]

    def _variable(self, item: Any, path: str) -> Any:
        if isinstance(item, Mapping) and isinstance(item.get("name"), str):
            kept = {"name": item["name"]}
            return kept | {
                key: self._remove(item[key], f"{path}.{key}", ENVIRONMENT) for key in item if key not in kept
            }
        name, separator, _ = item.partition("=") if isinstance(item, str) else ("", "", "")
        return f"{name}={self._remove(item, path, ENVIRONMENT)}" if separator else self._remove(item, path, ENVIRONMENT)

    def _string(self, text: str, path: str, levels: int) -> str:
        """Remove secrets from a string, which may be JSON."""
        if levels <= 0:
            return str(self._remove(text, path, TOO_DEEP))
        cleaned = self._embedded(text, path, levels)
        if cleaned is not None:
            return cleaned
        text = _BASE64_OF_JSON.sub(lambda found: self._base64(found[0], path, levels), text)
        text = self._within(text, path, levels)
        if text.lstrip()[:1] in ("{", "["):
            # JSON that can't be read, such as a part of it: a key may have escapes.
            text = _ASCII_ESCAPE.sub(lambda found: chr(int(found[1], 16)), text)
        return self._text(text, path)

    def _embedded(self, text: str, path: str, levels: int) -> str | None:
        """Remove secrets from a text that is a JSON object or array; return None for another text."""
        if text.lstrip()[:1] not in ("{", "["):
            return None
        start = len(text) - len(text.lstrip())
        if (found := self._json(text, start, path, levels)) is None or text[found[1] :].strip():
            return None
        return found[0]

    def _within(self, text: str, path: str, levels: int) -> str:
        """Remove secrets from JSON within a text."""
        parts: list[str] = []
        place = 0
        for _, opening in zip(range(_TRIED_MAX), _OPENING.finditer(text), strict=False):
            if opening.start() < place:
                continue
            if found := self._json(text, opening.start(), path, levels):
                parts += [text[place : opening.start()], found[0]]
                place = found[1]
        return "".join(parts) + text[place:]

    def _json(self, text: str, start: int, path: str, levels: int) -> tuple[str, int] | None:
        """Remove secrets from the JSON value at `start`; return it and its end in the text. None if there is none."""
        repeated: list[str] = []
        decoder = json.JSONDecoder(object_pairs_hook=lambda pairs: _pairs(pairs, repeated))
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            return None
        before = len(self._removals)
        cleaned = self._value(value, path, levels - 1)
        if len(self._removals) == before and not repeated:
            return text[start:end], end
        return json.dumps(cleaned, ensure_ascii=False, indent=2 if "\n" in text[start:end] else None), end

    def _base64(self, text: str, path: str, levels: int) -> str:
        """Remove secrets from JSON in base64. Base64 without a secret stays as it is."""
        try:
            decoded = base64.b64decode(text, validate=True).decode()
        except ValueError:
            return text
        before = len(self._removals)
        cleaned = self._string(decoded, path, levels - 1)
        return text if len(self._removals) == before else cleaned

    def _text(self, text: str, path: str) -> str:
        """Remove secrets from a text that is not JSON."""
        return self._plain(self._patterns(self._blocks(self._private_keys(text, path), path), path), path)

    def _blocks(self, text: str, path: str) -> str:
        """Remove the lines of YAML that are the value of a key above them."""
        lines = text.split("\n")
        if len(lines) == 1:
            return text
        kept: list[str] = []
        depth: int | None = None
        for line in lines:
            indent = len(line) - len(line.lstrip())
            is_item = indent == depth and line.startswith("- ", indent)
            if depth is not None and (not line.strip() or indent > depth or is_item):
                if line.strip() and line.strip() != REMOVED:
                    if kept[-1].strip() != REMOVED:
                        kept.append(line[:indent] + self._remove(line.strip(), path, BY_KEY, strong=True))
                    continue
            else:
                depth = len(head[1]) if (head := _BLOCK.fullmatch(line)) else None
            kept.append(line)
        return "\n".join(kept)

    def _private_keys(self, text: str, path: str) -> str:
        """Remove private keys in PEM, also one whose beginning or end was cut off."""
        if "PRIVATE KEY-----" not in text:
            return text
        text = _PEM.sub(lambda _: self._remove("key", path, _OF_PEM), text)
        parts, place = [], 0
        for end in _PEM_END.finditer(text):
            parts += [text[place : end.start()].rstrip(_BASE64_CHARACTERS), "\n", self._remove("key", path, _OF_PEM)]
            place = end.end()
        return "".join(parts) + text[place:]

    def _patterns(self, text: str, path: str) -> str:
        """Remove texts that look like a secret, whatever precedes them."""
        for reason, pattern in _PATTERNS:
            if pattern.search(text):
                removed = self._remove("value", path, reason)
                text = pattern.sub(lambda found: (found.groupdict().get("kept") or "") + removed, text)  # noqa: B023  called at once
        return text

    def _plain(self, text: str, path: str) -> str:
        """Remove values that follow a secret's key in a text, and values that are known to be secrets."""
        parts: list[str] = []
        place = 0
        while found := _IN_TEXT.search(text, place):
            end = _end_of_value(text, found)
            start = found.end()
            value = text[start:end]
            if (bare := value.strip(" \t\r\n\\\"'")) and bare != REMOVED:
                before = _NAME_BEFORE.search(text, max(found.start() - 64, 0), found.start())
                name = ((before[0] if before else "") + found[0]).strip(" \t\r\n\\\"':=")
                quote = _QUOTE.match(value)
                removed = self._remove(value, f"{path}: {name}" if path else name, BY_KEY)
                value = f"{quote[0]}{removed}{quote[0]}" if quote else removed
            parts += [text[place:start], value]
            place = max(end, start)
        cleaned = "".join(parts) + text[place:]
        for known in self._known:
            if known in cleaned:
                cleaned = cleaned.replace(known, self._remove("value", path, KNOWN))
        return cleaned

    def _remove(self, value: Any, path: str, reason: str, *, strong: bool = False) -> Any:
        if value is None or isinstance(value, bool) or value in ("", [], {}, ()):
            return value
        if strong and isinstance(value, str):
            self._learn(value)
        self._removals.append(Removal(path[:_PATH_MAX], reason))
        return REMOVED


def _end_of_value(text: str, found: re.Match[str]) -> int:
    """Return where the value ends that begins at the end of the match."""
    start = found.end()
    if quote := _QUOTE.match(text, start):
        # The same number of backslashes; inner quotes have more.
        closing = re.compile(rf"(?<!\\){re.escape(quote[0])}")
        ending = closing.search(text, quote.end())
        return ending.end() if ending else len(text)
    if text[start : start + 1] in ("{", "["):
        return len(text)
    if found["separator"] == ":":
        ending = re.compile(r"[\r\n]").search(text, start)
    else:
        ending = re.compile(r"\s").search(text, start)
    return ending.start() if ending else len(text)


def _pairs(pairs: list[tuple[str, Any]], repeated: list[str]) -> dict[str, Any]:
    """Make an object of the pairs; add the values of repeated keys to `repeated`, as each may have a secret."""
    items: dict[str, Any] = {}
    for key, value in pairs:
        while key in items:
            repeated.append(key)
            key += " (repeated)"
        items[key] = value
    return items
