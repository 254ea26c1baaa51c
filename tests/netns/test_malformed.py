"""Malformed configurations, by plugin and key, for built-ins and binaries, with engine, chain, record and kernel.

Each is refused by name before anything is recorded or run; or its ADD fails and the container is gone after one DEL.
GC succeeds afterwards.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.kernel.pod_netns import NodeNamespaces
from multus_daemon.plugins.builtin import (
    bandwidth,
    bridge_port,
    contract,
    host_local_config,
    macvlan,
    portmap,
    ptp,
    tuning,
)
from multus_daemon.plugins.builtin import flannel as builtin_flannel
from multus_daemon.plugins.builtin import static as builtin_static
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.plugins.plugin import HostTools
from multus_daemon.plugins.run import ListRunner
from multus_daemon.plugins.select import Mode
from multus_daemon.pod.store import FileStore
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from tests.namespaces import remove_netns, require_every_process
from tests.netns import outcome, reference
from tests.unit.pod.conftest import Engine, definition

SUBNET_ENV = "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET={}\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"
GOOD = {"type": "host-local", "subnet": "10.63.0.0/24"}
STATIC = {"type": "static", "addresses": [{"address": "10.64.0.2/24", "gateway": "10.64.0.1"}]}
NEEDED: dict[str, dict[str, Any]] = {
    "ptp": {},
    "bridge": {"bridge": "br63"},
    "macvlan": {"master": "up0"},
    "flannel": {},
}
"""Main plugins, with what they need."""


@dataclass(frozen=True)
class Case:
    """`config`: plugin objects of a list; `words`: what names it, any of them; `late`: only the ADD of
    the built-in finds it.

    `cni_args`: those of the pod's element. `builtin` is False where there is no built-in; `binary` where a binary
    would take it, or there is none.
    """

    config: list[dict[str, Any]]
    words: str
    _: KW_ONLY
    late: bool = False
    cni_args: dict[str, Any] | None = None
    version: str = "1.0.0"
    builtin: bool = True
    binary: bool = True
    subnet: str = "10.244.7.1/24"


def host_local() -> dict[str, Case]:
    """Sections `ipam`, each below a main plugin."""
    subnet = "10.63.0.0/24"
    sections: dict[str, tuple[dict[str, Any], str]] = {
        "subnet-host-bits": ({"subnet": "10.63.0.5/24"}, "host bits"),
        "subnet-no-length": ({"subnet": "10.81.0.0"}, "10.81.0.0"),
        "subnet-length-33": ({"subnet": "10.81.0.0/33"}, "10.81.0.0/33"),
        "subnet-netmask": ({"subnet": "10.81.0.0/255.255.255.0"}, "255.255.255.0"),
        "subnet-empty": ({"subnet": ""}, "CIDR"),
        "subnet-word": ({"subnet": "banana"}, "banana"),
        "subnet-number": ({"subnet": 5}, "subnet"),
        "subnet-list": ({"subnet": [subnet]}, "subnet"),
        "subnet-31": ({"subnet": "10.63.0.0/31"}, "too small"),
        "subnet-32": ({"subnet": "10.63.0.0/32"}, "too small"),
        "subnet-127": ({"subnet": "fd63::/127"}, "too small"),
        "subnet-v6-host-bits": ({"subnet": "fd63::1/64"}, "host bits"),
        "subnet-v6-length": ({"subnet": "fd63::/129"}, "fd63::/129"),
        "subnet-mapped": ({"subnet": "::ffff:10.63.0.0/120"}, "mismatch"),
        "start-outside": ({"subnet": subnet, "rangeStart": "10.64.0.9"}, "10.64.0.9"),
        "end-outside": ({"subnet": subnet, "rangeEnd": "10.64.0.9"}, "10.64.0.9"),
        "start-behind-end": ({"subnet": subnet, "rangeStart": "10.63.0.9", "rangeEnd": "10.63.0.3"}, "10.63.0.9"),
        "start-word": ({"subnet": subnet, "rangeStart": "first"}, "first"),
        "start-number": ({"subnet": subnet, "rangeStart": 9}, "rangeStart"),
        "start-other-family": ({"subnet": subnet, "rangeStart": "fd63::9"}, "fd63::9"),
        "end-list": ({"subnet": subnet, "rangeEnd": []}, "rangeEnd"),
        "gateway-word": ({"subnet": subnet, "gateway": "router"}, "router"),
        "gateway-length": ({"subnet": subnet, "gateway": "10.63.0.1/24"}, "10.63.0.1/24"),
        "gateway-number": ({"subnet": subnet, "gateway": 1}, "gateway"),
        "nothing": ({}, "range"),
        "ranges-empty": ({"ranges": []}, "range"),
        "ranges-object": ({"ranges": {}}, "ranges"),
        "ranges-word": ({"ranges": "all"}, "ranges"),
        "ranges-flat": ({"ranges": [{"subnet": subnet}]}, "ranges"),
        "ranges-empty-set": ({"ranges": [[]]}, "empty range set"),
        "ranges-empty-range": ({"ranges": [[{}]]}, "range set 0"),
        "ranges-of-words": ({"ranges": [[subnet]]}, "object"),
        "ranges-families": ({"ranges": [[{"subnet": subnet}, {"subnet": "fd63::/64"}]]}, "mixed"),
        "ranges-overlap": ({"ranges": [[{"subnet": subnet}, {"subnet": "10.63.0.128/25"}]]}, "overlap"),
        "sets-overlap": ({"ranges": [[{"subnet": subnet}], [{"subnet": "10.63.0.128/25"}]]}, "overlaps"),
        "subnet-and-ranges": ({"subnet": subnet, "ranges": [[{"subnet": subnet}]]}, "overlaps"),
        "route-no-length": ({"subnet": subnet, "routes": [{"dst": "10.9.0.0"}]}, "10.9.0.0"),
        "route-no-dst": ({"subnet": subnet, "routes": [{"gw": "10.63.0.1"}]}, "dst"),
        "route-gateway": ({"subnet": subnet, "routes": [{"dst": "0.0.0.0/0", "gw": "router"}]}, "router"),
        "route-dst-number": ({"subnet": subnet, "routes": [{"dst": 0}]}, "dst"),
        "routes-word": ({"subnet": subnet, "routes": "default"}, "routes"),
        "routes-of-words": ({"subnet": subnet, "routes": ["0.0.0.0/0"]}, "object"),
        "data-dir-number": ({"subnet": subnet, "dataDir": 5}, "dataDir"),
        "resolv-conf-number": ({"subnet": subnet, "resolvConf": 5}, "resolvConf"),
    }
    found = {}
    mains = list(NEEDED.items())[:3]
    for number, (name, (section, words)) in enumerate(sections.items()):
        main, needed = mains[number % 3]
        ipam = {"type": "host-local", **section}
        # As the only section where it is known which side refuses it: a wrong type of `dst` is not the reference's.
        found[f"{main}-host-local-{name}"] = Case([{"type": main, **needed, "ipam": ipam}], words)
    ptp = {"type": "ptp"}
    found |= {
        "host-local-no-such-resolv-conf": Case(
            [ptp | {"ipam": GOOD | {"resolvConf": "/nowhere/resolv.conf"}}], "resolv.conf", late=True
        ),
        "host-local-data-dir-is-a-file": Case([ptp | {"ipam": GOOD | {"dataDir": "/etc/hostname"}}], "", late=True),
        "host-local-route-mtu": Case(
            [ptp | {"ipam": GOOD | {"routes": [{"dst": "0.0.0.0/0", "mtu": "big"}]}}], "mtu", binary=False
        ),
        "host-local-unknown-key": Case([ptp | {"ipam": GOOD | {"subnets": "x"}}], "subnets", binary=False),
        "host-local-args-junk": Case([ptp | {"ipam": GOOD}], "junk", cni_args={"ips": ["junk"]}),
        "host-local-args-empty": Case([ptp | {"ipam": GOOD}], "ip", cni_args={"ips": [""]}),
        "host-local-args-number": Case([ptp | {"ipam": GOOD}], "ips", cni_args={"ips": 5}),
        "host-local-args-numbers": Case([ptp | {"ipam": GOOD}], "ips", cni_args={"ips": [5]}),
        "host-local-args-zone": Case([ptp | {"ipam": GOOD}], "fe80::1%eth0", cni_args={"ips": ["fe80::1%eth0"]}),
        "host-local-args-elsewhere": Case(
            [ptp | {"ipam": GOOD}], "10.1.1.1", cni_args={"ips": ["10.1.1.1"]}, late=True
        ),
        "host-local-two-in-0.2.0": Case(
            [ptp | {"ipam": {"type": "host-local", "ranges": [[{"subnet": f"10.6{n}.0.0/24"}] for n in (3, 4)]}}],
            "more than 1 address",
            version="0.2.0",
        ),
    }
    return found


def static() -> dict[str, Case]:
    """Sections `ipam` of static below bridge."""
    address = "10.64.0.2/24"
    sections: dict[str, tuple[dict[str, Any], str]] = {
        "address-word": ({"addresses": [{"address": "x"}]}, "x"),
        "address-no-length": ({"addresses": [{"address": "10.64.0.2"}]}, "10.64.0.2"),
        "address-number": ({"addresses": [{"address": 5}]}, "address"),
        "address-empty": ({"addresses": [{}]}, "address"),
        "gateway-word": ({"addresses": [{"address": address, "gateway": "router"}]}, "router"),
        "gateway-number": ({"addresses": [{"address": address, "gateway": 5}]}, "gateway"),
        "addresses-word": ({"addresses": address}, "addresses"),
        "addresses-of-words": ({"addresses": [address]}, "addresses"),
        "route-no-length": ({"addresses": [{"address": address}], "routes": [{"dst": "10.9.0.0"}]}, "10.9.0.0"),
        "routes-object": ({"addresses": [{"address": address}], "routes": {}}, "routes"),
        "dns-list": ({"addresses": [{"address": address}], "dns": []}, "dns"),
        "dns-nameservers": ({"addresses": [{"address": address}], "dns": {"nameservers": "1.1.1.1"}}, "nameservers"),
    }
    bridge: dict[str, Any] = {"type": "bridge", "bridge": "br63"}
    found = {
        f"static-{name}": Case([bridge | {"ipam": {"type": "static", **section}}], words)
        for name, (section, words) in sections.items()
    }
    return found | {
        "static-args-no-length": Case([bridge | {"ipam": STATIC}], "10.64.0.9", cni_args={"ips": ["10.64.0.9"]}),
        "static-args-junk": Case([bridge | {"ipam": STATIC}], "junk", cni_args={"ips": ["junk"]}),
        "static-nothing-in-0.2.0": Case([bridge | {"ipam": {"type": "static"}}], "IP addresses", version="0.2.0"),
    }


def mains() -> dict[str, Case]:
    """Keys of the main plugins themselves."""
    found = {}
    for main, needed in list(NEEDED.items())[:3]:
        config: dict[str, Any] = {"type": main, **needed, "ipam": GOOD}
        keys: dict[str, tuple[dict[str, Any], str]] = {
            "mtu-word": ({"mtu": "big"}, "mtu"),
            "mtu-fraction": ({"mtu": 1400.5}, "mtu"),
            "mtu-boolean": ({"mtu": True}, "mtu"),
            "dns-list": ({"dns": ["1.1.1.1"]}, "dns"),
            "dns-search": ({"dns": {"search": "x"}}, "search"),
            "ipam-type-number": ({"ipam": {"type": 5}}, "type"),
            "ipam-word": ({"ipam": "host-local"}, "ipam"),
            "ipam-unknown": ({"ipam": {"type": "no-such"}}, "no-such"),
        }
        if main != "macvlan":
            keys |= {
                "masq-word": ({"ipMasq": "yes"}, "ipMasq"),
                "masq-backend-number": ({"ipMasqBackend": 5}, "ipMasqBackend"),
            }
            found[f"{main}-masq-backend"] = Case(
                [config | {"ipMasq": True, "ipMasqBackend": "pigeon"}], "pigeon", binary=False
            )
        found |= {f"{main}-{name}": Case([config | key], words) for name, (key, words) in keys.items()}
        found[f"{main}-unknown-key"] = Case([config | {"no-such": 1}], "no-such", binary=False)
    link_keys: dict[str, list[tuple[dict[str, Any], str]]] = {
        "vlan": [({"vlanId": 5000}, "5000"), ({"vlanId": "x"}, "vlanId"), ({"master": ""}, "master")],
        "ipvlan": [({"mode": 5}, "mode"), ({"linkInContainer": "x"}, "linkInContainer"), ({"master": "x/y"}, "x/y")],
        "dummy": [({"ipam": {}}, "IPAM"), ({"ipam": 5}, "ipam")],
        "tap": [
            ({"owner": "root"}, "owner"),
            ({"multiQueue": "x"}, "multiQueue"),
            ({"mtu": 1.5}, "mtu"),
            ({"group": 2**32}, "group"),
        ],
    }
    for main, cases in link_keys.items():
        config = {"type": main, "ipam": GOOD, **({"master": "up0"} if "vlan" in main else {})}
        found |= {f"{main}-{number}": Case([config | key], words) for number, (key, words) in enumerate(cases)}
    vrf_keys: list[tuple[dict[str, Any], str]] = [
        ({}, "vrf name"),
        ({"vrfname": 5}, "vrfname"),
        ({"table": -1}, "table"),
    ]
    for number, (key, words) in enumerate(vrf_keys):
        found[f"vrf-{number}"] = Case([{"type": "ptp", "ipam": GOOD}, {"type": "vrf", **key}], words)
    found["ptp-no-ipam"] = Case([{"type": "ptp"}], "ipam")
    bridge: dict[str, Any] = {"type": "bridge", "bridge": "br63", "ipam": GOOD}
    bridge_keys: dict[str, tuple[dict[str, Any], str]] = {
        "vlan-5000": ({"vlan": 5000}, "5000"),
        "vlan-negative": ({"vlan": -1}, "-1"),
        "vlan-word": ({"vlan": "x"}, "vlan"),
        "trunk-word": ({"vlanTrunk": "x"}, "vlanTrunk"),
        "trunk-half": ({"vlanTrunk": [{"minID": 5}]}, "maxID"),
        "trunk-backwards": ({"vlanTrunk": [{"minID": 9, "maxID": 5}]}, "minID"),
        "trunk-id": ({"vlanTrunk": [{"id": 4095}]}, "trunk"),
        "trunk-max": ({"vlanTrunk": [{"minID": 1, "maxID": 5000}]}, "maxID"),
        "hairpin-and-promiscuous": ({"hairpinMode": True, "promiscMode": True}, "promiscuous"),
        "gateway-word": ({"isGateway": "yes"}, "isGateway"),
        "default-gateway-number": ({"isDefaultGateway": 1}, "isDefaultGateway"),
        "force-number": ({"forceAddress": 1}, "forceAddress"),
        "spoof-word": ({"macspoofchk": "yes"}, "macspoofchk"),
        "bridge-number": ({"bridge": 5}, "bridge"),
        "disabled-with-ipam": ({"disableContainerInterface": True}, "DisableContainerInterface"),
    }
    found |= {f"bridge-{name}": Case([bridge | more], words) for name, (more, words) in bridge_keys.items()}
    found["bridge-name-too-long"] = Case([bridge | {"bridge": "b" * 16}], "b" * 16)
    found["bridge-args-mac"] = Case([bridge], "aa:bb", cni_args={"mac": "aa:bb"})
    macvlan: dict[str, Any] = {"type": "macvlan", "master": "up0", "ipam": GOOD}
    macvlan_keys: dict[str, tuple[dict[str, Any], str]] = {
        "mode-number": ({"mode": 5}, "mode"),
        "master-number": ({"master": 5}, "master"),
        "mac": ({"mac": "aa:bb"}, "aa:bb"),
        "queue-negative": ({"bcqueuelen": -1}, "bcqueuelen"),
        "in-container-word": ({"linkInContainer": "yes"}, "linkInContainer"),
    }
    found |= {f"macvlan-{name}": Case([macvlan | more], words) for name, (more, words) in macvlan_keys.items()}
    found["macvlan-mode"] = Case([macvlan | {"mode": "sideways"}], "sideways")
    found["macvlan-no-master"] = Case([macvlan | {"master": "gone0"}], "gone0|link not found", late=True)
    found["macvlan-mtu-over-master"] = Case([macvlan | {"mtu": 9000}], "MTU", late=True)
    return found


def behind() -> dict[str, Case]:
    """Plugins behind a main one."""
    ptp: dict[str, Any] = {"type": "ptp", "ipam": GOOD}
    tuning: dict[str, tuple[dict[str, Any], str]] = {
        "sysctl-word": ({"sysctl": "x"}, "sysctl"),
        "sysctl-number": ({"sysctl": {"net.core.somaxconn": 5}}, "somaxconn|sysctl"),
        "mac": ({"mac": "aa:bb"}, "aa:bb"),
        "mtu-word": ({"mtu": "x"}, "mtu"),
        "promisc-word": ({"promisc": "x"}, "promisc"),
        "allmulti-number": ({"allmulti": 1}, "allmulti"),
        "queue-word": ({"txQLen": "x"}, "txQLen"),
        "data-dir-number": ({"dataDir": 5}, "dataDir"),
    }
    found = {f"tuning-{name}": Case([ptp, {"type": "tuning", **keys}], words) for name, (keys, words) in tuning.items()}
    found["tuning-foreign-sysctl"] = Case([ptp, {"type": "tuning", "sysctl": {"kernel.hostname": "x"}}], "kernel")
    limits: dict[str, tuple[dict[str, Any], str]] = {
        "rate-word": ({"ingressRate": "1M", "ingressBurst": 8000}, "ingressRate"),
        "rate-negative": ({"egressRate": -1, "egressBurst": 8000}, "egressRate"),
        "rate-alone": ({"ingressRate": 8000}, "burst must also be set"),
        "burst-alone": ({"egressBurst": 8000}, "rate must also be set"),
        "burst-5-gb": ({"ingressRate": 8000, "ingressBurst": 40 * 10**9}, "4GB"),
        "asked-for-word": ({"runtimeConfig": {"bandwidth": {"ingressRate": "1M"}}}, "ingressRate"),
    }
    found |= {
        f"bandwidth-{name}": Case([ptp, {"type": "bandwidth", **keys}], words) for name, (keys, words) in limits.items()
    }
    ports: dict[str, tuple[dict[str, Any], str]] = {
        "bit-99": ({"markMasqBit": 99}, "markMasqBit"),
        "bit-negative": ({"markMasqBit": -1}, "markMasqBit"),
        "bit-word": ({"markMasqBit": "x"}, "markMasqBit"),
        "bit-and-chain": ({"markMasqBit": 5, "externalSetMarkChain": "KUBE-MARK-MASQ"}, "externalSetMarkChain"),
        "chain-number": ({"externalSetMarkChain": 5}, "externalSetMarkChain"),
        "snat-word": ({"snat": "yes"}, "snat"),
        "conditions-word": ({"conditionsV4": "-s 10.0.0.0/8"}, "conditionsV4"),
        "conditions-numbers": ({"conditionsV6": [5]}, "conditionsV6"),
        "masq-all-word": ({"masqAll": "x"}, "masqAll"),
        "backend-number": ({"backend": 5}, "backend"),
        "mapping-no-port": ({"runtimeConfig": {"portMappings": [{"hostPort": 8080}]}}, "containerPort"),
        "mapping-word": ({"runtimeConfig": {"portMappings": ["8080:80"]}}, "portMappings"),
    }
    found |= {
        f"portmap-{name}": Case([ptp, {"type": "portmap", **keys}], words) for name, (keys, words) in ports.items()
    }
    found["portmap-backend"] = Case([ptp, {"type": "portmap", "backend": "pigeon"}], "pigeon")
    return found


def flannel() -> dict[str, Case]:
    """There is no reference binary here: built-in only."""
    keys: dict[str, tuple[dict[str, Any], str]] = {
        "delegate-word": ({"delegate": "bridge"}, "delegate"),
        "delegate-name": ({"delegate": {"name": "x"}}, "name"),
        "delegate-ipam": ({"delegate": {"ipam": {}}}, "ipam"),
        "delegate-type": ({"delegate": {"type": 5}}, "type"),
        "delegate-vlan": ({"delegate": {"vlan": 5000}}, "5000"),
        "delegate-mtu": ({"delegate": {"type": "ptp", "mtu": "big"}}, "mtu"),
        "delegate-unknown": ({"delegate": {"type": "no-such"}}, "no-such"),
        "no-subnet-file": ({"subnetFile": "/nowhere/subnet.env"}, "/nowhere/subnet.env"),
        "subnet-file-number": ({"subnetFile": 5}, "subnetFile"),
        "data-dir-number": ({"dataDir": 5}, "dataDir"),
        "ipam-routes": ({"ipam": {"routes": [{"dst": "10.9.0.0"}]}}, "10.9.0.0"),
        "ipam-data-dir": ({"ipam": {"dataDir": 5}}, "dataDir"),
        "ipam-type": ({"ipam": {"type": "no-such"}}, "no-such"),
    }
    found = {
        f"flannel-{name}": Case([{"type": "flannel", **more}], words, binary=False)
        for name, (more, words) in keys.items()
    }
    found["flannel-subnet-31"] = Case([{"type": "flannel"}], "too small", binary=False, subnet="10.244.7.1/31")
    return found


IMPOSSIBLE = {"nul": "/run/a\0b", "long": f"/dev/null/{'d/' * 2100}", "component": f"/run/{'c' * 256}"}
"""Paths that no file has. No plugin can make the beginning of the long one."""


def paths() -> dict[str, Case]:
    """Each key with a path, also where a plugin without a built-in calls the IPAM plugin."""
    found = {}
    for name, path in IMPOSSIBLE.items():
        for main, needed in list(NEEDED.items())[:3]:
            for key in ("dataDir", "resolvConf"):
                config = [{"type": main, **needed, "ipam": GOOD | {key: path}}]
                found[f"{main}-host-local-{key}-{name}"] = Case(config, key)
        for main in ("host-device", "ipvlan", "vlan"):
            config = [{"type": main, "device": "up0", "master": "up0", "vlanId": 5, "ipam": GOOD | {"dataDir": path}}]
            found[f"{main}-host-local-dataDir-{name}"] = Case(config, "dataDir", builtin=False)
        tuned: list[dict[str, Any]] = [{"type": "ptp", "ipam": GOOD}, {"type": "tuning", "mtu": 1400, "dataDir": path}]
        dhcp = [{"type": "macvlan", "master": "up0", "ipam": {"type": "dhcp", "daemonSocketPath": path}}]
        found |= {
            f"tuning-dataDir-{name}": Case(tuned, "dataDir"),
            f"macvlan-dhcp-daemonSocketPath-{name}": Case(dhcp, "daemonSocketPath", builtin=False),
        }
        for key, section in (("subnetFile", ""), ("dataDir", ""), ("dataDir", "ipam"), ("resolvConf", "ipam")):
            keys = {section: {key: path}} if section else {key: path}
            found[f"flannel-{section}{key}-{name}"] = Case([{"type": "flannel", **keys}], key, binary=False)
    return found


def nuls() -> dict[str, Case]:
    """Strings with a NUL, at which the kernel and programs would stop reading."""
    nul = "a\0b"
    ptp, bridge = ({"type": main, **NEEDED[main], "ipam": GOOD} for main in ("ptp", "bridge"))
    macvlan = {"type": "macvlan", "ipam": GOOD}
    address = {"address": "10.64.0.2/24"}
    sections: dict[str, dict[str, Any]] = {
        **{key: GOOD | {key: nul} for key in ("subnet", "rangeStart", "rangeEnd", "gateway")},
        "route": GOOD | {"routes": [{"dst": nul}]},
        "route-gw": GOOD | {"routes": [{"dst": "10.9.0.0/16", "gw": nul}]},
        "type": {"type": nul},
        "static-address": {"type": "static", "addresses": [{"address": nul}]},
        "static-length": {"type": "static", "addresses": [{"address": "10.64.0.2/24\0"}]},
        "static-gateway": {"type": "static", "addresses": [address | {"gateway": nul}]},
        "static-route": {"type": "static", "addresses": [address], "routes": [{"dst": nul}]},
    }
    words = "a\0b|/24\0|a\\x00b"
    found = {f"ptp-ipam-{name}-nul": Case([ptp | {"ipam": section}], words) for name, section in sections.items()}
    for name, keys in {"key": {"net.core.a\0b": "1"}, "value": {"net.core.somaxconn": "1\0"}}.items():
        found[f"tuning-sysctl-{name}-nul"] = Case([ptp, {"type": "tuning", "sysctl": keys}], "sysctl")
    found |= {
        "type-nul": Case([{"type": nul}], nul, binary=False),
        "name-nul": Case([ptp | {"name": nul}], "network name"),
        "version-nul": Case([ptp | {"cniVersion": "1.0.0\0"}], "version"),
        # The kernel stops reading at the NUL, so a binary takes another bridge, or another master, than is named.
        "bridge-bridge-nul": Case([bridge | {"bridge": nul}], nul, binary=False),
        "bridge-mac-nul": Case([bridge | {"runtimeConfig": {"mac": nul}}], "mac"),
        "bridge-masq-backend-nul": Case([bridge | {"ipMasq": True, "ipMasqBackend": nul}], "Backend", binary=False),
        "ptp-ips-nul": Case([ptp | {"runtimeConfig": {"ips": [nul]}}], "ip"),
        "macvlan-master-nul": Case([macvlan | {"master": "up0\0x"}], "master", binary=False),
        "macvlan-master-long": Case([macvlan | {"master": "x" * 128}], "master"),
        "macvlan-master-no-name": Case([macvlan | {"master": "up0:1"}], "master"),
        "macvlan-mac-nul": Case([macvlan | {"master": "up0", "mac": nul}], "mac"),
        "macvlan-mode-nul": Case([macvlan | {"master": "up0", "mode": nul}], "mode"),
        "tuning-mac-nul": Case([ptp, {"type": "tuning", "mac": nul}], "mac"),
        "flannel-delegate-nul": Case([{"type": "flannel", "delegate": {"type": nul}}], nul, binary=False),
        "flannel-bridge-nul": Case([{"type": "flannel", "delegate": {"bridge": nul}}], nul, binary=False),
        "flannel-ipam-nul": Case([{"type": "flannel", "ipam": {"type": nul}}], nul, binary=False),
    }
    return found


# v1.1.1 passes over the key.
OF_NEWER_BINARIES = (
    *("bridge-masq-backend-number", "ptp-masq-backend-number", "bridge-disabled-with-ipam"),
    *("bridge-trunk-word", "bridge-trunk-half", "bridge-trunk-backwards", "bridge-trunk-id", "bridge-trunk-max"),
    *("macvlan-queue-negative", "macvlan-in-container-word", "tuning-queue-word"),
    *("portmap-backend", "portmap-backend-number", "portmap-masq-all-word"),
)

CASES = host_local() | static() | mains() | behind() | flannel() | paths() | nuls()
SIDES = [
    pytest.param(name, mode, id=f"{name}-{mode}")
    for name, case in CASES.items()
    for mode in ("prefer", "off")
    if (case.builtin if mode == "prefer" else case.binary)
]


class Recording(FileStore):
    """Counts what is written down."""

    saved = 0

    def save(self, record: ContainerRecord, *, durable: bool = True) -> None:
        self.saved += 1
        super().save(record, durable=durable)


class Node:
    """An engine with everything real but the cluster, whose pod asks for the network `web/n1`."""

    def __init__(
        self, directory: Path, mode: Mode, tools: HostTools, *, bin_dirs: Sequence[Path] = (reference.DIRECTORY,)
    ) -> None:
        """`bin_dirs`: of the binaries; with `prefer` there are none."""
        self.directory = directory
        self.engine = Engine()
        cache = ResultCache(directory / "cni")
        bin_dirs = [directory / "no-binaries"] if mode == "prefer" else bin_dirs
        self.engine.runner = ListRunner(  # type: ignore[assignment]  # a real one serves as well
            outcome.dispatched(mode, tools, bin_dirs=bin_dirs), cache, ":".join(map(str, bin_dirs))
        )
        self.store = Recording(directory / "cni", cache)
        self.engine.store = self.store  # type: ignore[assignment]  # a real one serves as well
        self.engine.links = NodeNamespaces()  # type: ignore[assignment]  # a real one serves as well
        self.put("kube-system", "cluster", [{"type": "loopback"}], "1.0.0")
        self.engine.verbs = self.engine.make_verbs()

    def put(self, namespace: str, name: str, plugins: list[dict[str, Any]], version: str) -> None:
        """A NetworkAttachmentDefinition with these plugins, their files below the directory."""
        self.engine.cluster.put_network(definition(namespace, name, self._config(name, plugins, version)))

    def _config(self, name: str, plugins: list[dict[str, Any]], version: str) -> str:
        configured = [self._at_home(plugin) for plugin in plugins]
        config = {"cniVersion": version, "name": name, **configured[0]}
        if len(configured) > 1:
            config = {"cniVersion": version, "name": name, "plugins": configured}
        return json.dumps(config)

    def record(self, plugins: list[dict[str, Any]], netns: str, container: str = "c1", version: str = "1.0.0") -> None:
        """Write the record of an ADD that an older daemon began."""
        config = conf.parse(self._config("n1", plugins, version).encode())
        self.store.save(
            ContainerRecord(
                Sandbox(ContainerId(container), netns),
                IfName("eth0"),
                Namespace("web"),
                PodName("p1"),
                PodUid("u1"),
                (Attachment("web/n1", config, IfName("net1")),),
                created=1.0,
            )
        )

    def remove(self, way: str, netns: str) -> None:
        """Delete the container, by a DEL or by a GC that does not list it."""
        if way == "DEL":
            self.engine.verbs.delete(self.engine.request("DEL", netns=netns))
        else:
            require_every_process()
            self.gc()

    def _at_home(self, plugin: dict[str, Any]) -> dict[str, Any]:
        ipam = plugin.get("ipam")
        if isinstance(ipam, dict) and ipam.get("type") == "host-local":
            plugin = plugin | {"ipam": {"dataDir": str(self.directory / "leases")} | ipam}
        if plugin["type"] == "tuning":
            plugin = {"dataDir": str(self.directory / "tuning")} | plugin
        if plugin["type"] == "flannel":
            home = {"subnetFile": str(self.directory / "subnet.env"), "dataDir": str(self.directory / "flannel")}
            own = plugin.get("ipam", {})
            if isinstance(own, dict):
                own = {"dataDir": str(self.directory / "leases")} | own
            plugin = home | plugin | {"ipam": own}
        return plugin

    def ask_for(self, case: Case) -> None:
        (self.directory / "subnet.env").write_text(SUBNET_ENV.format(case.subnet))
        self.put("web", "n1", case.config, case.version)
        element = {"name": "n1", **({"cni-args": case.cni_args} if case.cni_args else {})}
        self.engine.declare(json.dumps([element]))

    def gc(self) -> None:
        self.engine.verbs.gc(
            json.dumps({"cniVersion": "1.1.0", "name": "multus", "cni.dev/valid-attachments": []}).encode()
        )

    def leases(self) -> list[str]:
        return sorted(path.name for path in (self.directory / "leases").rglob("*") if path.name[0].isdecimal())


@pytest.mark.parametrize(("name", "mode"), SIDES)
def test_it_is_refused_by_name_or_gone_after_one_del(
    name: str, mode: Mode, host: Any, make_netns: Callable[[], Any], tmp_path: Path, tools: HostTools
) -> None:
    case = CASES[name]
    types = [plugin["type"] for plugin in case.config]
    if mode == "off" and not reference.has("loopback", "host-local", *types):
        pytest.skip(f"no reference plugins {types}: {reference.HOW}")
    if mode == "off" and name in OF_NEWER_BINARIES and reference.is_old():
        pytest.skip("v1.1.1 passes over the key")
    host.batch("link add up0 type veth peer name up1", "link set up0 up")
    netns, node = make_netns(), Node(tmp_path, mode, tools)
    node.ask_for(case)
    request = node.engine.request(netns=netns.path)
    with pytest.raises(CniError) as caught:
        node.engine.verbs.add(request)
    said = str(caught.value)
    assert "web/n1" in said
    # Of JSON that is no configuration at all the network is named, and the key.
    assert re.search(r'plugin (type=)?"|CNI configuration|\(network web/n1\)', said)
    if mode == "prefer":
        assert any(words in said.lower() for words in case.words.lower().split("|"))
        assert bool(node.store.saved) is case.late, said
    node.engine.verbs.delete(node.engine.request("DEL", netns=netns.path))
    assert node.store.containers() == []
    assert netns.links() == set()
    assert node.leases() == []
    node.gc()


def test_the_table_is_large_enough() -> None:
    assert len(CASES) >= 230
    assert len(SIDES) >= 400


@pytest.mark.parametrize("name", [name for name in paths() if CASES[name].builtin])
def test_a_path_that_no_file_has_is_refused_with_its_key_first(
    name: str, host: Any, make_netns: Callable[[], Any], tmp_path: Path, tools: HostTools
) -> None:
    case = CASES[name]
    node = Node(tmp_path, "prefer", tools)
    node.ask_for(case)
    why = {"nul": "a NUL byte", "long": "more than 3583 bytes", "component": "more than 255 bytes"}[name.split("-")[-1]]
    with pytest.raises(InvalidNetworkConfigError, match=rf'^{case.words}: ".* is not a path: \w.* {why} \(plugin "'):
        node.engine.verbs.add(node.engine.request(netns=make_netns().path))


VALUES = {**IMPOSSIBLE, "word": "a\0b", "file": "/etc/hostname/x", "number": 2**70, "list": []}
"""Values that no key expects."""
PTP: dict[str, Any] = {"type": "ptp", "ipam": GOOD}
PORTS: dict[str, Any] = {"portMappings": [{"hostPort": 8063, "containerPort": 80, "protocol": "tcp"}]}


def known(module: Any) -> set[str]:
    return {*contract.COMMON_KEYS, *module.KEYS}


EVERY_KEY: dict[str, tuple[Iterable[str], Callable[[dict[str, Any]], list[dict[str, Any]]]]] = {
    "ptp": (known(ptp), lambda keys: [PTP | keys]),
    "bridge": (known(bridge_port), lambda keys: [{"type": "bridge", "bridge": "br63", "ipam": GOOD} | keys]),
    "macvlan": (known(macvlan), lambda keys: [{"type": "macvlan", "master": "up0", "ipam": GOOD} | keys]),
    "flannel": (known(builtin_flannel), lambda keys: [{"type": "flannel"} | keys]),
    "delegate": (known(bridge_port), lambda keys: [{"type": "flannel", "delegate": {"bridge": "br63"} | keys}]),
    "tuning": (known(tuning), lambda keys: [PTP, {"type": "tuning", "mtu": 1400} | keys]),
    "bandwidth": (known(bandwidth), lambda keys: [PTP, {"type": "bandwidth"} | keys]),
    "portmap": (known(portmap), lambda keys: [PTP, {"type": "portmap", "runtimeConfig": PORTS} | keys]),
    "loopback": (contract.COMMON_KEYS, lambda keys: [{"type": "loopback"} | keys]),
    "passthru": (contract.COMMON_KEYS, lambda keys: [PTP, {"type": "passthru"} | keys]),
    "host-local": (host_local_config.IPAM_KEYS, lambda keys: [PTP | {"ipam": GOOD | keys}]),
    "range": (
        host_local_config.RANGE_KEYS,
        lambda keys: [PTP | {"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.63.0.0/24"} | keys]]}}],
    ),
    "static": (builtin_static._IPAM_KEYS, lambda keys: [{"type": "bridge", "bridge": "br63", "ipam": STATIC | keys}]),
    "address": (
        builtin_static._ADDRESS_KEYS,
        lambda keys: [
            {"type": "bridge", "bridge": "br63", "ipam": STATIC | {"addresses": [{"address": "10.64.0.2/24"} | keys]}}
        ],
    ),
}
"""Each key of each built-in, below what the plugin needs."""


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("place", EVERY_KEY)
@pytest.mark.parametrize("mode", ["prefer", "off"])
def test_whatever_a_key_holds_nothing_is_left_after_one_del(
    mode: Mode, place: str, value: str, host: Any, make_netns: Callable[[], Any], tmp_path: Path, tools: HostTools
) -> None:
    known, configured = EVERY_KEY[place]
    types = {plugin["type"] for plugin in configured({})}
    if mode == "off" and not reference.has("loopback", "host-local", "static", *types):
        pytest.skip(f"no reference plugins {types}: {reference.HOW}")
    host.batch("link add up0 type veth peer name up1", "link set up0 up")
    netns, node = make_netns(), Node(tmp_path, mode, tools)
    for key in sorted(known):
        node.ask_for(Case(configured({key: VALUES[value]}), ""))
        with contextlib.suppress(CniError):
            node.engine.verbs.add(node.engine.request(netns=netns.path))
        node.engine.verbs.delete(node.engine.request("DEL", netns=netns.path))
        assert (node.store.containers(), netns.links(), node.leases()) == ([], set(), []), key
        node.gc()


@pytest.mark.parametrize("key", ["ips", "junk"])
def test_a_request_that_is_too_large_is_refused_and_leaves_no_record(
    key: str, host: Any, make_netns: Callable[[], Any], tmp_path: Path, tools: HostTools
) -> None:
    """A pod's author writes it, and the runtime tries again and again."""
    node = Node(tmp_path, "prefer", tools)
    node.ask_for(Case([{"type": "ptp", "ipam": GOOD}], "", cni_args={key: ["junk"], "more": "x" * 200 * 1024}))
    for container in ("c1", "c2", "c3"):
        with pytest.raises(CniError, match=r"^the pod's requests, up to network web/n1, have more than 65536 bytes"):
            node.engine.verbs.add(node.engine.request(netns=make_netns().path, container=container))
    assert node.store.containers() == []
    assert node.store.saved == 0


