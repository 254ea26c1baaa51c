"""Addresses that the cluster shares: who holds which of each range, and their release; see docs/addresses.md.

An address is held by its reservation, by an entry of a pool (of whereabouts' binary), or by both.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from multus_daemon.cluster.kube.errors import ApiError
from multus_daemon.cluster.kube.latest import JSON_PATCH, MERGE_PATCH
from multus_daemon.plugins.builtin import whereabouts_config
from multus_daemon.spec import addresses as spec
from multus_daemon.spec.addresses import Address, AddressRange, Owner, Reservation
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.gojson import JsonError
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_tools.kubectl.cluster import PAGE, Cluster

_NO_NODE: Final = "it has no Node object"
_TAINTED: Final = "it is tainted out-of-service"


@dataclass(slots=True)
class _Held:
    reservation: Reservation
    """Or an entry of a pool, without a UID."""
    node: str
    range: str
    gone: str = ""
    """Why its node can hold nothing any more; empty if it can."""
    pools: set[str] = field(default_factory=set)
    removals: list[tuple[str, str, Any, str]] = field(default_factory=list)
    """Method, path, body and type of requests that remove what holds it, unless that has changed."""

    def to_object(self) -> dict[str, str]:
        item, owner = self.reservation, self.reservation.owner
        found = {"address": str(item.address), "range": self.range, "pod": item.podref, "interface": owner.ifname}
        found |= {"container": owner.container_id, "node": self.node, "gone": self.gone}
        by = "multus-daemon" if item.node else "whereabouts"
        return {**found, "by": by, "network": item.network, "claim": item.claim}

    def kept_because(self, ready: Container[str], *, has_claim: bool) -> str:
        """Return why the address must not be released, empty if it may be; `ready`: nodes that are Ready."""
        if has_claim:
            claim = self.reservation.claim
            kind = "" if claim.startswith(f"{spec.STATEFUL_SET}/") else "IPAMClaim "
            return f"{kind}{claim} holds it, also without a pod: delete that"
        if self.node in ready and not self.gone:
            return f"node {self.node} is Ready, and pod {self.reservation.podref} has it: delete the pod"
        return ""


@dataclass(slots=True)
class _Range:
    text: str
    scope: str
    usable: AddressRange | None = None
    """None if no network has the range."""
    networks: dict[str, None] = field(default_factory=dict)
    holders: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of held addresses by node and by the reason why it is gone."""

    def to_object(self) -> dict[str, Any]:
        size, held = self.usable.size if self.usable else None, self.holders.total()
        nodes = [{"node": node, "held": each, "gone": gone} for (node, gone), each in self.holders.most_common()]
        found = {"range": self.text, "networkName": self.scope, "networks": list(self.networks), "size": size}
        return {**found, "held": held, "free": None if size is None else size - held, "nodes": nodes}


