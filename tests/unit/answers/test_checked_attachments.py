"""`multusctl attachments --check`: what CHECK says of each container, by the daemon's own answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from multus_daemon.answers.questions import Answers, Asked
from multus_daemon.runtime.timeline import Timelines
from multus_daemon.spec.cni.errors import CniError
from tests.unit.pod.conftest import NETNS, Engine, engine

__all__ = ["engine"]


def checked(engine: Engine) -> str:
    answers = Answers(engine.verbs.engine, Timelines(), pytest.fail, lambda: b"{}", Path("/no/such/spool"))
    (container,) = answers.by_method["GET"]["attachments"](Asked({"check": "true"}))["containers"]
    return str(container["check"])


@pytest.mark.parametrize(
    ("gone", "words"), [("interface", 'interface "eth0" is not there'), ("namespace", "is no network namespace")]
)
def test_it_looks_into_the_namespace_on_record(engine: Engine, gone: str, words: str) -> None:
    engine.interface("eth0", "kube-system/cluster", "10.0.0.2/24")
    engine.links.observed["eth0"] = engine.runner.results["kube-system/cluster"]
    engine.verbs.add(engine.request())
    engine.links.namespaces[NETNS] = {"lo", "eth0"}
    assert checked(engine) == ""
    assert engine.runner.order[-1] == ("ADD", "kube-system/cluster"), "no program runs"
    if gone == "interface":
        engine.links.namespaces[NETNS] = {"lo"}
    else:
        del engine.links.namespaces[NETNS]
    assert words in checked(engine)


def test_what_a_plugin_says_counts(engine: Engine) -> None:
    engine.verbs.add(engine.request())
    engine.overlay["strictCheck"] = True
    engine.runner.fail["CHECK", "kube-system/cluster"] = CniError("the route is gone")
    assert "the route is gone" in checked(engine)
