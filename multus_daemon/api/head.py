"""The head of a request to a port, checked before any other code reads what a stranger sends (RFC 9110, RFC 9112).

Pure: no I/O, no log line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

HEAD_MAX: Final = 8 * 1024
"""Maximum bytes of a head."""
FIELDS_MAX: Final = 64
END: Final = b"\r\n\r\n"

_LINE: Final = re.compile(r"([A-Z]{1,20}) (?:https?://[^/? ]*(?=/))?(/[!-~]*) HTTP/1\.[01]")
_FIELD: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t -~\x80-\xff]*)")


class RefusedError(Exception):
    """The request is refused with this status."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


@dataclass(frozen=True, slots=True)
class Head:
    """A request's method, path without query, and fields by lower-case name; repeated ones are joined by a comma."""

    method: str
    path: str
    fields: Mapping[str, str]


def read(data: bytes, methods: Mapping[str, bool]) -> Head:
    """Return the head in `data`, which ends with END. `methods`: those that are allowed, and whether each has a body.

    A body must have a length and no encoding, so that nothing has to be unpacked. Raises RefusedError.
    """
    line, *lines = data[: -len(END)].decode("latin-1").split("\r\n")
    request = _LINE.fullmatch(line)
    if request is None:
        raise RefusedError(HTTPStatus.BAD_REQUEST)
    if len(lines) > FIELDS_MAX:
        raise RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    fields: dict[str, str] = {}
    for text in lines:
        field = _FIELD.fullmatch(text)
        if field is None:
            raise RefusedError(HTTPStatus.BAD_REQUEST)
        name, value = field[1].lower(), field[2].strip(" \t")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    method, target = request.groups()
    if method not in methods:
        raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED)
    _check_body(fields, has_body=methods[method])
    return Head(method, target.partition("?")[0], fields)


def _check_body(fields: Mapping[str, str], *, has_body: bool) -> None:
    """Raises RefusedError for a body that is not allowed, or whose end or content is not plain."""
    length = fields.get("content-length", "0")
    for refused, status in (
        ("transfer-encoding" in fields or (has_body and "content-length" not in fields), HTTPStatus.LENGTH_REQUIRED),
        ("content-encoding" in fields, HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
        ("expect" in fields, HTTPStatus.EXPECTATION_FAILED),
        (not re.fullmatch("[0-9]{1,12}", length), HTTPStatus.BAD_REQUEST),
    ):
        if refused:
            raise RefusedError(status)
    if int(length) and not has_body:
        raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
