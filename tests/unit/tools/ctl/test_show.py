"""`multusctl` shows messages in full, however narrow the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from multus_tools.ctl import offline, show
from multus_tools.tables import Listing

LONG = "the plugin is nowhere " * 20


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")


def explained(**changes: Any) -> dict[str, Any]:
    network = {"network": "web/a", "interface": "net1", "why": "x", "problem": "", "requests": {}, "unsupported": []}
    plugin = {"type": "ptp", "servedBy": "built-in", "config": {"name": LONG}}
    return {
        "pod": "web/p1",
        "problem": "",
        "attached": False,
        "container": "",
        "steps": [],
        "networks": [{**network, "plugins": [plugin], "calls": []}],
        "errors": [],
        "running": [],
        "since": 86400.0,
        **changes,
    }


def test_the_branches_of_an_explanation_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    found = explained()
    found["networks"][0]["problem"] = LONG
    show.explain(found)
    assert capsys.readouterr().out.count(LONG.strip()) == 2


def test_an_explanation_begins_with_the_error_of_the_last_add(capsys: pytest.CaptureFixture[str]) -> None:
    errors = [
        {"verb": "ADD", "began": 1.0, "code": 7, "text": "first"},
        {"verb": "ADD", "began": 2.0, "code": 7, "text": "second"},
        {"verb": "DEL", "began": 3.0, "code": 7, "text": "third"},
    ]
    show.explain(explained(errors=errors))
    assert capsys.readouterr().out.startswith("web/p1: its last ADD failed: second\n")
    show.explain(explained(errors=errors, attached=True))
    assert capsys.readouterr().out.startswith("web/p1: is attached")
    show.explain(explained(errors=errors[2:]))
    assert capsys.readouterr().out.startswith("web/p1: no ADD since the daemon's start at ")


def test_an_explanation_says_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    doing = {"what": 'plugin "fabric" of network web/a', "seconds": 12.2, "limit": 120.0}
    show.explain(explained(running=[{"request": "1a2b3c4d", "verb": "ADD", "seconds": 13.4, "doing": [doing]}]))
    assert capsys.readouterr().out.startswith(
        "web/p1: ADD has run for 13 s (request 1a2b3c4d)\n"
        '  in plugin "fabric" of network web/a for 12 s, up to 120 s\n'
        "  -> if it hangs, look at the log of the plugin's own agent"
    )


def container(**changes: Any) -> dict[str, Any]:
    attachment = {
        "network": "a-namespace-of-some-length/a-network-of-some-length",
        "interface": "net1",
        "addresses": ["10.1.2.3/24"],
        "mac": "02:00:00:00:00:01",
        "plugins": [{"type": "ptp", "servedBy": "built-in"}],
        "attached": True,
        "clusterNetwork": False,
        "hostInterfaces": [],
    }
    return {
        "container": "c0ffee",
        "pod": "a-namespace-of-some-length/a-pod-of-some-length",
        "problem": "",
        "advice": "",
        "setAside": 0.0,
        "since": 0.0,
        "check": None,
        "attachments": [attachment],
        **changes,
    }


@pytest.mark.parametrize(("columns", "has_addresses"), [("120", False), ("200", True)])
def test_names_of_attachments_are_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str, has_addresses: bool
) -> None:
    """A narrow terminal does without addresses rather than with half a name."""
    monkeypatch.setenv("COLUMNS", columns)
    show.attachments({"containers": [container()]}, Listing())
    shown = capsys.readouterr().out
    assert "a-namespace-of-some-length/a-pod-of-some-length" in shown
    assert "a-namespace-of-some-length/a-network-of-some-length" in shown
    assert ("02:00:00:00:00:01" in shown) is has_addresses
    assert max(map(len, shown.splitlines())) <= int(columns)


def test_a_pipe_gets_a_line_for_each_attachment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    show.attachments({"containers": [container()]}, Listing())
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["pod", "interface", "network"]
    assert all(row.startswith("a-namespace-of-some-length/a-pod-of-some-length   ") for row in rows)
    assert "─" not in "".join(rows)
    assert any("02:00:00:00:00:01" in row for row in rows)


@pytest.mark.parametrize("served_by", ["built-in", "/opt/cni/bin/ptp"])
def test_a_plugin_that_is_built_in_says_so(
    served_by: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    found = container()
    found["attachments"][0]["plugins"][0]["servedBy"] = served_by
    show.attachments({"containers": [found]}, Listing())
    assert ("built-in" in capsys.readouterr().out) is (served_by == "built-in")


def test_what_was_set_aside_says_since_when_why_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    left = container(problem="set aside: port 7 is locked", advice="do this", setAside=86400.0)
    show.leaks({"containers": [left]}, Listing(headers=False))
    assert capsys.readouterr().out.splitlines()[0].endswith("   set aside")
    show.leaks({"containers": [left]}, Listing(headers=False, wide=True))
    *_, problem, advice = capsys.readouterr().out.rstrip().split("   ")
    assert problem.startswith("since 1970-01-0")
    assert (problem.endswith("set aside: port 7 is locked"), advice) == (True, "do this")


def test_an_error_of_the_status_says_when_it_was_last_and_of_which_pod(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "moment", lambda seconds: f"at {seconds}")
    monkeypatch.setenv("COLUMNS", "100")
    error = {"verb": "ADD", "code": 7, "cause": "no network", "count": 3, "last": 86400.5, "pod": "web/p1"}
    show.status(
        {
            "podsGetNetworks": "in part",
            "because": "found late; add NET_BROADCAST",
            "ready": True,
            "version": "1",
            "startedAt": 1.0,
            "gates": {},
            "primary": {"wanted": False},
            "cluster": {"informers": [], "pendingStatuses": 0},
            "degraded": {"interfaces": "found late; add NET_BROADCAST"},
            "behind": {},
            "requests": {"limit": 0},
            "processes": {"limit": 0},
            "containers": 0,
            "spooled": 0,
            "leftovers": 0,
            "broken": 0,
            "errors": [error],
        }
    )
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert shown.startswith("pods of this node get their networks: in part: found late\n  -> add NET_BROADCAST\n")
    assert "interfaces: found late; add NET_BROADCAST" in shown
    assert rows[1:] == [["3", "ADD", "no network (7)", "at 86400.5"], ["", "", "", "web/p1"]]


def test_an_explanation_shows_each_message_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cause = 'failed to find plugin "fabric" in path [/opt/cni/bin] (network="web/a" interface="net1")'
    text = f"{cause} (pod web/p1); install the plugin on the node"
    found = explained(code=7, problem=text, steps=[{"what": "plugins of web/a", "result": "", "problem": text}])
    found["networks"][0]["problem"] = cause
    found["errors"] = [{"verb": "ADD", "began": number, "code": 7, "text": text} for number in range(5)]
    show.explain(found)
    shown = capsys.readouterr().out
    assert (shown.count("failed to find plugin"), shown.count("install the plugin")) == (1, 1)
    assert "  no plugins of web/a\n" in shown
    assert "ADD: see above (5 times)\n" in shown


def test_the_doctor_says_each_evidence_and_advice_once(capsys: pytest.CaptureFixture[str]) -> None:
    finding = {"check": "records", "severity": "warning", "fix": ""}
    show.doctor(
        {
            "findings": [
                {**finding, "subject": subject, "evidence": evidence, "advice": advice}
                for subject, evidence, advice in (
                    ("c1", "its netns is gone", "wait"),
                    ("c2", "its netns is gone", "wait"),
                    ("c3", "is 0", "set a"),
                    ("c4", "is 0", "set b"),
                    ("c5", "failed 3 times", "see leaks"),
                    ("c6", "failed 4 times", "see leaks"),
                )
            ]
        }
    )
    assert capsys.readouterr().out == (
        "warning records: c1\nwarning records: c2\n  its netns is gone\n  -> wait\n"
        "warning records: c3\nwarning records: c4\n  is 0\n  -> set a\n  -> set b\n"
        "warning records: c5\n  failed 3 times\nwarning records: c6\n  failed 4 times\n  -> see leaks\n"
    )


def test_a_status_has_the_paths_of_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show.status(offline.status(tmp_path, "no file /host/etc/cni/net.d/10-cluster.conf"))
    shown = capsys.readouterr().out
    assert "no file /etc/cni/net.d/10-cluster.conf" in shown
    assert "/host" not in shown


def difference(**changes: Any) -> dict[str, Any]:
    return {
        "pod": "web/p1",
        "container": "c0ffee",
        "network": "web/blue",
        "interface": "net1",
        "difference": '"net1" is down',
        "repairable": True,
        "keep": "report",
        **changes,
    }


def test_each_difference_is_a_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    passed = [{"pod": "web/p2", "container": "c2", "problem": "a request is at work on it"}]
    passed += [{"pod": "", "container": "c3", "problem": "its record is damaged"}]
    gone = difference(difference="the plugin's CHECK fails", repairable=False, keep="off")
    show.drift({"compared": 1, "differences": [difference(), gone], "passedOver": passed}, Listing())
    shown = capsys.readouterr()
    rows = [line.split() for line in shown.out.splitlines()]
    assert rows[1][:3] == ["web/p1", "net1", "web/blue"]
    assert (rows[1][-2:], rows[2][-2:]) == (["yes", "report"], ["no", "off"])
    assert "the plugin's CHECK fails" in shown.out
    assert "web/p2 is not compared: a request is at work on it" in shown.err
    assert "container c3 is not compared: its record is damaged" in shown.err
    assert "nothing differs" not in shown.err


def test_without_a_difference_it_is_said_how_many_were_compared(capsys: pytest.CaptureFixture[str]) -> None:
    show.drift({"compared": 7, "differences": [], "passedOver": []}, Listing())
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "nothing differs; containers compared: 7\n")


@pytest.mark.parametrize(
    ("dry_run", "left", "words"),
    [
        (True, True, ['"net1" is down: would be repaired', "the port is gone: can't be repaired: make the pod anew"]),
        (False, False, ['"net1" is down: repaired', "the port is gone: still so"]),
        (False, True, ['"net1" is down: still so', "the port is gone: still so", "the bridge is away"]),
    ],
)
def test_a_repair_says_what_became_of_each_difference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, dry_run: bool, left: bool, words: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    found = [difference(), difference(difference="the port is gone", repairable=False)]
    remaining = found if left else found[1:]
    errors = ["the bridge is away"] if left and not dry_run else []
    show.repair({"pod": "web/p1", "dryRun": dry_run, "found": found, "left": remaining, "errors": errors})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(words)
    for line, text in zip(lines, words, strict=True):
        assert line.endswith(text)


def test_a_repair_of_what_is_as_it_should_be(capsys: pytest.CaptureFixture[str]) -> None:
    show.repair({"pod": "web/p1", "dryRun": False, "found": [], "left": [], "errors": []})
    assert capsys.readouterr().out == "nothing differs in pod web/p1\n"
