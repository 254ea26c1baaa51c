"""Reading what an upstream daemon has recorded of a container."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from multus_daemon.pod import upstream
from multus_daemon.spec.cni.names import ContainerId

PTP: dict[str, Any] = {"type": "ptp", "mtu": 1400}
TUNING: dict[str, Any] = {"type": "tuning"}


def encoded(value: dict[str, Any]) -> str:
    return base64.b64encode(json.dumps(value).encode()).decode()


@pytest.mark.parametrize(("beside", "expected"), [([], ["ptp"]), ([PTP], ["ptp"]), ([PTP, TUNING], ["ptp", "tuning"])])
def test_plugins_of_a_list_are_its_own_unless_others_came_from_a_folder_beside_it(
    beside: list[dict[str, Any]], expected: list[str]
) -> None:
    whole = {"cniVersion": "1.0.0", "name": "n", "plugins": [PTP]}
    listed = {"Name": "n", "Bytes": encoded(whole), "Plugins": [{"Bytes": encoded(item)} for item in beside]}
    data = json.dumps([{"CNINetworkConfigList": listed, "Name": "n", "Bytes": ""}]).encode()
    (attachment,) = upstream.from_delegates(ContainerId("c1"), data, (), 0.0).attachments
    assert [plugin.type for plugin in attachment.config.plugins] == expected
    assert attachment.config.plugins[0].fields["mtu"] == 1400
