"""Which networks of a pod may be attached side by side, and the running of what may.

Plugins of one pod meet in its namespace, where the order of the list counts: a bond takes the interfaces that came
before it, and of two routes to the same place the kernel prefers by the order of their making. So networks go one
after another, in the order of the list, where their configurations tell that one touches what is the other's.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeVar

from multus_daemon.runtime import deadline, threads
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.spec.attachment import Attachment
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.conf import PluginConfig

T = TypeVar("T")

AT_ONCE: Final = 4
"""Containers to delete: a DEL that hangs must not keep the others waiting; more at once would slow down the ADDs of a
starting node."""
SERIAL: Final = "multus.io/serial"
"""A key of a network's configuration, or of one of its plugin objects: if true, nothing runs beside the network."""

# Keys, in lower case, that name what a plugin makes or uses, and another one may make or use too.
_SHARED: Final = frozenset({"master", "bridge", "link", "device", "deviceid", "pcibusid", "vrfname"})
# What it is for these plugins where the key is absent or empty.
_IMPLIED: Final = {"bridge": ("bridge", "cni0"), "macvlan": ("master", ""), "ipvlan": ("master", "")}
# They take the first routing table of the namespace that is free: two at once may take the same one.
_TABLE_TAKERS: Final = frozenset({"sbr"})
# What a plugin object is called, not what it is about.
_LABELS: Final = frozenset({"name", "type", "cniversion"})
_WORD: Final = re.compile(r"[\w.-]+")
_PREFIX_MAX: Final = 64
"""Characters; an IPv6 address with its length has 49 at most."""


@dataclass(frozen=True, slots=True)
class _Traits:
    """What is known of an attachment before it is made."""

    alone: bool
    """True where nothing may run beside it; the rest is not looked for then."""
    shares: frozenset[tuple[str, str]]
    """What it uses and another may use too: kind and name."""
    words: frozenset[str]
    """Every string of its plugin objects, keys included, and the words in it."""


def predecessors(attachments: Sequence[Attachment]) -> tuple[frozenset[int], ...]:
    """For each attachment the numbers of those before it in the list that must be attached when it begins.

    The cluster network, the auxiliary chain and a network that says so (SERIAL) have nothing beside them. Two others
    go one after the other where they have in common the network's name, a master, bridge or device, or a prefix (of
    a route, subnet or address), and where one mentions the interface of the other anywhere in its configuration.
    """
    traits = [_traits(attachment) for attachment in attachments]

    def touch(one: int, other: int) -> bool:
        return (
            traits[one].alone
            or traits[other].alone
            or attachments[one].ifname in traits[other].words
            or attachments[other].ifname in traits[one].words
            or not traits[one].shares.isdisjoint(traits[other].shares)
        )

    numbers = range(len(attachments))
    return tuple(frozenset(earlier for earlier in range(later) if touch(earlier, later)) for later in numbers)


def backwards(before: Sequence[Collection[int]]) -> tuple[frozenset[int], ...]:
    """The same relation for the list in reverse: what came later goes first."""
    last = len(before) - 1
    return tuple(
        frozenset(last - later for later in range(number + 1, last + 1) if number in before[later])
        for number in range(last, -1, -1)
    )


def in_order(
    work: Callable[[int], None],
    before: Sequence[Collection[int]],
    *,
    at_once: int,
    here: Collection[int] = (),
    patience: float | None = None,
) -> dict[int, Exception]:
    """Run `work` for each number, at most `at_once` (from 1) together, each after those `before` it; what they raised.

    Of those that can begin the lowest does; `before` names lower ones only. Those that are `here`, and one that has
    nothing beside it, run in the calling thread, one after the other; the rest in a thread for each. `patience`:
    nothing begins after a failure, and what is under way has so many seconds to come to its end, then it is
    interrupted, but for what runs in the calling thread; None: a failure stops no other. The failures are by number, in
    order, without what was interrupted.

    Returns, or raises Interrupted, only when all that began has ended. Raises what is raised and is no Exception.
    """
    group = _Group()
    waiting = list(range(len(before)))
    try:
        while waiting or group.running:
            able = [number for number in waiting if group.over.issuperset(before[number])]
            ready = able[: at_once - len(group.running)]
            alone = len(ready) == 1 and not group.running
            own = next((number for number in ready if alone or number in here), None)
            inline = [] if own is None else [own]
            for number in ready:
                if number not in here and number != own and not group.start(work, number):
                    inline.append(number)
            for number in inline:
                group.begun.add(number)
                try:
                    work(number)
                except Exception as error:
                    group.failures[number] = error
                group.over.add(number)
                group.collect()
            if group.running and not inline:
                group.wait()
            waiting = [number for number in waiting if number not in group.begun]
            if group.failures and patience is not None:
                break
        if patience is not None:
            group.finish(patience)
    finally:
        group.end()
    return dict(sorted(group.failures.items()))


