"""Fakes of PluginRunner and DelegateRunner: they record calls, play back, and fail where they are told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multus_daemon.cni.conf import NetworkConfig
from multus_daemon.cni.names import ContainerId, IfName
from multus_daemon.cni.result import Result
from multus_daemon.delegates.find import PluginNotFoundError
from multus_daemon.ports import Attachment, Invocation, Sandbox


@dataclass(frozen=True)
class PluginCall:
    """One call of a plugin."""

    plugin_type: str
    invocation: Invocation

    @property
    def verb(self) -> str:
        return self.invocation.verb

    @property
    def config(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.invocation.stdin)
        return value


Answer = bytes | BaseException | Callable[[Invocation], bytes]


class FakePluginRunner:
    """`answers`: (plugin type, verb) to what it prints, what it raises, or a function of the invocation.

    Without an answer: an empty result for ADD and nothing for the rest. `missing`: types that are not to be had.
    `fail_at`: the number of a call, from 1, to what it raises. `not_supported`: plugin type to what `unsupported` says.
    """

    def __init__(
        self,
        answers: Mapping[tuple[str, str], Answer] | None = None,
        *,
        missing: set[str] | None = None,
        where: str = "/fake/{}",
    ) -> None:
        self.answers = dict(answers or {})
        self.missing = missing or set()
        self.where = where
        self.fail_at: dict[int, BaseException] = {}
        self.not_supported: dict[str, str] = {}
        self.calls: list[PluginCall] = []
        self.located: list[str] = []

    @property
    def order(self) -> list[tuple[str, str]]:
        """(plugin type, verb) of each call."""
        return [(call.plugin_type, call.verb) for call in self.calls]

    def locate(self, plugin_type: str) -> str:
        self.located.append(plugin_type)
        return "" if plugin_type in self.missing else self.where.format(plugin_type)

    async def unsupported(self, plugin_type: str, invocation: Invocation) -> str:
        return self.not_supported.get(plugin_type, "")

    async def run(self, plugin_type: str, invocation: Invocation) -> bytes:
        self.calls.append(PluginCall(plugin_type, invocation))
        await asyncio.sleep(0)
        if error := self.fail_at.get(len(self.calls)):
            raise error
        if plugin_type in self.missing:
            raise PluginNotFoundError(f'failed to find plugin "{plugin_type}" in path [/fake]')
        answer = self.answers.get((plugin_type, invocation.verb), b"{}" if invocation.verb == "ADD" else b"")
        if isinstance(answer, BaseException):
            raise answer
        return answer(invocation) if callable(answer) else answer


@dataclass(frozen=True)
class DelegateCall:
    """One call of a delegate."""

    verb: str
    sandbox: Sandbox
    attachment: Attachment


@dataclass(frozen=True)
class NetworkCall:
    """One STATUS or GC of a network."""

    verb: str
    config: NetworkConfig
    valid: tuple[tuple[str, str], ...]


class FakeDelegateRunner:
    """`results`: attachment name to what its ADD returns (else an empty result).

    `fail`: (verb, attachment name) to what it raises each time; `fail_at`: the number of a call, from 1, to what it
    raises; verbs are VALIDATE, ADD, DEL, CHECK, REMEMBER, numbers count all but VALIDATE. `attached` is what (name,
    interface) has had an ADD and no DEL since; `most_at_once` the largest number of calls under way together.
    STATUS and GC are in `network_calls`, not counted, and fail by the network's name.
    """

    def __init__(self, results: Mapping[str, Result] | None = None, *, pause: float = 0.0) -> None:
        self.results = dict(results or {})
        self.fail: dict[tuple[str, str], BaseException] = {}
        self.fail_at: dict[int, BaseException] = {}
        self.calls: list[DelegateCall] = []
        self.network_calls: list[NetworkCall] = []
        self.validated: list[Attachment] = []
        self.attached: set[tuple[str, str]] = set()
        self.pause = pause
        self.most_at_once = 0
        self._running = 0

    @property
    def order(self) -> list[tuple[str, str]]:
        """(verb, attachment name) of each call."""
        return [(call.verb, call.attachment.name) for call in self.calls]

    def validate(self, sandbox: Sandbox, attachment: Attachment) -> None:
        self.validated.append(attachment)
        if error := self.fail.get(("VALIDATE", attachment.name)):
            raise error

    async def add(self, sandbox: Sandbox, attachment: Attachment) -> Result:
        # As the real one: what a failed ADD has made stays.
        self.attached.add((attachment.name, attachment.ifname))
        await self._call("ADD", sandbox, attachment)
        return self.results.get(attachment.name, Result())

    async def delete(self, sandbox: Sandbox, attachment: Attachment) -> None:
        await self._call("DEL", sandbox, attachment)
        self.attached.discard((attachment.name, attachment.ifname))

    async def check(self, sandbox: Sandbox, attachment: Attachment) -> None:
        await self._call("CHECK", sandbox, attachment)

    async def remember(self, sandbox: Sandbox, attachment: Attachment) -> None:
        await self._call("REMEMBER", sandbox, attachment)

    async def status(self, config: NetworkConfig) -> None:
        await self._call_network("STATUS", config, ())

    async def gc(self, config: NetworkConfig, valid: Sequence[tuple[ContainerId, IfName]]) -> None:
        await self._call_network("GC", config, valid)

    async def _call_network(
        self, verb: str, config: NetworkConfig, valid: Sequence[tuple[ContainerId, IfName]]
    ) -> None:
        self.network_calls.append(NetworkCall(verb, config, tuple(valid)))
        await asyncio.sleep(self.pause)
        if error := self.fail.get((verb, config.name)):
            raise error

    async def _call(self, verb: str, sandbox: Sandbox, attachment: Attachment) -> None:
        self.calls.append(DelegateCall(verb, sandbox, attachment))
        number = len(self.calls)
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            await asyncio.sleep(self.pause)
        finally:
            self._running -= 1
        if error := self.fail_at.get(number) or self.fail.get((verb, attachment.name)):
            raise error