@pytest.mark.parametrize("way", ["DEL", "GC"])
@pytest.mark.parametrize("mode", ["prefer", "off"])
def test_a_record_that_an_older_daemon_could_not_remove_goes(
    mode: Mode, way: str, host: Any, make_netns: Callable[[], Any], tmp_path: Path, tools: HostTools
) -> None:
    """It is judged by what there is now: nobody knows how its ADD ended. A lease under its key keeps it."""
    if mode == "off" and not reference.has("ptp", "host-local"):
        pytest.skip(f"no reference plugins: {reference.HOW}")
    node, netns = Node(tmp_path, mode, tools), make_netns()
    node.record([{"type": "ptp", "ipam": {"type": "host-local", "subnet": "10.63.0.5/24"}}], netns.path)
    lease = tmp_path / "leases" / "n1" / "10.63.0.7"
    lease.parent.mkdir(parents=True)
    lease.write_bytes(b"c1\r\nnet1")
    with pytest.raises(CniError, match="host bits"):
        node.remove(way, netns.path)
    assert node.store.containers() == ["c1"]
    # That of another interface, or of another container, is none of its.
    lease.write_bytes(b"c1\r\nnet2")
    (lease.parent / "10.63.0.8").write_bytes(b"c2\r\nnet1")
    node.remove(way, netns.path)
    assert node.store.containers() == []
    node.gc()
    assert [reason for reason, _ in node.engine.warnings] == ["NetworkNeverAttached"]


