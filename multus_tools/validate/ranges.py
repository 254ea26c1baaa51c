"""Check ranges of addresses: those that overlap with another network's, and those too small for the pods of a file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from multus_daemon.plugins.builtin import host_local_config as host_local
from multus_daemon.plugins.builtin import whereabouts_config
from multus_daemon.spec.cni import conf, gojson, versions
from multus_daemon.spec.cni.errors import CniError
from multus_tools.validate.configs import Network
from multus_tools.validate.positions import Path

_OVERLAPS_MAX: Final = 100
_LINK_KEYS: Final = ("bridge", "master", "vlan", "vlanId")
"""Keys of a plugin that have the same values in networks of one segment."""
_ADVICE: Final = (
    'give each network addresses of its own, or both the same "name" (host-local) or "network_name" (whereabouts), '
    "so that they share what is taken"
)


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive addresses of one family that a network gives to pods."""

    version: int
    addresses: range
    text: str
    kept_in: str
    """Networks with the same value never assign the same address: host-local's directory, whereabouts' scope."""
    link: tuple[object, ...] | None
    """For whereabouts, whose networks may have the same addresses in different segments."""
    size: int
    """Number of addresses in the whole range; of whereabouts only, as host-local's range is that of one node."""
    network: Network
    path: Path

    def clashes(self, other: _Span) -> bool:
        """Return True if both networks may assign the same address."""
        is_apart = self.link is not None is not other.link and self.link != other.link
        return self.kept_in != other.kept_in and not is_apart


def check_overlaps(found: Sequence[Network]) -> None:
    """Report pairs of networks that would assign the same addresses."""
    spans = [span for network in found for span in _spans(network)]
    reported: set[frozenset[str]] = set()
    begun: list[_Span] = []
    for span in sorted(spans, key=lambda item: (item.version, item.addresses.start)):
        begun = [it for it in begun if it.version == span.version and span.addresses.start < it.addresses.stop]
        for other in filter(span.clashes, begun):
            pair = frozenset({span.network.name, other.network.name})
            if pair not in reported and len(reported) < _OVERLAPS_MAX:
                reported.add(pair)
                first, second = sorted((other, span), key=lambda item: found.index(item.network))
                problem = f"addresses {second.text} overlap with {first.text} of network {first.network.name}"
                problem += ": each gives them away by itself"
                second.network.subject.warn("overlap", problem, _ADVICE, path=second.path)
        begun.append(span)


def check_size(network: Network, wanted: int) -> None:
    """Warn if whereabouts has fewer addresses in a range than pods want of the network."""
    spans = [span for span in _spans(network) if 0 < span.size < wanted]
    if spans:
        least = min(spans, key=lambda item: item.size)
        problem = f"range {least.text} has {least.size} addresses, and the pods here ask for {wanted}"
        network.subject.warn("range", problem, "give it a larger range", path=least.path)


def _spans(network: Network) -> Iterator[_Span]:
    config = network.config
    for index, plugin in enumerate(config.plugins):
        path: Path = ("plugins", index, "ipam") if config.is_list else ("ipam",)
        fields = conf.plugin_fields(config, plugin)
        # configs.check() has reported any error.
        with contextlib.suppress(CniError, gojson.JsonError):
            if plugin.ipam_type == "host-local":
                read = host_local.read(fields, name=config.name, cni_version=config.cni_version or versions.IMPLIED)
                kept = f"{read.data_dir}/{config.name}"
                for item in (one for ranges in read.range_sets for one in ranges.ranges):
                    yield _Span(item.version, range(item.first, item.last + 1), str(item), kept, None, 0, network, path)
            elif plugin.ipam_type == "whereabouts":
                given = whereabouts_config.read(gojson.get_object(fields, "ipam") or {})
                link = tuple(gojson.get(fields, key) for key in _LINK_KEYS)
                for usable in given.ranges:
                    about = (str(usable), usable.scope, link, usable.size, network, path)
                    yield from (_Span(usable.network.version, span, *about) for span in usable.spans)
