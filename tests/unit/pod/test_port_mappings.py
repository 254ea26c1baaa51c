"""A pod may request a limited number of ports of the host."""

from __future__ import annotations

import json
from typing import Any

import pytest

from multus_daemon.spec.cni.errors import InvalidNetworkConfigError
from tests.unit.pod.conftest import Engine


def ports(number: int, start: int = 1) -> list[dict[str, Any]]:
    return [{"hostPort": port, "containerPort": 80, "protocol": "tcp"} for port in range(start, start + number)]


def asking(*numbers: int) -> str:
    """An annotation with a network for each, with so many mappings."""
    return json.dumps([{"name": "n1", "portMappings": ports(number)} for number in numbers])


@pytest.mark.parametrize(
    ("runtime", "own", "count"), [(129, (), 129), (0, (129,), 129), (50, (50, 29), 129), (0, (2500,), 2500)]
)
def test_more_than_allowed_is_refused_before_anything_runs(
    engine: Engine, runtime: int, own: tuple[int, ...], count: int
) -> None:
    engine.stdin = {"runtimeConfig": {"portMappings": ports(runtime)}}
    engine.declare(asking(*own))
    with pytest.raises(InvalidNetworkConfigError) as caught:
        engine.verbs.add(engine.request())
    assert caught.value.msg.startswith(f"{count} portMappings of pod web/p1, and at most 128 are allowed")
    assert (engine.runner.order, engine.store.records) == ([], {})


def test_as_many_as_allowed(engine: Engine) -> None:
    engine.stdin = {"runtimeConfig": {"portMappings": ports(100)}}
    engine.declare(asking(20, 8))
    engine.verbs.add(engine.request())
