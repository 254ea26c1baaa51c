"""The failure of a plugin's program as a CNI error: what it printed, and how it ended.

Plugins print one JSON object (CNI SPEC section 2, containernetworking/cni `pkg/invoke`). Some print a result and then
an error, or `{"error": ...}`, or nothing before a crash. The message of the CNI error always begins with the cause.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from typing import Any, Final

from multus_daemon.plugins import child
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import errors, gojson
from multus_daemon.spec.cni.errors import CniError, DecodingFailureError, InternalError, Origin

_SHOWN: Final = 200
_LINE_SHOWN: Final = 400
_SHORT: Final = 2
_OBJECTS_MAX: Final = 64
_ONLY_JSON: Final = "correct or replace the program: all but the result belongs on its stderr"
# The first line of a crash; goroutines or a backtrace follow.
_CRASH: Final = re.compile(r"^(panic: |fatal error: |thread '.*' panicked at )")


def of_exit(plugin_type: str, invocation: Invocation, path: str, end: child.Exit) -> CniError:
    """Return the error of a plugin that exited with a failure or was killed.

    The plugin's own error object keeps its code, message and details. The details are extended by the plugin, the verb
    and the end of its stderr; libcni drops stderr whenever there is any stdout.
    """
    failed, verb, how = f'plugin "{plugin_type}" failed', invocation.verb, _how(end)
    if end.stdout.strip():
        try:
            reported = errors.from_object(_last_object(end.stdout))
        except gojson.JsonError as error:
            problem = f"{failed} ({how}), and {_printed(end, invocation, path)}"
            found = context(plugin_type, verb, end.stderr, str(error))
            return InternalError(problem, found, remedy=_ONLY_JSON, origin=Origin.PLUGIN)
        # Code 0 means success in the Go library; 999 is its code for an error without one.
        code = reported.code or InternalError.default_code
        msg = reported.msg or f"{failed} without a message ({how})"
        # The plugin's own details come first.
        found = context(plugin_type, verb, end.stderr)
        return errors.from_code(code, msg, found, remedy=reported.details, origin=Origin.PLUGIN)
    lines = end.stderr.decode("utf-8", "replace").strip().splitlines()
    crash = next(filter(_CRASH.match, lines), "")
    cause = (crash or (lines[-1] if lines else "")).strip()[-_LINE_SHOWN:]
    return InternalError(
        f"{failed} ({how}): {cause}" if cause else f"{failed} without a message ({how})",
        context(plugin_type, verb, end.stderr),
        remedy=f"{path} has crashed: report it to its maker, or install another version" if crash else "",
        origin=Origin.PLUGIN,
    )


def require_object(plugin_type: str, invocation: Invocation, path: str, end: child.Exit) -> None:
    """Raise DecodingFailureError if a plugin that succeeded has not printed one JSON object or null."""
    try:
        gojson.loads_object(end.stdout, nullable=True)
    except gojson.JsonError as problem:
        found = context(plugin_type, invocation.verb, end.stderr, str(problem))
        msg = f'plugin "{plugin_type}" succeeded, but {_printed(end, invocation, path)}'
        raise DecodingFailureError(msg, found, remedy=_ONLY_JSON, origin=Origin.PLUGIN) from problem


def context(plugin_type: str, verb: str, stderr: bytes = b"", first: str = "") -> str:
    """Return the details of an error about a plugin: `first`, the plugin and verb, the end of its stderr."""
    text = stderr[-child.STDERR_TAIL :].decode("utf-8", "replace").strip()
    return "; ".join(filter(None, (first, f'plugin "{plugin_type}", {verb}', text and f"stderr: {text}")))


def _last_object(stdout: bytes) -> dict[str, Any]:
    """Return the last JSON object that a plugin printed, in the form of a CNI error. Raises JsonError."""
    try:
        fields = gojson.loads_object(stdout)
    except gojson.JsonError:
        text, fields = stdout.decode("utf-8", "replace").strip(), {}
        for _ in range(_OBJECTS_MAX):
            try:
                item, end = json.JSONDecoder().raw_decode(text)
            except (ValueError, RecursionError):
                break
            fields, text = item if isinstance(item, dict) else {}, text[end:].lstrip()
        if text or not gojson.get(fields, "msg"):
            raise
    error = gojson.get(fields, "error")
    if gojson.get(fields, "msg") is None and isinstance(error, str | dict):
        return error if isinstance(error, dict) else {"code": gojson.get(fields, "code"), "msg": error}
    return fields


def _printed(end: child.Exit, invocation: Invocation, path: str) -> str:
    """Describe stdout that is not as CNI asks: its start, without values of the configuration (maybe passwords)."""
    values: list[Any] = [invocation.fields]
    texts = set()
    for value in values:
        if isinstance(value, Mapping | list):
            values += value.values() if isinstance(value, Mapping) else value
        elif len(text := str(value)) > _SHORT:
            texts |= {text, gojson.dumps(text).decode()[1:-1]}
    shown = end.stdout[: 20 * _SHOWN].decode("utf-8", "replace")
    for text in sorted(texts - {invocation.fields.get("type"), invocation.cni_version}, key=len, reverse=True):
        shown = shown.replace(text, "***")
    return f"{path} printed {repr(shown[:_SHOWN]) if shown.strip() else 'nothing'} instead of CNI's JSON"


def _how(end: child.Exit) -> str:
    if end.returncode >= 0:
        return f"exit status {end.returncode}"
    # Real-time signals have no name.
    name = {number.value: f", {number.name}" for number in signal.Signals}.get(-end.returncode, "")
    return f"ended by signal {-end.returncode}{name}"
