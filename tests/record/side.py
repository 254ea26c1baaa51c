"""A node on which one of the two daemons serves: upstream's program, or ours, with the same settings and networks."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import multus_shim
from bench.program import processor_seconds
from multus_daemon import __version__
from tests.e2e import build_tools
from tests.e2e.apiserver import ApiServer
from tests.e2e.node import Answer, Node
from tests.e2e.takeover import Takeover
from tests.e2e.upstream import Upstream, daemon_of, shim_of


class Side(Takeover):
    """A node of its own, laid out and without a daemon until `serve`; its networks are those of `Takeover`."""

    release = ""
    """Upstream's release; empty if the daemon is ours."""

    @property
    def title(self) -> str:
        """Who it is."""
        return f"upstream {self.release}" if self.release else f"here {__version__}"

    @property
    def shim(self) -> Path:
        """The side's own."""
        return shim_of(self.release) if self.release else multus_shim.binary()

    @property
    def runs(self) -> bool:
        """True while the daemon runs."""
        if self.release:
            return self.upstream.process.running
        return self.node.daemon is not None and self.node.daemon.poll() is None

    def configure(self, **settings: Any) -> None:
        """Set keys of the configuration map, before `serve`."""
        self.node.settings |= settings
        self.upstream = Upstream(self.node, self.name, self.upstream.release)

    def lan(self, name: str, plugin: str, subnet: str) -> None:
        """Declare a network of a plugin that takes what `ptp` does."""
        config = {"cniVersion": "1.0.0", "name": name, "type": plugin, "ipam": self.ipam(subnet)}
        self.definition(name, json.dumps(config))

    def serve(self) -> None:
        """Start the daemon; back when it serves."""
        if self.release:
            self.upstream.start()
        else:
            self.node.start()

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the daemon and wait."""
        if self.release:
            self.upstream.stop(number)
        elif number == signal.SIGTERM:
            self.node.stop()
        else:
            self.node.kill()

    def call(self, verb: str, pod: str) -> Answer:
        """A call of the runtime, by the side's own shim; `pod` was declared with `self.pod`."""
        return self.runtime(verb, pod, by=self.release or "ours")

    def retried(self, verb: str, pod: str, seconds: float = 5) -> Answer:
        """A call that the runtime repeats until it succeeds, for so long."""
        end = time.monotonic() + seconds
        while (answer := self.call(verb, pod)).code and time.monotonic() < end:
            time.sleep(0.5)
        return answer

    def primary(self, content: dict[str, Any]) -> None:
        """Another cluster network than those of `cluster_network`, from its file."""
        name = f"10-{content['name']}.conflist"
        Path(self.node.settings["cniConfigDir"], name).write_text(json.dumps(content))

    def processor_time(self) -> float:
        """Seconds of a processor that the daemon and the processes of this program have taken."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        pid = self.upstream.process.pid if self.release else self.node.daemon.pid if self.node.daemon else 0
        return processor_seconds(pid) + ended.ru_utime + ended.ru_stime

    def end_pod(self, pod: str) -> Answer:
        """Delete a pod as kubelet and runtime do: DEL, then the namespace goes, whatever DEL has answered."""
        deleted = self.call("DEL", pod)
        self.node.remove_netns(self.spaces[pod])
        self.spaces[pod] = ""
        self.server.delete_pod(pod, self.namespace)
        return deleted


def told(answer: Answer) -> str:
    """`success`, or the cause of an error."""
    if answer.code == 0:
        return "success"
    try:
        text = str(answer.json.get("msg", ""))
    except ValueError:
        text = answer.stderr.decode(errors="replace")
    # Upstream's shim tells the request before the cause, and the configuration after it.
    cause = text.rpartition("ERRORED: ")[2].partition("': StdinData")[0].strip()
    return re.sub(r'^.*error adding container to network "', 'network "', cause) or f"status {answer.code}"


@contextlib.contextmanager
def side(server: ApiServer, release: str, number: int) -> Iterator[Side]:
    """A side; `release`: of upstream, or empty. Raises ToolError, or skips, where a program is missing."""
    if release:
        daemon_of(release)
        shim_of(release)
    namespace = f"record-{number}"
    server.create_namespace(namespace)
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(Node(standalone=False))
        made = Side(server, node, namespace)
        made.release = release
        made.lay_out(build_tools.reference())
        made.upstream = Upstream(node, made.name, release) if release else Upstream(node, made.name)
        stack.enter_context(server.reachable_in(node.host))
        # Not of the one that there is now: see `configure`.
        stack.callback(lambda: made.upstream.stop(signal.SIGKILL))
        yield made
