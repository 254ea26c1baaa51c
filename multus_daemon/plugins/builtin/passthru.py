"""`passthru`: does nothing and says so; the first plugin of the auxiliary chain (upstream's `cmd/passthru-cni`)."""

from __future__ import annotations

from multus_daemon.kernel.ops import Session
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.spec.cni.result import Result


def unsupported(call: Call) -> str:
    """Nothing is asked of it that it could fail to do."""
    return ""


def validate(call: Call) -> None:
    """Nothing is configured."""


def add(call: Call, session: Session) -> Result:
    """An empty result."""
    return Result()


def delete(call: Call, session: Session) -> None:
    """Nothing has been made."""


def check(call: Call, session: Session) -> None:
    """Nothing can be missing."""


def status(call: Call) -> None:
    """Always ready."""
