"""What a plugin's failure means: its exit, stdout and stderr as a `CniError` (containernetworking/cni `pkg/invoke`).

Pure. The plugin's own error object passes with code, message and details as they are. What we know besides - which
plugin, which verb, the end of its stderr - follows in the details; libcni loses stderr whenever there is any stdout.
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
    """How one plugin process ended. `returncode` as in subprocess: negative is the signal that ended it."""

    returncode: int
    stdout: bytes = b""
    stderr: bytes = b""
    """Its last `STDERR_TAIL` bytes."""


def error_of(plugin_type: str, verb: str, end: Exit) -> CniError:
    """The error of a plugin that has failed by itself."""
    if end.stdout.strip():
        try:
            fields = gojson.loads_object(end.stdout)
            reported = errors.from_object(fields)
        except gojson.JsonError as error:
            shown = end.stdout[:_STDOUT_SHOWN].decode("utf-8", "replace")
            return InternalError(
                f'plugin "{plugin_type}" failed ({_how(end)}) and its diagnostic message is no CNI error: {error}',
                context(plugin_type, verb, end.stderr, f"stdout: {shown!r}"),
            )
        # 0 is success in the Go library's eyes; 999 is what it has for "no code of its own".
        code = reported.code or InternalError.default_code
        msg = reported.msg or f'plugin "{plugin_type}" failed without a message ({_how(end)})'
        return errors.from_code(code, msg, context(plugin_type, verb, end.stderr, reported.details))
    if text := end.stderr.decode("utf-8", "replace").strip():
        last = text.splitlines()[-1].strip()
        return InternalError(
            f'plugin "{plugin_type}" failed ({_how(end)}): {last[-400:]}', context(plugin_type, verb, end.stderr)
        )
    return InternalError(f'plugin "{plugin_type}" failed without a message ({_how(end)})', context(plugin_type, verb))


def context(plugin_type: str, verb: str, stderr: bytes = b"", first: str = "") -> str:
    """The details of an error about a plugin: `first`, then who it was, then the end of its stderr."""
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