class _Survey:
    """What reservations, pools, networks, nodes and pods say."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, Address], _Held] = {}
        """By scope and address."""
        self.ranges: dict[tuple[str, AddressRange | str], _Range] = {}
        """By scope and addresses; by the text if no network has the range."""
        self.ready: set[str] = set()

    async def chosen(self, cluster: Cluster, node: str, address: str) -> list[_Held]:
        """Read all of it; return what the node holds, or the address; empty texts: all. Raises KubeError."""
        for network in await cluster.networks():
            with contextlib.suppress(CniError, JsonError):
                for config in map(whereabouts_config.read, _ipam_of(network)):
                    for usable in config.ranges:
                        made = _Range(str(usable), usable.scope, usable)
                        self.ranges.setdefault((made.scope, usable), made).networks[str(network)] = None
        for plural, take in ((spec.RESERVATIONS, self._reservation), (spec.POOLS, self._pool)):
            for item in await _listed(cluster, f"{spec.API}/{plural}"):
                try:
                    take(item)
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    # The API server refuses most of these, by the schemas of the CRDs.
                    what, why = f"{plural} {item['metadata']['name']}", f"{type(error).__name__}: {error}"
                    cluster.notes.append(f"{what} is not read whole: its spec is malformed ({why}); correct it")
        await self._nodes(cluster)
        found = [item for item in self.held.values() if node in ("", item.node)]
        found = [item for item in found if address in ("", str(item.reservation.address))]
        return sorted(found, key=lambda item: (item.reservation.address.version, int(item.reservation.address)))

    def _reservation(self, item: dict[str, Any]) -> None:
        if found := spec.decode(msgspec.json.encode(item), {scope for scope, _ in self.ranges}):
            held = self.held[found.scope, found.address] = _Held(found, found.node, found.range)
            body = {"preconditions": {"uid": found.uid}}
            held.removals.append(("DELETE", path := _path(item, spec.RESERVATIONS), body, "application/json"))
            if spec.FINALIZER in (names := item["metadata"].get("finalizers") or []):
                left = {"uid": found.uid, "finalizers": [name for name in names if name != spec.FINALIZER]}
                held.removals.append(("PATCH", path, {"metadata": left}, MERGE_PATCH))

    def _pool(self, item: dict[str, Any]) -> None:
        name, cidr = item["metadata"]["name"], item["spec"]["range"]
        scope = name.removesuffix(spec.pool_name(cidr, "")).removesuffix("-")
        for offset, entry in (item["spec"]["allocations"] or {}).items():
            # As in whereabouts, from the address that the range is written with.
            address = ipaddress.ip_interface(cidr).ip + int(offset)
            owner = Owner(entry["id"], entry.get("ifname", ""), "")
            key = (name if (name, address) in self.held else scope, address)
            made = _Held(Reservation(address, scope, entry["podref"], owner), "", cidr)
            held = self.held.setdefault(key, made)
            held.pools.add(name)
            held.range = held.range or cidr
            place = f"/spec/allocations/{offset}"
            body = [{"op": "test", "path": place, "value": entry}, {"op": "remove", "path": place}]
            held.removals.append(("PATCH", _path(item, spec.POOLS), body, JSON_PATCH))

    async def _nodes(self, cluster: Cluster) -> None:
        """Find the node of each holder, and why it is gone; count it in each range that has the address."""
        nodes = {item["metadata"]["name"]: item for item in await _listed(cluster, "/api/v1/nodes")}
        gone = {}
        for name, item in nodes.items():
            conditions = {each["type"]: each["status"] for each in item.get("status", {}).get("conditions") or ()}
            self.ready |= {name} if conditions.get("Ready") == "True" else set()
            if any(taint["key"] == spec.OUT_OF_SERVICE for taint in item.get("spec", {}).get("taints") or ()):
                gone[name] = _TAINTED
        at = {}
        if not all(held.node for held in self.held.values()):
            at = {str(pod): pod.spec.node_name for pod in await cluster.pods() if not pod.finished}
        for (scope, address), held in self.held.items():
            held.node = held.node or at.get(held.reservation.podref, "")
            held.gone = gone.get(held.node, "" if held.node in nodes or not held.node else _NO_NODE)
            ranges = [item for item in self.ranges.values() if item.scope in {scope, *held.pools}]
            found = [item for item in ranges if item.usable and address in item.usable]
            held.range = found[0].text if found else held.range or "?"
            found = found or [self.ranges.setdefault((scope, held.range), _Range(held.range, scope))]
            for each in found:
                each.holders[held.node, held.gone] += 1


async def addresses(cluster: Cluster, *, node: str, address: str) -> dict[str, Any]:
    """Return ranges and holders; of one node or one address, unless both are empty. Raises KubeError."""
    survey = _Survey()
    chosen = await survey.chosen(cluster, node, address)
    named = {held.range for held in chosen}
    ranges = [item for item in survey.ranges.values() if item.text in named or not (node or address)]
    shown = [item.to_object() for item in sorted(ranges, key=lambda item: (item.scope, item.text))]
    return cluster.answer("addresses", [], ranges=shown, addresses=[held.to_object() for held in chosen])


async def release(cluster: Cluster, *, node: str, address: str, confirmed: bool) -> dict[str, Any]:
    """Remove what holds the addresses of a node, or one address; only say so, unless `confirmed`. Raises KubeError."""
    survey, released, kept = _Survey(), [], []
    for held in await survey.chosen(cluster, node, address):
        why = held.kept_because(survey.ready, has_claim=await _exists(cluster, held.reservation.claim))
        try:
            for method, path, body, kind in held.removals if confirmed and not why else ():
                await cluster.client.request(method, path, body=msgspec.json.encode(body), content_type=kind)
        except ApiError as error:
            if error.status not in (404, 409, 422):
                raise
            why = "it has changed meanwhile: ask again"
        if why:
            kept.append({"address": str(held.reservation.address), "why": why})
        else:
            released.append(held.to_object())
    return cluster.answer("addresses-release", [], dryRun=not confirmed, released=released, kept=kept)


async def _exists(cluster: Cluster, claim: str) -> bool:
    """Return True if the claim exists, or if that is not known."""
    try:
        return bool(claim and await cluster.client.request("GET", spec.path_of_claim(claim)))
    except ApiError as error:
        return error.status != 404


async def _listed(cluster: Cluster, path: str) -> list[dict[str, Any]]:
    """Return the objects; none if the cluster does not know the kind."""
    try:
        # Ten full pools of a /16 are one answer.
        return await cluster.objects(path, limit="10" if path.endswith(spec.POOLS) else PAGE)
    except ApiError as error:
        if error.status != 404:
            raise
        return []


def _path(item: dict[str, Any], plural: str) -> str:
    return f"{spec.API}/namespaces/{item['metadata']['namespace']}/{plural}/{item['metadata']['name']}"


def _ipam_of(network: NetworkAttachmentDefinition) -> Iterator[dict[str, Any]]:
    """Yield the `ipam` of each plugin that asks whereabouts. Raises CniError, JsonError."""
    for plugin in network.network.plugins if network.network else ():
        ipam = gojson.get(plugin.fields, "ipam")
        if isinstance(ipam, dict) and plugin.ipam_type == "whereabouts":
            yield ipam
