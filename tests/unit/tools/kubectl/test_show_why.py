"""`kubectl multus why` on a terminal of 80 columns: each message once, an ordinary cause within 12 lines."""

from __future__ import annotations

import re
import textwrap
from typing import Any, Final

import pytest

from multus_tools.kubectl import show

MOST_LINES: Final = 12
PASSED: Final = ("configuration", "pod", "annotation k8s.v1.cni.cncf.io/networks", "interfaces and devices")
EXEC: Final = "kubectl -n kube-system exec kube-multus-ds-8x2zq -c kube-multus -- multusctl"
DEFINITIONS: Final = (
    "kubectl get network-attachment-definitions -n default; define the network that is missing or correct it, or "
    "correct the annotation in the template of pod web"
)
CAUSES: Final = {
    "missing": (
        "network default/blue does not exist (pod default/web)",
        "create it, or correct the pod's annotation; no NetworkAttachmentDefinition of that name is known in "
        "namespace default",
        DEFINITIONS,
        "networks",
    ),
    "annotation": (
        "interface 'net1' is asked for twice: by element 0 (default/blue) and element 1 (default/red) (annotation "
        "k8s.v1.cni.cncf.io/networks) (pod default/web)",
        "give each an interface of its own in the pod's annotation, NETWORK@INTERFACE, or leave it out",
        "correct the annotation in the pod's template; recreate the pod",
        "networks",
    ),
    "plugin": (
        'failed to find plugin "fabric" in path [/opt/cni/bin] (network="default/blue" interface="net1") '
        "(pod default/web)",
        "install the plugin on the node (executable, in that path), or correct 'type' in the network's configuration",
        "kubectl get network-attachment-definitions -n default blue -o yaml; kubectl multus networks default/blue: "
        "which nodes lack a plugin",
        "plugins of default/blue",
    ),
    "addresses": (
        "failed to allocate for range 0: no IP addresses available in range set: 10.86.0.1-10.86.0.2 (plugin "
        'type="ptp" network="default/blue" interface="net1", ADD) (pod default/web)',
        "`multusctl attachments` shows who holds them, with `--leaks` those that nothing will delete; delete pods, or "
        "give the network a larger range",
        f"{EXEC} trace default/web; where addresses have run out, kubectl multus leaks",
        "",
    ),
    "busy": (
        "node is busy: ADD has waited 60 s to begin, with 256 requests before it (pod default/web)",
        "the runtime tries again by itself",
        f"the runtime tries again by itself; {EXEC} status",
        "",
    ),
    "away": (
        "the daemon of node node-a can't be asked: the daemon's pod kube-system/kube-multus-ds-8x2zq is Running: "
        "CrashLoopBackOff",
        "",
        "kubectl get pods -A -l app=multus -o wide --field-selector spec.nodeName=node-a; kubectl -n kube-system logs "
        "kube-multus-ds-8x2zq -c kube-multus",
        "",
    ),
}  # fmt: skip
"""Message, details, command, and the step of the plan that fails."""


def answer(message: str, details: str, command: str, step: str) -> dict[str, Any]:
    """The answer after five ADDs, each of which failed."""
    text = "; ".join(filter(None, (message, details)))
    steps = [{"what": what, "result": "found", "problem": ""} for what in PASSED]
    steps += [{"what": step, "result": "", "problem": f"pod default/web: {text}"}] if step else []
    requests = [
        {"verb": "ADD", "began": number, "seconds": 0.1, "error": text, "step": "planned"} for number in range(5)
    ]
    hint = "more: kubectl -n kube-system exec kube-multus-ds-x -- multusctl explain default/web"
    sandbox = 'Failed to create pod sandbox: rpc error: plugin type="multus" name="multus" failed (add): '
    event = {"when": "2026-11-22T10:00:00Z", "type": "Warning", "component": "multus", "count": 3}
    return {
        "pod": "default/web",
        "node": "node-a",
        "cause": message,
        "text": text,
        "advice": "; ".join(filter(None, (details, command))),
        "lacks": ["default/blue"],
        "attached": [],
        "differences": [],
        "compared": 0,
        "leftovers": [],
        "steps": steps,
        "requests": requests,
        "events": [
            {**event, "reason": "FailedAddingInterface", "message": f"{text}; {hint}"},
            *({**event, "reason": "FailedCreatePodSandBox", "message": sandbox + text, "count": 1} for _ in range(4)),
        ],
        "unanswered": [],
        "notes": [],
    }


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.parametrize("cause", CAUSES)
def test_an_ordinary_cause_is_shown_once_within_twelve_lines(cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(*CAUSES[cause])
    show.why(found)
    shown = capsys.readouterr().out
    lines = [piece for line in shown.splitlines() for piece in textwrap.wrap(line, 80, break_on_hyphens=False)]
    assert len(lines) <= MOST_LINES, "\n".join(lines)
    once = re.sub(r"\s+", " ", shown)
    assert [part for part in found["text"].split("; ") if once.count(part) != 1] == []
    assert [part for part in found["advice"].split("; ") if once.count(part) != 1] == []


def test_evidence_that_says_something_else_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(*CAUSES["missing"])
    found["requests"][1]["error"] = "record of container c1 can't be written (pod default/web); make room"
    found["events"].append({**found["events"][0], "reason": "NotReleased", "message": f"given up: {found['cause']}"})
    show.why(found)
    shown = capsys.readouterr().out
    assert "ADD: record of container c1 can't be written (pod default/web); make room\n" in shown
    assert "Event NotReleased: given up: see above (3 times)\n" in shown
    assert "ADD: see above (4 times)\n" in shown
    assert "Event FailedCreatePodSandBox: see above (4 times)\n" in shown
