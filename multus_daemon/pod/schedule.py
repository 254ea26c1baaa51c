"""Decide which networks of a pod may be attached concurrently, and in which order, and run that.

Plugins of one pod share its namespace, where the order of the networks matters: a bond uses interfaces that were made
before it, and of two routes to the same destination the kernel prefers the older one. So two networks run one after the
other, in their order, if their configurations show that one uses an interface or a prefix of the other.
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
"""Containers to delete concurrently: a DEL that hangs must not stop the others; more would slow down a node's start."""
SERIAL: Final = "multus.io/serial"
"""A key of a network's configuration or of a plugin object in it. True: no other network of the pod runs meanwhile."""

# Keys, in lower case, of things that a plugin makes or uses, and another one may make or use too.
_SHARED: Final = frozenset({"master", "bridge", "link", "device", "deviceid", "pcibusid", "vrfname"})
# The thing that these plugins use if the key is absent or empty.
_IMPLIED: Final = {"bridge": ("bridge", "cni0"), "macvlan": ("master", ""), "ipvlan": ("master", "")}
# They take the first routing table of the namespace that is free: two at once may take the same one.
_TABLE_TAKERS: Final = frozenset({"sbr"})
# Names of a plugin object, not of a thing that it uses.
_LABELS: Final = frozenset({"name", "type", "cniversion"})
_WORD: Final = re.compile(r"[\w.-]+")
_PREFIX_MAX: Final = 64
"""Maximum characters of a text that may be a prefix; IPv6 with a length has 49 at most."""


@dataclass(frozen=True, slots=True)
class _Traits:
    """The properties of an attachment that decide the order."""

    alone: bool
    """True if no other network may run meanwhile; the other fields are empty then."""
    shares: frozenset[tuple[str, str]]
    """Things that it uses and another network may use too: kind and name."""
    words: frozenset[str]
    """Every string of its plugin objects, keys included, and the words in it."""


def predecessors(attachments: Sequence[Attachment]) -> tuple[frozenset[int], ...]:
    """Return, for each attachment, the (lower) numbers of the attachments that must be attached before it begins.

    For a detach, call it with the list in reverse order.

    The cluster network, the auxiliary chain and a network with the key SERIAL run alone. Two others run one after the
    other if they share the network's name, a master, bridge or device, or a prefix (of a route, subnet or address), or
    if one mentions the interface of the other anywhere in its configuration.
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


def in_order(
    work: Callable[[int], None],
    before: Sequence[Collection[int]],
    *,
    at_once: int,
    here: Collection[int] = (),
    patience: float | None = None,
) -> dict[int, Exception]:
    """Run `work` for each number, after the numbers in its `before`; return the exceptions by number, in rising order.

    At most `at_once` (from 1) run together, lower numbers first. Numbers in `here`, and a number that runs alone, run
    in the calling thread; each other number in a thread of its own. `patience`: after a failure nothing more begins,
    and threads are interrupted after so many seconds; interrupted numbers are not in the result. None: a failure stops
    nothing.

    Returns, or raises Interrupted, only when all threads have ended. A BaseException of `work` is raised.
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
    """Run `work` for each item, `AT_ONCE` concurrently, in order. After an exception no more begin; it is raised."""
    rest = list(items)
    failures = in_order(lambda number: work(rest[number]), [()] * len(rest), at_once=AT_ONCE, patience=0.0)
    for error in failures.values():
        raise error


class _Group:
    """The threads of one call of `in_order`."""

    def __init__(self) -> None:
        self.running: dict[futures.Future[None], tuple[int, Deadline]] = {}
        self.begun: set[int] = set()
        self.over: set[int] = set()
        self.failures: dict[int, Exception] = {}

    def start(self, work: Callable[[int], None], number: int) -> bool:
        """Begin the work of `number` in a thread; return False if the system can't start one."""
        # A deadline of its own stops this thread alone.
        limit = Deadline(deadline.current().left)
        try:
            with deadline.given(limit):
                self.running[threads.start(lambda: work(number), name=f"network {number}")] = number, limit
        except RuntimeError:
            return False
        self.begun.add(number)
        return True

    def wait(self) -> None:
        """Wait until one of the threads ends."""
        deadline.current().wait(*self.running)
        self.collect()

    def finish(self, patience: float) -> None:
        """Wait for all threads, `patience` seconds at most."""
        with contextlib.suppress(deadline.ExpiredError), deadline.within(patience):
            while self.running:
                self.wait()

    def end(self) -> None:
        """Stop the threads and wait for their end. Their exceptions are dropped."""
        for _, limit in self.running.values():
            limit.stop()
        futures.wait(self.running)

    def collect(self) -> None:
        """Collect the outcomes of the threads that have ended."""
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
    """Yield every string in a JSON value, each after its key in lower case; and each key itself, after an empty key."""
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
    """Return the things (kind, name) that a plugin uses by default, without naming them in its configuration."""
    found: set[tuple[str, str]] = set()
    if (implied := _IMPLIED.get(plugin.type)) and not gojson.get(plugin.fields, implied[0]):
        found.add(implied)
    if plugin.type in _TABLE_TAKERS:
        found.add(("type", plugin.type))
    if gojson.get(plugin.fields, "isDefaultGateway"):
        found |= {("prefix", "0.0.0.0/0"), ("prefix", "::/0")}
    return found


def _prefix(text: str) -> str:
    """Return the network of an address or prefix with a length, in one spelling; empty for any other text."""
    return _network(text) if "/" in text and len(text) <= _PREFIX_MAX else ""


# Remembered: every pod has the same few subnets and routes. Long texts are not, since users write them.
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