def side_by_side(items: Iterable[T], work: Callable[[T], None]) -> None:
    """`work` for each of the items, in their order, `AT_ONCE` at a time. What one raises ends the others."""
    rest = list(items)
    failures = in_order(lambda number: work(rest[number]), [()] * len(rest), at_once=AT_ONCE, patience=0.0)
    for error in failures.values():
        raise error


class _Group:
    """The threads of one `in_order`."""

    def __init__(self) -> None:
        self.running: dict[futures.Future[None], tuple[int, Deadline]] = {}
        self.begun: set[int] = set()
        self.over: set[int] = set()
        self.failures: dict[int, Exception] = {}

    def start(self, work: Callable[[int], None], number: int) -> bool:
        """Begin the work of that number in a thread; False where there is none."""
        # A word of its own, by which this one is stopped and no other.
        limit = Deadline(deadline.current().left)
        try:
            with deadline.given(limit):
                self.running[threads.start(lambda: work(number), name=f"network {number}")] = number, limit
        except RuntimeError:
            # The node, or the container's cgroup, has no thread left: slower in the calling one, but done.
            return False
        self.begun.add(number)
        return True

    def wait(self) -> None:
        """Wait for one of those that run to end."""
        deadline.current().wait(*self.running)
        self.collect()

    def finish(self, patience: float) -> None:
        """Wait for all that run, `patience` seconds at most."""
        with contextlib.suppress(deadline.ExpiredError), deadline.within(patience):
            while self.running:
                self.wait()

    def end(self) -> None:
        """Stop what still runs and wait for its end. What it raises is dropped."""
        for _, limit in self.running.values():
            limit.stop()
        futures.wait(self.running)

    def collect(self) -> None:
        """Note what has ended."""
        for future in [running for running in self.running if running.done()]:
            number, _ = self.running.pop(future)
            self.over.add(number)
            error = future.exception()
            if isinstance(error, Exception):
                self.failures[number] = error
            elif error is not None:
                raise error


def _traits(attachment: Attachment) -> _Traits:
    if attachment.cluster_network or attachment.auxiliary or _is_serial(attachment):
        return _Traits(True, frozenset(), frozenset())
    config = attachment.config
    shares = {("network", str(config.name))}
    words: set[str] = set()
    found = [*_strings(attachment.capability_args)]
    for plugin in config.plugins:
        fields = {key: value for key, value in plugin.fields.items() if key.lower() not in _LABELS}
        found += _strings(fields)
        shares |= _unsaid(plugin)
    for key, text in found:
        words.add(text)
        for word in _WORD.findall(text):
            # As in the sysctl net.ipv4.conf.net1.rp_filter, and in net1.100 on top of net1.
            words |= {word, *word.split(".")}
        if key in _SHARED and text:
            shares.add((key, text))
        if prefix := _prefix(text):
            shares.add(("prefix", prefix))
    return _Traits(False, frozenset(shares), frozenset(words))


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every string in a JSON value, with the key, in lower case, that it stands under; each key too, under none."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, key)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield "", name
            yield from _strings(item, name.lower())


def _unsaid(plugin: PluginConfig) -> set[tuple[str, str]]:
    """What a plugin uses that its object does not name."""
    found: set[tuple[str, str]] = set()
    if (implied := _IMPLIED.get(plugin.type)) and not gojson.get(plugin.fields, implied[0]):
        found.add(implied)
    if plugin.type in _TABLE_TAKERS:
        found.add(("type", plugin.type))
    if gojson.get(plugin.fields, "isDefaultGateway"):
        found |= {("prefix", "0.0.0.0/0"), ("prefix", "::/0")}
    return found


def _prefix(text: str) -> str:
    """The network of an address or prefix with a length, in one spelling; empty for any other text."""
    return _network(text) if "/" in text and len(text) <= _PREFIX_MAX else ""


# Remembered: the same few subnets and routes, for every pod. Never by a long text: whoever writes networks writes it.
@lru_cache(maxsize=512)
def _network(text: str) -> str:
    try:
        return str(ipaddress.ip_interface(text).network)
    except ValueError:
        return ""


def _is_serial(attachment: Attachment) -> bool:
    config = attachment.config
    objects = [plugin.fields for plugin in config.plugins]
    if config.is_list:
        objects.append(gojson.loads_object(config.raw))
    return any(gojson.get(fields, SERIAL) not in (None, False) for fields in objects)
