"""What annotations say of a running pod's networks: a value that is not known never changes anything."""

from __future__ import annotations

import pytest

from multus_daemon.spec.nad.following import HOTPLUG_ANNOTATION, KEEP_ANNOTATION, allows_none, is_followed, keep_of


@pytest.mark.parametrize(
    ("pod", "network", "kept"),
    [
        (None, None, "report"),
        ("repair", "off", "repair"),
        ("off", "repair", "off"),
        (None, "repair", "repair"),
        ("Repair", "off", "off"),
        ("true", "", "report"),
        (" repair", None, "report"),
    ],
)
def test_the_pods_word_goes_before_the_networks_and_that_before_the_nodes(
    pod: str | None, network: str | None, kept: str
) -> None:
    of_pod, of_network = ({} if value is None else {KEEP_ANNOTATION: value} for value in (pod, network))
    assert keep_of(of_pod, of_network, "report") == kept


@pytest.mark.parametrize(
    ("value", "followed", "may_be_none"),
    [
        (None, True, False),
        ("true", True, False),
        ("detach-all", True, True),
        ("false", False, False),
        ("False", False, False),
        ("no", False, False),
        ("", False, False),
    ],
)
def test_which_pods_are_followed(value: str | None, followed: bool, may_be_none: bool) -> None:
    annotations = {} if value is None else {HOTPLUG_ANNOTATION: value}
    assert (is_followed(annotations), allows_none(annotations)) == (followed, may_be_none)