# What host-device does to the device cannot be seen, and dhcp may have a lease.
RECORDED = [
    side for side in SIDES if side.values[0] in paths() and not str(side.id).startswith(("host-d", "macvlan-d"))
]


@pytest.mark.parametrize("way", ["DEL", "GC"])
@pytest.mark.parametrize(("name", "mode"), RECORDED)
def test_an_older_record_with_a_path_that_no_file_has_goes(
    name: str, mode: Mode, way: str, host: Any, make_netns: Callable[[], Any], tmp_path: Path, tools: HostTools
) -> None:
    case = CASES[name]
    if mode == "off" and not reference.has("loopback", "host-local", *(plugin["type"] for plugin in case.config)):
        pytest.skip(f"no reference plugins: {reference.HOW}")
    node, netns = Node(tmp_path, mode, tools), make_netns()
    (tmp_path / "subnet.env").write_text(SUBNET_ENV.format(case.subnet))
    node.record(case.config, netns.path)
    node.remove(way, netns.path)
    assert node.store.containers() == []
    node.gc()


def test_a_gc_goes_on_past_what_it_cannot_collect_and_reports_it(
    host: Any, make_netns: Callable[[], Any], tmp_path: Path, tools: HostTools
) -> None:
    require_every_process()
    node = Node(tmp_path, "prefer", tools)
    for container in ("c0", "c2", "c4"):
        node.record([PTP], make_netns().path, container)
    node.record([{"type": "no-such"}], make_netns().path, "c1")
    node.record(CASES["ptp-host-local-dataDir-nul"].config, make_netns().path, "c3")
    stale = tmp_path / "leases" / "n1" / "10.63.0.9"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"c2\r\nnet1")
    with pytest.raises(CniError, match='^failed to find plugin "no-such"'):
        node.gc()
    assert node.store.containers() == ["c1"]
    assert node.leases() == []


