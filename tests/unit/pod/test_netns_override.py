"""CNI_NETNS_OVERRIDE: who works for a request may take the daemon's own namespace for the container's, or may not."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest

from multus_daemon.pod.request import CniRequest
from multus_daemon.spec.cni.errors import CniError
from tests.unit.pod.conftest import NETNS, Engine

R = TypeVar("R", bound=CniRequest)

both = pytest.mark.parametrize("allowed", [False, True])


def called(engine: Engine) -> list[tuple[str, bool]]:
    """(verb, whether the plugins may work in the daemon's own namespace) of the calls since the last time."""
    found = [(call.verb, call.may_be_own) for call in engine.runner.calls]
    engine.runner.calls.clear()
    return found


@both
@pytest.mark.parametrize("at_once", [1, 4])
def test_every_plugin_of_every_verb_has_it(engine: Engine, allowed: bool, at_once: int) -> None:
    engine.attach_concurrency = at_once
    engine.verbs = engine.make_verbs()
    engine.declare("n1,n2")
    engine.overlay["strictCheck"] = True

    def asking(request: R) -> R:
        return replace(request, netns_override=allowed)

    engine.verbs.add(asking(engine.request()))
    assert called(engine) == [("ADD", allowed)] * 3
    engine.verbs.add_network(asking(engine.plug()))
    assert called(engine) == [("ADD", allowed)]
    engine.verbs.check_network(asking(engine.plug("CHECK")))
    assert called(engine) == [("CHECK", allowed)]
    engine.verbs.remove_network(asking(engine.plug("DEL")))
    assert called(engine) == [("DEL", allowed)]
    engine.verbs.check(asking(engine.request("CHECK")))
    assert called(engine) == [("CHECK", allowed)] * 3
    engine.verbs.delete(asking(engine.request("DEL")))
    assert called(engine) == [("DEL", allowed)] * 3


@both
def test_what_is_undone_has_it(engine: Engine, allowed: bool) -> None:
    engine.declare("n1")
    engine.runner.fail["ADD", "web/n1"] = CniError("no")
    with pytest.raises(CniError, match="no"):
        engine.verbs.add(replace(engine.request(), netns_override=allowed))
    assert called(engine) == [("ADD", allowed)] * 2 + [("DEL", allowed)] * 2


@both
def test_what_an_add_finds_left_over_has_it(engine: Engine, allowed: bool) -> None:
    """At the path on record, which may be another one."""
    engine.links.namespaces["/run/netns/later"] = {"lo"}
    engine.verbs.add(replace(engine.request(), netns_override=not allowed))
    called(engine)
    engine.verbs.add(replace(engine.request(netns="/run/netns/later"), netns_override=allowed))
    assert [call.sandbox.netns for call in engine.runner.calls] == [NETNS, "/run/netns/later"]
    assert called(engine) == [("DEL", allowed), ("ADD", allowed)]


@both
def test_the_next_request_of_the_thread_has_its_own(engine: Engine, allowed: bool) -> None:
    engine.verbs.add(replace(engine.request(), netns_override=allowed))
    engine.verbs.delete(replace(engine.request("DEL"), netns_override=not allowed))
    assert called(engine) == [("ADD", allowed), ("DEL", not allowed)]
