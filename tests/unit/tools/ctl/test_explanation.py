"""What `multusctl explain` shows of a daemon's answer."""

from __future__ import annotations

import json

from multus_tools.ctl import actions

SECRET = "s3cr3t-0f-s0meb0dy"


def test_an_explanation_has_no_secret() -> None:
    answer = {
        "steps": [
            {"what": "annotation k8s.v1.cni.cncf.io/networks", "result": f'[{{"password": "{SECRET}"}}]'},
            {"what": "network kube-system/n", "result": "kept"},
        ],
        "networks": [
            {
                "plugins": [{"type": "ptp", "config": {"mtu": 1500, "args": {"cni": {"password": SECRET}}}}],
                "requests": {"token": SECRET, "ips": ["10.1.0.2/24"]},
            }
        ],
    }
    actions.remove_secrets(answer)
    text = json.dumps(answer)
    assert SECRET not in text
    assert all(kept in text for kept in ("kept", "1500", "10.1.0.2/24", "annotation k8s.v1.cni.cncf.io/networks"))