@pytest.mark.parametrize("way", ["DEL", "GC"])
@pytest.mark.parametrize("gone", ["interface", "namespace", "path"])
@pytest.mark.parametrize("behind", [PTP, {"type": "loopback"}, None])
def test_sbr_leaves_the_record_with_its_interface(
    behind: dict[str, Any] | None,
    gone: str,
    way: str,
    host: Any,
    make_netns: Callable[[], Any],
    tmp_path: Path,
    tools: HostTools,
) -> None:
    """Its DEL fails without the interface or the namespace, for ever, also where its ADD succeeded."""
    if not reference.has("loopback", "host-local", "ptp", "sbr"):
        pytest.skip(f"no reference plugins: {reference.HOW}")
    node, netns = Node(tmp_path, "off", tools), make_netns()
    node.ask_for(Case([*([behind] if behind else []), {"type": "sbr"}], ""))
    with contextlib.nullcontext() if behind is PTP else pytest.raises(CniError, match="chained|find network interface"):
        node.engine.verbs.add(node.engine.request(netns=netns.path))
    if gone == "interface":
        if netns.links():
            netns.run("ip", "link", "del", "net1")
    else:
        remove_netns(Path(netns.path))
    node.remove(way, "" if gone == "path" else netns.path)
    assert (node.store.containers(), node.leases()) == ([], [])
    assert not [path for path in (tmp_path / "cni").rglob("*") if path.is_file()]
    node.gc()


