"""While the readiness indicator is not there no pod is attached; everything else goes on."""

from __future__ import annotations

import pytest

from multus_daemon.pod.engine import INDICATOR_GATE
from multus_daemon.spec.cni.errors import PluginNotAvailableError, TryAgainLaterError
from tests.unit.pod.conftest import Engine

REASON = "/run/ready (readinessindicatorfile) is not there: the primary network is not ready"


@pytest.mark.npwg("6.1.2")
@pytest.mark.conformance("server-11")
def test_no_add_begins(engine: Engine) -> None:
    engine.gates.close(INDICATOR_GATE, REASON)
    with pytest.raises(TryAgainLaterError, match="^/run/ready .readinessindicatorfile. is not there") as caught:
        engine.verbs.add(engine.request())
    assert caught.value.code == 11
    assert engine.runner.calls == []
    assert engine.store.containers() == []
    with pytest.raises(PluginNotAvailableError, match="is not there"):
        engine.verbs.status(b'{"cniVersion":"1.1.0","name":"multus"}')
    engine.gates.open(INDICATOR_GATE)
    engine.verbs.add(engine.request())
    assert engine.store.containers() == ["c1"]


@pytest.mark.npwg("6.1.2")
@pytest.mark.conformance("server-11")
def test_what_is_attached_is_served(engine: Engine) -> None:
    result = engine.verbs.add(engine.request())
    engine.gates.close(INDICATOR_GATE, REASON)
    assert engine.verbs.add(engine.request()) == result, "a repeated ADD changes nothing"
    engine.verbs.check(engine.request("CHECK"))
    engine.verbs.delete(engine.request("DEL"))
    assert engine.store.containers() == []


def test_other_gates_do_not_keep_from_an_add(engine: Engine) -> None:
    engine.gates.close("primary", "10-net.conf can't be read")
    engine.verbs.add(engine.request())
    assert engine.store.containers() == ["c1"]
