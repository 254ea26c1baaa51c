"""A node for the inputs of public bug reports, with a pod for each test.

Plugins of third parties are shell scripts: they print what the report's plugin printed, and keep what they were given.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from tests.e2e.node import NAD, Answer, Node
from tests.programs import needed, require

NETWORKS = "k8s.v1.cni.cncf.io/networks"
DEFAULT_NETWORK = "v1.multus-cni.io/default-network"
RESOURCE = "k8s.v1.cni.cncf.io/resourceName"
STATUS = "k8s.v1.cni.cncf.io/network-status"
_NUMBERS = itertools.count(1)
LINK = 'ip -n "$(basename "$CNI_NETNS")" link add "$CNI_IFNAME" type bridge'


class Site:
    """A pod of a namespace of its own, and the networks in that namespace."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.namespace = f"t{next(_NUMBERS)}"
        self.pod = "web"
        self.container = f"c-{self.namespace}"
        self.netns = node.add_netns()

    def plugin(self, name: str, result: Mapping[str, Any] | str | None = None, commands: str = LINK) -> str:
        """Install a plugin; its type.

        At ADD it runs `commands`, then prints `result`, with variables in it, or one that names its link.
        """
        plugin_type = f"{self.namespace}-{name}"
        plain = {"interfaces": [{"name": "$CNI_IFNAME", "sandbox": "$CNI_NETNS"}]} if result is None else result
        text = plain if isinstance(plain, str) else json.dumps({"cniVersion": "1.0.0", **plain})
        kept = shlex.quote(str(self.node.root / plugin_type))
        script = f"""#!/bin/sh
set -e
PATH=/usr/sbin:/sbin:/usr/bin:/bin
cat >{kept}.$CNI_COMMAND
env >{kept}.$CNI_COMMAND.env
[ "$CNI_COMMAND" = ADD ] || exit 0
{commands}
cat <<END
{text}
END
"""
        (self.node.bin_dir / plugin_type).write_text(script)
        (self.node.bin_dir / plugin_type).chmod(0o755)
        return plugin_type

    def given(self, name: str, verb: str = "ADD") -> dict[str, Any]:
        """Return the configuration that a call of the plugin had on stdin."""
        config: dict[str, Any] = json.loads((self.node.root / f"{self.namespace}-{name}.{verb}").read_text())
        return config

    def variables(self, name: str, verb: str = "ADD") -> dict[str, str]:
        """Return the environment of a call of the plugin."""
        text = (self.node.root / f"{self.namespace}-{name}.{verb}.env").read_text()
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def called(self, name: str, verb: str) -> bool:
        """Report whether the plugin got the verb."""
        return (self.node.root / f"{self.namespace}-{name}.{verb}").exists()

    def network(self, name: str, config: Mapping[str, Any] | str, **annotations: str) -> None:
        """Declare a NetworkAttachmentDefinition; an empty text is none in the object."""
        text = config if isinstance(config, str) else json.dumps(config)
        metadata = {"namespace": self.namespace, "name": name, "annotations": annotations}
        self.node.manifest({**NAD, "metadata": metadata, "spec": {"config": text} if text else {}})

    def vendor(self, name: str, result: Mapping[str, Any] | str | None = None, **config: Any) -> None:
        """Declare a network of one plugin of the same name, which prints `result`."""
        self.network(name, {"cniVersion": "1.0.0", "name": name, "type": self.plugin(name, result), **config})

    def ipam(self, *subnets: str, **more: Any) -> dict[str, Any]:
        """Return host-local's configuration with a range for each subnet."""
        ranges = [[{"subnet": subnet}] for subnet in subnets]
        return {"type": "host-local", "ranges": ranges, "dataDir": str(self.node.networks_dir), **more}

    def routed(self) -> None:
        """Declare `cluster`, which has the default routes of both families, and `lan` beside it."""
        anywhere = [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
        cluster = self.ipam("10.244.1.0/24", "fd00:244::/64", routes=anywhere)
        self.network("cluster", {"cniVersion": "1.0.0", "type": "ptp", "ipam": cluster})
        self.network("lan", {"cniVersion": "1.0.0", "type": "ptp", "ipam": self.ipam("10.0.4.0/24", "2001:db8:4::/64")})

    def inside(self, program: str, *arguments: str) -> None:
        """Run a program in the pod's namespace."""
        command = [needed("ip"), "netns", "exec", self.netns.rpartition("/")[2], needed(program), *arguments]
        subprocess.run(command, check=True)

    def allocate(self, devices: Mapping[str, Any]) -> None:
        """Write the kubelet's checkpoint: the device ids of the pod by resource."""
        entries = [{"PodUID": "uid-web", "ResourceName": key, "DeviceIDs": {"0": ids}} for key, ids in devices.items()]
        path = self.node.root / "kubelet" / "device-plugins" / "kubelet_internal_checkpoint"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"Data": {"PodDeviceEntries": entries}}))

    def declare(self, networks: str | None = None, default: str = "", others: Mapping[str, str] = {}) -> None:
        """Declare the pod; `default`: a network of its namespace, or the text of the annotation."""
        named = f"{self.namespace}/{default}" if default and "[" not in default else default
        asked = {NETWORKS: networks, DEFAULT_NETWORK: named or None}
        found = {key: value for key, value in asked.items() if value is not None} | dict(others)
        metadata = {"namespace": self.namespace, "name": self.pod, "uid": "uid-web", "annotations": found}
        self.node.manifest({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}})

    def call(self, verb: str, stdin: Mapping[str, Any] = {}, **variables: str | None) -> Answer:
        """Run the shim; `stdin`: more keys of the runtime's configuration; `variables`: None removes one."""
        env: dict[str, str | None] = {
            **self.node.environment(verb, self.container, self.netns, self.pod, self.namespace)
        }
        env |= variables
        config = {key: value for key, value in {**json.loads(self.node.stdin), **stdin}.items() if value is not None}
        return self.node.run_shim(
            {key: value for key, value in env.items() if value is not None}, json.dumps(config).encode()
        )

    def add(self, networks: str | None = None, default: str = "", stdin: Mapping[str, Any] = {}) -> Any:
        """Start the pod; the result of its cluster network."""
        self.declare(networks, default)
        answer = self.call("ADD", stdin)
        assert answer.code == 0, answer.stdout
        return answer.json

    def plug(self, verb: str, network: str, interface: str) -> tuple[int, bytes]:
        """Ask the daemon as multus-dynamic-networks-controller does, with the network's configuration and its name."""
        path = self.node.manifests / f"networkattachmentdefinition-{self.namespace}-{network}.yaml"
        config = json.dumps({"name": network, **json.loads(yaml.safe_load(path.read_text())["spec"]["config"])})
        env = self.node.environment(verb, self.container, self.netns, self.pod, self.namespace)
        body = {"env": {**env, "CNI_IFNAME": interface}, "config": base64.b64encode(config.encode()).decode()}
        return self.node.ask("POST", "/delegate", json.dumps(body).encode())

    def refused(self, networks: str | None = None, default: str = "") -> str:
        """Return the error of an ADD that fails and leaves nothing."""
        self.declare(networks, default)
        answer = self.call("ADD")
        assert answer.code != 0, answer.stdout
        assert self.call("DEL").code == 0
        assert not self.record.exists()
        return f"{answer.json['msg']} {answer.json.get('details', '')}"

    @property
    def record(self) -> Any:
        """Path of the container's record."""
        return self.node.cni_dir / "attachments" / f"{self.container}.json"

    @property
    def status(self) -> list[dict[str, Any]]:
        """The pod's network-status."""
        path = self.node.manifests / "status" / self.namespace / f"{self.pod}.yaml"
        entries: list[dict[str, Any]] = json.loads(yaml.safe_load(path.read_text())["metadata"]["annotations"][STATUS])
        return entries

    def links(self) -> list[str]:
        """Names of the links in the pod, without loopback."""
        return [name for name in self.node.links(self.netns) if name != "lo"]

    def default_routes(self, family: str = "-4") -> list[tuple[str, str]]:
        """Return interface and gateway of the pod's default routes."""
        return [
            (item["dev"], item.get("gateway", ""))
            for item in self.node.ip(family, "route", "show", "default", netns=self.netns)
        ]


@pytest.fixture(scope="session")
def shared_node() -> Iterator[Node]:
    """A running node whose cluster network `cluster` is of the plugin `primary`."""
    if os.geteuid() != 0:
        pytest.skip("needs root: run as root, or under `unshare -Urnm`")
    require("ip")
    with Node() as node:
        node.settings["kubeletDir"] = str(node.root / "kubelet")
        primary = Site(node)
        primary.namespace = "kube-system"
        primary.vendor("cluster")
        node.start()
        yield node


@pytest.fixture
def site(shared_node: Node) -> Iterator[Site]:
    """A pod and the networks that a test declares."""
    made = Site(shared_node)
    yield made
    made.call("DEL")
    shared_node.remove_netns(made.netns)
