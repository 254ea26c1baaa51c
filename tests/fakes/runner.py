"""Fakes of plugins and of ListRunner: they record calls, play back, and fail on demand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, replace
from typing import Any

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.binary import Binary
from multus_daemon.plugins.builtin.contract import Call, Module
from multus_daemon.plugins.find import Build, PluginIsMultusError, PluginNotFoundError, Program
from multus_daemon.plugins.plugin import Plugin, Progress
from multus_daemon.plugins.run import ListRunner
from multus_daemon.plugins.select import Plugins
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import BUILT_IN, Attachment, Difference, Invocation, Sandbox
from multus_daemon.spec.cni import result
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId, IfName
from multus_daemon.spec.cni.result import Result


def _pause(seconds: float) -> None:
    # Also without a time to wait somebody else may come in between.
    if seconds:
        deadline.pause(seconds)
    else:
        time.sleep(0)


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


class PlayedPlugin(Plugin):
    """A plugin whose verbs are all one function of its type, the call and the namespace."""

    def __init__(self, plugin_type: str, play: Callable[[str, Invocation, PodNetns], Result]) -> None:
        super().__init__(plugin_type, f"/fake/{plugin_type}")
        self._play = play

    def _run(self, call: Invocation, netns: PodNetns) -> Result:
        return self._play(self.type, call, netns)

    def differences(self, call: Invocation, netns: PodNetns, not_compared: frozenset[Any] = frozenset()) -> None:
        return None

    def refusal(self, call: Invocation) -> None:
        return None

    def called_by(self, call: Invocation) -> Mapping[str, Invocation]:
        return {}

    def keeps(self, call: Invocation) -> bool:
        return False


class FakePrograms:
    """The plugins of a FakePluginRunner as binaries."""

    def __init__(self, fake: FakePluginRunner) -> None:
        self._fake = fake

    def locate(self, plugin_type: str) -> Program:
        self._fake.located.append(plugin_type)
        path = self._fake.where.format(plugin_type)
        if path in self._fake.programs_of_multus:
            return Program(refusal=PluginIsMultusError(plugin_type, path))
        return Program() if plugin_type in self._fake.missing else Program(path)

    def builds(self, types: Collection[str]) -> Mapping[str, Build]:
        return {name: build for name, build in self._fake.builds.items() if name in types}

    def run(self, plugin_type: str, call: Invocation, path: str = "") -> bytes:
        return self._fake.play(plugin_type, call, None, path)


class FakeModule:
    """A plugin of a FakePluginRunner as a built-in."""

    def __init__(self, fake: FakePluginRunner, plugin_type: str) -> None:
        self._fake = fake
        self.plugin_type = plugin_type

    def unsupported(self, call: Call) -> str:
        return self._fake.not_supported.get(self.plugin_type, "")

    def read(self, call: Call) -> None:
        if error := self._fake.refused.get(self.plugin_type):
            raise error

    def called_by(self, call: Call) -> Mapping[str, Invocation]:
        called = self._fake.called.get(self.plugin_type, {})
        return {name: replace(call.invocation, fields=fields) for name, fields in called.items()}

    def keeps(self, call: Call) -> bool:
        return self._fake.keeps(self.plugin_type)

    def add(self, call: Call, netns: PodNetns) -> Result:
        return self._fake.run(self.plugin_type, call.invocation, netns)

    def delete(self, call: Call, netns: PodNetns) -> None:
        self._fake.run(self.plugin_type, call.invocation, netns)

    check = delete

    def status(self, call: Call) -> None:
        self._fake.run(self.plugin_type, call.invocation)


class _FakePlugins(Plugins):
    """Binaries only, whose namespaces are noted, and which keep what the fake holds."""

    def __init__(self, fake: FakePluginRunner) -> None:
        super().__init__(fake.as_programs, "off")
        self._fake = fake

    def _binary(self, *args: Any, **keys: Any) -> Binary:
        binary, fake = super()._binary(*args, **keys), self._fake
        run = binary.run

        def noted(call: Invocation, netns: PodNetns) -> Result:
            try:
                return run(call, netns)
            finally:
                fake.namespaces[-1] = netns

        binary.run = noted  # type: ignore[method-assign]  # the same, and it notes the namespace
        binary.keeps = lambda call: fake.keeps(binary.type)  # type: ignore[method-assign]
        return binary


class FakePluginRunner:
    """`answers` maps (plugin type, verb) to the output, to the exception to raise, or to a function of the invocation.

    Without an answer: an empty result for ADD and nothing for the rest. `missing`: types that are not found.
    `fail_at`: the number of a call, from 1, to what it raises. `not_supported`: plugin type to what `unsupported` says;
    `called`: plugin type to what `called_by` says; `refused`: to what `validate` raises; `holds`: to what `keeps`
    says, or raises; `programs_of_multus`: paths that are refused. `paths` and `namespaces` are those that were given
    with a call.
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
        self.builds: dict[str, Build] = {}
        self.called: dict[str, Mapping[str, Mapping[str, Any]]] = {}
        self.refused: dict[str, CniError] = {}
        self.holds: dict[str, bool | CniError] = {}
        self.programs_of_multus: set[str] = set()
        self.paths: list[str] = []
        self.namespaces: list[PodNetns | None] = []
        self._guard = threading.Lock()

    @property
    def as_programs(self) -> FakePrograms:
        """The plugins as binaries."""
        return FakePrograms(self)

    @property
    def as_plugins(self) -> Plugins:
        """The plugins as binaries, chosen as the daemon does."""
        return _FakePlugins(self)

    def as_modules(self, *plugin_types: str) -> Mapping[str, Module]:
        """The plugins of these types as built-ins."""
        return {name: FakeModule(self, name) for name in plugin_types}

    def plugin_for(self, plugin_type: str, call: Invocation) -> Plugin:
        """One plugin, as a built-in asks for its IPAM plugin."""
        return PlayedPlugin(plugin_type, self.run)

    @property
    def order(self) -> list[tuple[str, str]]:
        """(plugin type, verb) of each call."""
        return [(call.plugin_type, call.verb) for call in self.calls]

    def keeps(self, plugin_type: str) -> bool:
        held = self.holds.get(plugin_type, False)
        if isinstance(held, CniError):
            raise held
        return held

    def play(self, plugin_type: str, invocation: Invocation, netns: PodNetns | None, path: str = "") -> bytes:
        """Note the call, and return what the plugin prints."""
        with self._guard:
            self.calls.append(PluginCall(plugin_type, invocation))
            self.paths.append(path)
            self.namespaces.append(netns)
            number = len(self.calls)
        if error := self.fail_at.get(number):
            raise error
        if plugin_type in self.missing:
            raise PluginNotFoundError(plugin_type, ["/fake"])
        answer = self.answers.get((plugin_type, invocation.verb), b"{}" if invocation.verb == "ADD" else b"")
        if isinstance(answer, BaseException):
            raise answer
        return answer(invocation) if callable(answer) else answer

    def run(self, plugin_type: str, invocation: Invocation, netns: PodNetns | None = None) -> Result:
        printed = self.play(plugin_type, invocation, netns)
        return result.decode(printed, invocation.cni_version) if invocation.verb == "ADD" else Result()


