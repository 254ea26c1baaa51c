"""Find faults in manifests and configurations before they are applied: the place, the fault, the likely intention.

    {"schema": "multusctl.validate/v1", "objects": 3, "errors": 1, "warnings": 0,
     "findings": [{"file": "net.yaml", "line": 9, "column": 7, "severity": "error" or "warning", "check": "plugin-key",
       "subject": "NetworkAttachmentDefinition default/blue", "key": "ipam.rangestart2", "problem": …, "advice": …}],
     "passedOver": [{"file": "values.yaml", "why": …}]}

`line` and `column`, from 1, are those of the key, or of the object if no key is known. `key` is its path in the object,
or in the JSON text that the object carries. The rules are those of the readers that an ADD uses; nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from multus_daemon.diagnosis.validate import objects, source
from multus_daemon.diagnosis.validate.configs import Plugins
from multus_daemon.diagnosis.validate.objects import Objects
from multus_daemon.diagnosis.validate.report import SCHEMA, Finding, Report
from multus_daemon.diagnosis.validate.source import Source, UnreadableError
from multus_daemon.settings import Settings
from multus_daemon.spec.nad.definition import NetworkAttachmentDefinition

__all__ = ["SCHEMA", "Finding", "Report", "of", "of_object"]

_OURS = ("cni.cncf.io", "multus", "cniVersion")
"""Words of which a file that concerns Multus has at least one."""


def of(files: Iterable[tuple[str, bytes]], *, settings: Settings | None = None, bin_dirs: Sequence[str] = ()) -> Report:
    """Check files, each with its name.

    `settings`: those of the daemon, for the rules of isolation, unless a file has them. `bin_dirs`: directories of
    plugin binaries; if empty, every binary is taken to exist.
    """
    report = Report()
    found = Objects(report, Plugins(bin_dirs), settings)
    for name, data in files:
        _check(report, found, name, data)
    found.together()
    return report


def of_object(data: bytes, settings: Settings, others: Mapping[tuple[str, str], NetworkAttachmentDefinition]) -> Report:
    """Check one object, as JSON, that is not in a file; `others`: the existing NetworkAttachmentDefinitions.

    A finding's `file` is the path of the string that contains its place; empty if there is none.
    """
    report = Report()
    found = Objects(report, Plugins(), settings, others)
    try:
        for document in source.documents(Source("", data, is_file=False)):
            found.document(document)
    except UnreadableError as error:
        report.add(Finding("", error.place, "error", "syntax", "", "", str(error), ""))
    found.together()
    return report


def _check(report: Report, found: Objects, name: str, data: bytes) -> None:
    before = report.objects
    try:
        for document in source.documents(Source(name, data)):
            found.document(document)
            if report.objects > objects.OBJECTS_MAX:
                raise UnreadableError(f"more than {objects.OBJECTS_MAX} objects", document.place())
    except UnreadableError as error:
        if report.objects == before and not any(word.encode() in data for word in _OURS):
            report.passed_over.append((name, f"{error}, and nothing of Multus' is in it"))
            return
        advice = "a template? render it first: helm template … | multusctl validate -" if b"{{" in data else ""
        report.add(Finding(name, error.place, "error", "syntax", "", "", str(error), advice))
        return
    if report.objects == before:
        report.passed_over.append((name, "nothing of Multus' is in it"))
