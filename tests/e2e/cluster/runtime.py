"""Read the state of the node's network from containerd, as the kubelet does: CRI v1, `RuntimeService/Status`.

The messages are read by hand: https://github.com/kubernetes/cri-api/blob/master/pkg/apis/runtime/v1/api.proto
(`StatusRequest`, `StatusResponse`) needs no generated code for one string.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Final

import grpc

_METHOD: Final = "/runtime.v1.RuntimeService/Status"
_VERBOSE: Final = b"\x08\x01"
"""`verbose`, field 1 of the request, is true: the answer has containerd's view of the CNI configuration as JSON."""


class NetworkWatch:
    """Asks all the time, from another thread; a context manager.

    `seen`: the networks that new pods would have got, in order: the `name` of the configuration, empty where there was
    none, and the seconds from the start.
    """

    def __init__(self, socket: Path, *names: str) -> None:
        """`socket`: containerd's; `names`: of the networks that are looked for."""
        self._socket = socket
        self._names = names
        self._answered = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.seen: list[tuple[str, float]] = []
        self.asked = 0

    def __enter__(self) -> NetworkWatch:
        self._thread.start()
        assert self._answered.wait(timeout=30), "containerd does not answer"
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=30)

    def names(self) -> list[str]:
        """The networks in the order in which they were the runtime's."""
        return [name for name, _ in self.seen]

    def seconds(self, name: str) -> float:
        """How long a network was the runtime's."""
        ends = [begin for _, begin in self.seen[1:]] + [time.monotonic() - self._begin]
        return sum(end - begin for (found, begin), end in zip(self.seen, ends, strict=True) if found == name)

    def _ask(self) -> None:
        self._begin = time.monotonic()
        with grpc.insecure_channel(f"unix:{self._socket}") as channel:
            status = channel.unary_unary(_METHOD)
            while not self._stop.is_set():
                answer = status(_VERBOSE, timeout=10)
                self.asked += 1
                name = next((name for name in self._names if f'"Name":"{name}"'.encode() in answer), "")
                if not self.seen or self.seen[-1][0] != name:
                    self.seen.append((name, time.monotonic() - self._begin))
                self._answered.set()