@dataclass(frozen=True)
class DelegateCall:
    """One call of a delegate."""

    verb: str
    sandbox: Sandbox
    attachment: Attachment
    may_be_own: bool


@dataclass(frozen=True)
class NetworkCall:
    """One STATUS or GC of a network."""

    verb: str
    config: NetworkConfig
    valid: tuple[tuple[str, str], ...]


class FakeDelegateRunner(ListRunner):
    """`results`: attachment name to what its ADD returns (else an empty result).

    `fail`: (verb, attachment name) to what it raises each time; `fail_at`: the number of a call, from 1, to what it
    raises; verbs are PLAN, ADD, DEL, CHECK and REMEMBER, numbers count ADD, DEL and CHECK. `attached` is what (name,
    interface) has had an ADD and no DEL since, `remembered` and `networks` what `remember` was called with,
    `most_at_once` the largest number of calls under way together. What is in `built_in`, by attachment name, runs in
    the calling thread. STATUS and GC are in `network_calls`, not counted, and fail by the network's name. ADD, DEL and
    CHECK wait for `waits_for`.
    """

    def __init__(self, results: Mapping[str, Result] | None = None, *, pause: float = 0.0) -> None:
        self.results = dict(results or {})
        self.fail: dict[tuple[str, str], BaseException] = {}
        self.fail_at: dict[int, BaseException] = {}
        self.calls: list[DelegateCall] = []
        self.network_calls: list[NetworkCall] = []
        self.planned: list[Attachment] = []
        self.built_in: set[str] = set()
        self.foreseen: dict[str, str] = {}
        self.attached: set[tuple[str, str]] = set()
        self.remembered: list[Attachment] = []
        self.networks: list[int] = []
        self.pause = pause
        self.waits_for: futures.Future[None] | None = None
        self.most_at_once = 0
        self._running = 0
        self._guard = threading.Lock()

    @property
    def order(self) -> list[tuple[str, str]]:
        """(verb, attachment name) of each call."""
        return [(call.verb, call.attachment.name) for call in self.calls]

    def programs(self, configs: Iterable[NetworkConfig]) -> Mapping[str, Program]:
        return {plugin.type: Program(f"/fake/{plugin.type}") for config in configs for plugin in config.plugins}

    def plan(self, sandbox: Sandbox, attachment: Attachment, programs: Mapping[str, Program]) -> Attachment:
        self.planned.append(attachment)
        if error := self.fail.get(("PLAN", attachment.name)):
            raise error
        served_by = {
            plugin.type: BUILT_IN if attachment.name in self.built_in else f"/fake/{plugin.type}"
            for plugin in attachment.config.plugins
        }
        return replace(attachment, served_by=served_by)

    def invocations(self, sandbox: Sandbox, attachment: Attachment) -> list[tuple[str, Invocation]]:
        return []

    def foresee(self, sandbox: Sandbox, attachment: Attachment) -> str:
        if error := self.fail.get(("FORESEE", attachment.name)):
            raise error
        return self.foreseen.get(attachment.name, "")

    def differences(self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns, *, asks: bool) -> list[Difference]:
        return []

    def adds_here(self, attachment: Attachment) -> bool:
        return attachment.name in self.built_in

    def deletes_here(self, attachment: Attachment) -> bool:
        return attachment.name in self.built_in

    def add(
        self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None
    ) -> Result:
        # Like the real one: state left by a failed ADD stays.
        self.attached.add((attachment.name, attachment.ifname))
        self._call("ADD", sandbox, attachment, netns)
        return self.results.get(attachment.name, Result())

    def delete(
        self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns, progress: Progress | None = None
    ) -> None:
        self._call("DEL", sandbox, attachment, netns)
        self.attached.discard((attachment.name, attachment.ifname))

    def forget(self, sandbox: Sandbox, attachment: Attachment) -> None:
        self.attached.discard((attachment.name, attachment.ifname))

    def check(self, sandbox: Sandbox, attachment: Attachment, netns: PodNetns) -> None:
        self._call("CHECK", sandbox, attachment, netns)

    def remember(self, sandbox: Sandbox, attachment: Attachment, networks: int = 0) -> None:
        with self._guard:
            self.remembered.append(attachment)
            self.networks.append(networks)
        if error := self.fail.get(("REMEMBER", attachment.name)):
            raise error

    def status(self, config: NetworkConfig) -> None:
        self._call_network("STATUS", config, ())

    def gc(self, config: NetworkConfig, valid: Sequence[tuple[ContainerId, IfName]]) -> None:
        self._call_network("GC", config, valid)

    def _call_network(self, verb: str, config: NetworkConfig, valid: Sequence[tuple[ContainerId, IfName]]) -> None:
        self.network_calls.append(NetworkCall(verb, config, tuple(valid)))
        _pause(self.pause)
        if error := self.fail.get((verb, config.name)):
            raise error

    def _call(self, verb: str, sandbox: Sandbox, attachment: Attachment, netns: PodNetns) -> None:
        assert netns.path == sandbox.netns, "the namespace of another path"
        with netns.of_thread() as own:
            assert netns is own, "the namespace of another thread"
        with self._guard:
            self.calls.append(DelegateCall(verb, sandbox, attachment, netns.may_be_own))
            number = len(self.calls)
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        try:
            if self.waits_for:
                deadline.current().wait(self.waits_for)
            _pause(self.pause)
        finally:
            with self._guard:
                self._running -= 1
        if error := self.fail_at.get(number) or self.fail.get((verb, attachment.name)):
            raise error
