"""The chart, rendered by the real helm."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import yaml

from tests.e2e import build_tools
from tests.repo.manifests import CHART

CASES: Final[dict[str, dict[str, Any]]] = {
    "default": {},
    "metrics": {
        "image": {"repository": "registry.example/multus-daemon", "digest": "sha256:" + "0123456789abcdef" * 4},
        "imagePullSecrets": [{"name": "registry"}],
        "config": {"metricsPort": 9091, "logLevel": "debug", "clusterNetwork": "net"},
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "interval": "15s"},
        "priorityClassName": "multus",
        "priorityClass": {"create": True},
    },
    "metrics-authorization": {
        "metrics": {"tls": {"secretName": "multus-metrics-tls"}, "authorization": True},
        "podMonitor": {
            "enabled": True,
            "tlsConfig": {
                "ca": {"secret": {"name": "multus-metrics-tls", "key": "ca.crt"}},
                "serverName": "multus-metrics.kube-system.svc",
            },
            "authorization": {"credentials": {"name": "multus-scraper", "key": "token"}},
        },
    },
    "placement": {
        "daemonSet": {
            "name": "multus",
            "nodeSelector": {"kubernetes.io/os": "linux", "net": "yes"},
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}]
                    }
                }
            },
            "tolerations": [{"key": "a", "operator": "Exists"}],
            "updateStrategy": {"type": "OnDelete"},
            "podAnnotations": {"a": "b"},
            "privileged": True,
            "env": [{"name": "KUBERNETES_SERVICE_HOST", "value": "192.0.2.1"}],
            "extraHostPaths": {"ovs": "/run/openvswitch"},
        },
        "paths": {"binDir": "/usr/lib/cni"},
        "serviceAccount": {"name": "other", "annotations": {"a": "b"}},
        "crd": {"install": False},
    },
    "certificates-k3s": {"distribution": "k3s", "perNodeCertificates": {"enabled": True, "duration": "1h"}},
    "webhook": {
        "webhook": {
            "enabled": True,
            "replicas": 3,
            "tls": {"secretName": "own", "caBundle": "Q0E="},
            "injector": {"enabled": True},
            "networkPolicy": {"from": [{"ipBlock": {"cidr": "192.0.2.0/24"}}], "to": [{"namespaceSelector": {}}]},
        }
    },
    "webhook-cert-manager": {
        "webhook": {"enabled": True, "certManager": {"enabled": True}, "injector": {"enabled": True}}
    },
    "addresses": {"addresses": {"enabled": True}},
    "startup-taint": {"startupTaint": {"enabled": True}},
    "uninstall-openshift": {"distribution": "openshift", "uninstall": {"enabled": True, "purge": True}},
}
"""Values that together use every branch of the templates."""

_DISTRIBUTIONS: Final = CHART.parents[1] / "docs" / "distributions.md"
OF_OTHERS: Final[list[dict[str, Any]]] = [
    yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", _DISTRIBUTIONS.read_text(), re.M | re.S)
]
"""Values of the documentation, in the place of other people's packages."""
CASES.update({f"of-others-{number}": values for number, values in enumerate(OF_OTHERS)})


class ChartError(Exception):
    """helm refused; the message is what it said."""


def helm(*arguments: str | Path, stdin: str = "") -> str:
    """Run helm and return its output. Raises ChartError, `build_tools.ToolError`."""
    done = subprocess.run(
        [build_tools.find("helm"), *arguments], input=stdin, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise ChartError(done.stderr + done.stdout)
    return done.stdout


def template(values: dict[str, Any], namespace: str = "kube-system") -> str:
    """Run `helm template` as the documentation shows it."""
    return helm("template", "multus", CHART, "--namespace", namespace, "--values", "-", stdin=json.dumps(values))


def objects(values: dict[str, Any], namespace: str = "kube-system") -> list[dict[str, Any]]:
    """The objects of the chart with these values."""
    return [item for item in yaml.safe_load_all(template(values, namespace)) if item]
