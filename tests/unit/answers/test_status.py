"""Errors of the last requests by cause."""

from multus_daemon.answers import status
from multus_daemon.runtime.timeline import Timelines


def kept(*requests: tuple[str, str, tuple[int, str] | None]) -> Timelines:
    timelines = Timelines()
    for verb, pod, error in requests:
        with timelines.of({"verb": verb, "pod": pod}) as item:
            item.end(error)
    return timelines


def test_errors_of_one_cause_are_one_whatever_pod_they_were_for():
    missing = "network a/b does not exist (pod default/{}); no such definition"
    found = status.errors(
        kept(
            ("ADD", "default/x", (7, missing.format("x"))),
            ("ADD", "default/ok", None),
            ("DEL", "default/z", (5, "record can't be read; the disk")),
            ("ADD", "default/y", (7, missing.format("y"))),
        )
    )
    assert [(item["verb"], item["code"], item["cause"], item["count"], item["pod"]) for item in found] == [
        ("ADD", 7, "network a/b does not exist", 2, "default/y"),
        ("DEL", 5, "record can't be read", 1, "default/z"),
    ]


def test_last_is_the_last_time_of_each_cause():
    timelines = list(kept(*(("ADD", f"default/{pod}", (7, pod[0])) for pod in ("a1", "b1", "a2", "c1"))))
    for item, began in zip(
        timelines, (1_700_000_000.1234, 1_700_000_001.5, 1_700_000_002.25, 1_700_000_003), strict=True
    ):
        item.began = began
    found = status.errors(timelines)
    # For equal counts the latest comes first.
    assert [(item["cause"], item["last"], item["pod"]) for item in found] == [
        ("a", 1_700_000_002.25, "default/a2"),
        ("c", 1_700_000_003, "default/c1"),
        ("b", 1_700_000_001.5, "default/b1"),
    ]
    assert status.errors(timelines[:1])[0]["last"] == 1_700_000_000.123


def test_only_the_most_frequent_are_told():
    requests = [("ADD", "p", (7, f"cause {number}")) for number in range(status.ERRORS_MAX + 5)]
    found = status.errors(kept(*requests, ("ADD", "p", (7, "cause 0"))))
    assert len(found) == status.ERRORS_MAX
    assert (found[0]["cause"], found[0]["count"]) == ("cause 0", 2)


def test_entries_of_the_spool_are_counted_and_those_under_way_are_not(tmp_path):
    assert status.entries_in(tmp_path / "none") == 0
    (tmp_path / "1-a").touch()
    (tmp_path / ".2-b").touch()
    (tmp_path / "rejected").mkdir()
    assert status.entries_in(tmp_path) == 1


def answer(parts, timelines=()):
    return status.of(parts, timelines, containers=0, leftovers=0, spooled=0)


def test_the_first_answer_is_whether_pods_get_their_networks():
    def found(*requests, gates=None, degraded=None, behind=None):
        informers = [{"resource": "networks", "staleSeconds": 9.0, "problem": behind}] if behind else []
        parts = status.Parts("1", 0.0, gates or {}, {}, {"informers": informers}, {}, {}, degraded=degraded or {})
        made = answer(parts, kept(*requests))
        return made["podsGetNetworks"], made["because"]

    missing = (7, "network a/b does not exist (pod default/x); no such definition")
    assert found() == ("yes", "")
    assert found(gates={"primary": "no file"}, degraded={"interfaces": "late"}) == ("no", "no file")
    assert found(degraded={"interfaces": "late"}) == ("in part", "late")
    assert found(behind="timeout") == ("in part", "networks: not in sync for 9 s: timeout")
    assert found(("ADD", "default/x", missing), ("ADD", "default/y", None)) == (
        "in part",
        "the last ADD of 1 pods failed: network a/b does not exist",
    )
    # The next ADD of the pod has succeeded; a DEL is no answer to the question.
    assert found(("ADD", "default/x", missing), ("ADD", "default/x", None), ("DEL", "default/y", missing))[0] == "yes"


def test_what_does_not_follow_the_cluster_says_since_when():
    def informer(stale_seconds, problem):
        return {"resource": "networks", "staleSeconds": stale_seconds, "problem": problem}

    def behind(*informers):
        cluster = {"informers": list(informers)}
        return answer(status.Parts("1", 0.0, {}, {}, cluster, {}, {}))["behind"]

    assert behind() == {}
    assert behind(informer(0.0, "")) == {}
    assert behind(informer(12.5, "timeout")) == {"networks": "not in sync for 12.5 s: timeout"}
    assert behind(informer(None, "refused")) == {"networks": "never listed: refused"}
    # A standalone daemon has files that can't be read.
    assert behind(informer(0.0, "a.yaml: not YAML")) == {"networks": "a.yaml: not YAML"}
