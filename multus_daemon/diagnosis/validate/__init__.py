"""What is wrong in manifests and configurations before anybody applies them: where, what, and what is meant.

    {"schema": "multusctl.validate/v1", "objects": 3, "errors": 1, "warnings": 0,
     "findings": [{"file": "net.yaml", "line": 9, "column": 7, "severity": "error" or "warning", "check": "plugin-key",
       "subject": "NetworkAttachmentDefinition default/blue", "key": "ipam.rangestart2", "problem": …, "advice": …}],
     "passedOver": [{"file": "values.yaml", "why": …}]}

`line` and `column` are of the key, from 1; of the object where no key can be told. `key` is its path in the object, or
in the JSON text that the object carries. The rules are those of the readers that an ADD goes through; nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from multus_daemon.diagnosis.validate import objects, source, together
from multus_daemon.diagnosis.validate.configs import Plugins
from multus_daemon.diagnosis.validate.objects import Objects
from multus_daemon.diagnosis.validate.report import SCHEMA, Finding, Report
from multus_daemon.diagnosis.validate.source import Source, UnreadableError
from multus_daemon.settings import Settings
from multus_daemon.spec.nad.definition import NetworkAttachmentDefinition

__all__ = ["SCHEMA", "Finding", "Report", "of", "of_object"]

_OURS = ("cni.cncf.io", "multus", "cniVersion")
"""What a file says in which something of ours could be."""


def of(
    files: Iterable[tuple[str, bytes]],
    *,
    settings: Settings | None = None,
    bin_dirs: Sequence[str] = (),
) -> Report:
    """Look at files, each with its name.

    `settings`: those of the daemon, where no configuration is among the files: isolation goes by them. `bin_dirs`:
    where plugin binaries are; with none, every binary counts as there.
    """
    report, plugins = Report(), Plugins(bin_dirs)
    found = Objects(report, plugins, settings)
    for name, data in files:
        _look(report, found, name, data)
    together.check(report, found, plugins)
    return report


def of_object(data: bytes, settings: Settings, others: Mapping[tuple[str, str], NetworkAttachmentDefinition]) -> Report:
    """Look at one object that is no file, as JSON; `others`: the NetworkAttachmentDefinitions that there are.

    A finding's `file` is then the path of the string that its place is in; empty where there is none.
    """
    report, plugins = Report(), Plugins()
    found = Objects(report, plugins, settings, others)
    try:
        for document in source.documents(Source("", data, is_file=False)):
            found.document(document)
    except UnreadableError as error:
        report.add_at("error", "syntax", "", Source("", b""), error.place, str(error))
    together.check(report, found, plugins)
    return report


def _look(report: Report, found: Objects, name: str, data: bytes) -> None:
    before = report.objects
    try:
        file = Source(name, data)
        for document in source.documents(file):
            found.document(document)
            if report.objects > objects.OBJECTS_MAX:
                raise UnreadableError(f"more than {objects.OBJECTS_MAX} objects", document.place())
    except UnreadableError as error:
        if report.objects == before and not any(word.encode() in data for word in _OURS):
            report.passed_over.append((name, f"{error}, and nothing of Multus' is in it"))
            return
        advice = "a template? render it first: helm template … | multusctl validate -" if b"{{" in data else ""
        nothing = Source(name, b"")
        report.add_at("error", "syntax", "", nothing, error.place, str(error), advice)
        return
    if report.objects == before:
        report.passed_over.append((name, "nothing of Multus' is in it"))