@pytest.mark.parametrize("mode", ["prefer", "off"])
def test_a_hot_plug_that_is_refused_fails_no_del_of_its_pod(
    mode: Mode, host: Any, make_netns: Callable[[], Any], tmp_path: Path, tools: HostTools
) -> None:
    if mode == "off" and not reference.has("loopback", "macvlan", "host-local"):
        pytest.skip(f"no reference plugins: {reference.HOW}")
    node, netns = Node(tmp_path, mode, tools), make_netns()
    node.engine.declare()
    node.engine.verbs.add(node.engine.request(netns=netns.path))
    before = node.store.load(ContainerId("c1"))
    # One that is refused when it is planned, and one of which only the ADD finds out.
    for master, subnet in (("lo", "10.63.0.5/24"), ("gone0", "10.63.0.0/24")):
        ipam = {"type": "host-local", "subnet": subnet, "dataDir": str(tmp_path / "leases")}
        config = {"cniVersion": "1.0.0", "name": "hot", "type": "macvlan", "master": master, "ipam": ipam}
        with pytest.raises(CniError, match=r"(?i)host bits|gone0|link not found|lo|invalid"):
            node.engine.verbs.add_network(node.engine.plug(netns=netns.path, config=json.dumps(config)))
        assert node.store.load(ContainerId("c1")) == before
    node.engine.verbs.delete(node.engine.request("DEL", netns=netns.path))
    assert node.store.containers() == []
    node.gc()
