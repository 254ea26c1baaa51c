"""What is wrong with this node, with the evidence and the command that mends it. Looks, and changes nothing.

    {"schema": "multusctl.doctor/v1", "findings": [
      {"check": "socket", "severity": "error", "warning" or "info", "subject": "/run/multus/multus.sock",
       "evidence": …, "advice": …, "fix": <what `--fix` would do; empty: nothing is safe to do>}]}

An error keeps pods from starting, or takes their networks; a warning will, or leaks; an info is worth knowing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from multus_daemon.diagnosis.doctor import leftovers, machine, programs
from multus_daemon.diagnosis.doctor.finding import Finding, Node

__all__ = ["SCHEMA", "Finding", "Node", "examine", "to_object"]

SCHEMA: Final = "multusctl.doctor/v1"
_CHECKS: Final = (
    programs.daemon,
    programs.socket,
    programs.runtime_configuration,
    programs.shim,
    programs.plugins,
    programs.others,
    machine.kernel,
    machine.disk,
    leftovers.records,
    leftovers.leases,
    leftovers.links,
    leftovers.rules,
)


def examine(node: Node) -> list[Finding]:
    """Every finding, errors first. A check that can't be made is a finding itself."""
    found: list[Finding] = []
    for check in _CHECKS:
        try:
            found += check(node)
        except OSError as error:
            name = check.__name__.replace("_", " ")
            subject = str(error.filename or "")
            found.append(
                Finding(name, "warning", subject, f"can't be looked at: {error.strerror or error}", "run it as root")
            )
    order = {"error": 0, "warning": 1, "info": 2}
    return sorted(found, key=lambda item: order[item.severity])


def to_object(findings: Sequence[Finding]) -> dict[str, Any]:
    """As the module's docstring has it."""
    return {"schema": SCHEMA, "findings": [item.to_object() for item in findings]}
