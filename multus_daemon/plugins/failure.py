"""Convert a plugin's failure (exit status, stdout, stderr) to a `CniError`, like containernetworking/cni `pkg/invoke`.

Pure. The plugin's own error object keeps its code, message and details. The details are extended by the plugin, the
verb and the end of its stderr; libcni drops stderr whenever there is any stdout.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from multus_daemon.spec.cni import errors, gojson
from multus_daemon.spec.cni.errors import CniError, InternalError

STDERR_TAIL = 8 * 1024
_STDOUT_SHOWN = 1024


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a plugin process. `returncode` as in subprocess: negative is the signal that ended it."""

    returncode: int
    stdout: bytes = b""
    stderr: bytes = b""
    """Its last `STDERR_TAIL` bytes."""


def error_of(plugin_type: str, verb: str, end: Exit) -> CniError:
    """Return the error of a plugin that ended with a failure."""
    failed = f'plugin "{plugin_type}" failed'
    if end.stdout.strip():
        try:
            reported = errors.from_object(gojson.loads_object(end.stdout))
        except gojson.JsonError as error:
            shown = end.stdout[:_STDOUT_SHOWN].decode("utf-8", "replace")
            return InternalError(
                f"{failed} ({_how(end)}) and its diagnostic message is no CNI error: {error}",
                context(plugin_type, verb, end.stderr, f"stdout: {shown!r}"),
            )
        # Code 0 means success in the Go library; 999 is its code for an error without one.
        code = reported.code or InternalError.default_code
        msg = reported.msg or f"{failed} without a message ({_how(end)})"
        return errors.from_code(code, msg, context(plugin_type, verb, end.stderr, reported.details))
    if text := end.stderr.decode("utf-8", "replace").strip():
        last = text.splitlines()[-1].strip()
        return InternalError(f"{failed} ({_how(end)}): {last[-400:]}", context(plugin_type, verb, end.stderr))
    return InternalError(f"{failed} without a message ({_how(end)})", context(plugin_type, verb))


def context(plugin_type: str, verb: str, stderr: bytes = b"", first: str = "") -> str:
    """Return the details of an error about a plugin: `first`, the plugin and verb, the end of its stderr."""
    parts = [first] if first else []
    parts.append(f'plugin "{plugin_type}", {verb}')
    if text := stderr[-STDERR_TAIL:].decode("utf-8", "replace").strip():
        parts.append(f"stderr: {text}")
    return "; ".join(parts)


def _how(end: Exit) -> str:
    if end.returncode >= 0:
        return f"exit status {end.returncode}"
    number = -end.returncode
    try:
        return f"ended by signal {number}, {signal.Signals(number).name}"
    except ValueError:
        return f"ended by signal {number}"
