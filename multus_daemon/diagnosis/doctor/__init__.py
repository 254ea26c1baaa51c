"""Find faults of this node, with the evidence and the command that repairs each. Nothing is changed.

    {"schema": "multusctl.doctor/v1", "findings": [
      {"check": "socket", "severity": "error", "warning" or "info", "subject": "/run/multus/multus.sock",
       "evidence": …, "advice": …, "fix": <what `--fix` would do; empty: nothing>}]}

An error keeps pods from starting or cuts their networks. A warning will, or resources leak. An info is worth knowing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from multus_daemon.diagnosis.doctor import machine, programs
from multus_daemon.diagnosis.doctor.finding import Finding, Node

__all__ = ["Finding", "Node", "examine", "to_object"]

_CHECKS: Final = (
    programs.daemon,
    programs.socket,
    programs.runtime_configuration,
    programs.shim,
    programs.plugins,
    programs.others,
    machine.kernel,
    machine.disk,
    machine.records,
    machine.leases,
    machine.links,
    machine.rules,
)


def examine(node: Node) -> list[Finding]:
    """Return all findings, errors first. A check that fails is a finding itself."""
    findings: list[Finding] = []
    for check in _CHECKS:
        try:
            findings += check(node)
        except OSError as error:
            name, subject = check.__name__.replace("_", " "), str(error.filename or "")
            evidence = f"can't be looked at: {error.strerror or error}"
            findings.append(Finding(name, "warning", subject, evidence, "run it as root"))
    order = {"error": 0, "warning": 1, "info": 2}
    return sorted(findings, key=lambda item: order[item.severity])


def to_object(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the answer."""
    return {"schema": "multusctl.doctor/v1", "findings": [item.to_object() for item in findings]}
