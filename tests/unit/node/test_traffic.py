"""Sums of the pods' traffic over a kernel that answers what the test says."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent import futures
from dataclasses import replace
from pathlib import Path

import pytest

from multus_daemon.kernel.traffic import Figures, Namespace, NamespaceSocket, UnsupportedKernelError
from multus_daemon.metrics import Metrics
from multus_daemon.metrics.declared import TRAFFIC
from multus_daemon.node import traffic
from multus_daemon.node.traffic import Traffic
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.pod.records import Records
from multus_daemon.pod.store import FileStore
from multus_daemon.pod.view import View
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.names import ContainerId, IfName, PodName, PodUid
from multus_daemon.spec.cni.names import Namespace as PodNamespace
from multus_daemon.spec.cni.result import Interface, Result
from tests.fakes.store import FakeDelegateStore

LATER = 4e9
"""A Unix time after each start."""
EARLIER = 1.0


class FakeKernel(NamespaceSocket):
    """`counts` has the bytes that each interface has received, by path and name. It is its own factory.

    `seconds`: what each read takes on `clock`. `error`: what the next socket raises. `hangs` is set in a read, which
    then waits for `goes_on`.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], int] = {}
        self.reads: list[list[str]] = []
        self.seconds = 0.0
        self.clock = 100.0
        self.error: OSError | None = None
        self.hangs: threading.Event | None = None
        self.goes_on = threading.Event()

    def __call__(self) -> NamespaceSocket:
        if self.error:
            raise self.error
        return self

    def close(self) -> None:
        pass

    def read(self, asked: Sequence[tuple[Namespace, Sequence[str]]]) -> list[dict[str, Figures]]:
        self.clock += self.seconds
        if self.hangs:
            self.hangs.set()
            assert self.goes_on.wait(10)
        self.reads.append([namespace.path for namespace, _ in asked])
        return [
            {
                name: Figures(receive_bytes=self.counts[namespace.path, name])
                for name in names
                if (namespace.path, name) in self.counts
            }
            for namespace, names in asked
        ]


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel()


def loaded() -> View:
    """The view of a node without records."""
    records = Records(FakeDelegateStore())
    records.refresh()
    return records.view


def make(kernel: FakeKernel, view: View | None = None) -> Traffic:
    return Traffic(view or loaded(), seconds=10, fresh_seconds=0, clock=lambda: kernel.clock, kernel=kernel)


def attachment(network: str, ifname: str, **fields: object) -> Attachment:
    config = conf.parse(b'{"name":"n","type":"ptp","cniVersion":"1.0.0"}')
    result = Result(interfaces=(Interface("veth1"), Interface(ifname, sandbox="/n")))
    return replace(Attachment(network, config, IfName(ifname), result=result), **fields)  # type: ignore[arg-type]


def record(
    name: str, *attachments: Attachment, created: float = LATER, pod: str = "", path: str = ""
) -> ContainerRecord:
    return ContainerRecord(
        Sandbox(ContainerId(name), path or f"/n/{name}"),
        IfName("eth0"),
        PodNamespace("web"),
        PodName(pod or name),
        PodUid("u"),
        (attachment("cluster", "eth0", cluster_network=True), *attachments),
        created=created,
    )


def keep(made: Traffic, item: ContainerRecord) -> None:
    made.view.enter(item)


def received(made: Traffic) -> dict[str, int]:
    """The bytes by network."""
    return {network: figures.receive_bytes for (network,), figures in made.figures().items()}


# --- sums by network -------------------------------------------------------------------------------------------------


def test_fresh_figures_are_the_same_object_until_something_changes(kernel: FakeKernel) -> None:
    made = Traffic(loaded(), seconds=10, fresh_seconds=5, clock=lambda: kernel.clock, kernel=kernel)
    keep(made, record("a", attachment("web/blue", "net1")))
    kernel.counts["/n/a", "net1"] = 1
    first = made.figures()
    assert made.figures() is first
    kernel.counts["/n/a", "net1"] = 2
    kernel.clock += 6
    assert received(made) == {"web/blue": 2}
    keep(made, record("b", attachment("web/red", "net1")))
    kernel.counts["/n/b", "net1"] = 3
    kernel.clock += 6
    assert received(made) == {"web/blue": 2, "web/red": 3}


@pytest.mark.parametrize("error", [OSError(errno.ENOBUFS, "no room"), IndexError("a fault of ours")])
def test_a_socket_is_closed_after_any_error(
    kernel: FakeKernel, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(kernel, "close", lambda: closed.append("closed"))
    made = make(kernel)
    keep(made, record("a", attachment("web/blue", "net1")))
    kernel.counts["/n/a", "net1"] = 7

    def fail(_: object) -> None:
        raise error

    with monkeypatch.context() as failing, contextlib.suppress(IndexError):
        failing.setattr(kernel, "read", fail)
        made.figures()
    assert closed == ["closed"]
    assert received(made) == {"web/blue": 7}
    assert closed == ["closed"]


def test_an_interface_that_was_made_again_counts_from_its_start(kernel: FakeKernel) -> None:
    made = make(kernel)
    keep(made, record("a", attachment("web/blue", "net1")))
    kernel.counts["/n/a", "net1"] = 100
    assert received(made) == {"web/blue": 100}
    kernel.counts["/n/a", "net1"] = 7
    assert received(made) == {"web/blue": 107}


def test_what_cannot_be_read_keeps_its_last_figures(kernel: FakeKernel) -> None:
    made = make(kernel)
    keep(made, record("a", attachment("web/blue", "net1")))
    kernel.counts["/n/a", "net1"] = 100
    assert received(made) == {"web/blue": 100}
    del kernel.counts["/n/a", "net1"]
    assert received(made) == {"web/blue": 100}
    kernel.error = OSError(errno.ENOBUFS, "no room")
    assert received(made) == {"web/blue": 100}
    kernel.error = None
    kernel.counts["/n/a", "net1"] = 101
    assert received(made) == {"web/blue": 101}


@pytest.mark.parametrize(
    "item",
    [
        attachment("web/blue", "net1", result=None),
        attachment("web/blue", "net1", leaving=True),
        attachment("web/blue", "net1", auxiliary=True),
        attachment("web/blue", "net1", cluster_network=True),
        attachment("web/blue", "net1", result=Result(interfaces=(Interface("veth1"),))),
    ],
    ids=["under way", "leaving", "auxiliary chain", "cluster network", "no interface in the pod"],
)
def test_only_interfaces_that_an_attachment_has_in_the_pod_count(kernel: FakeKernel, item: Attachment) -> None:
    made = make(kernel)
    kernel.counts["/n/a", "net1"] = 100
    keep(made, record("a", item))
    assert received(made) == {}
    assert kernel.reads == []


def test_a_result_before_cni_0_3_names_no_interfaces(kernel: FakeKernel) -> None:
    made = make(kernel)
    kernel.counts["/n/a", "net1"] = 100
    keep(made, record("a", attachment("web/blue", "net1", result=Result())))
    assert received(made) == {"web/blue": 100}


def test_the_networks_beyond_the_limit_are_one_sum(kernel: FakeKernel) -> None:
    made = make(kernel)
    networks = [f"web/n{number}" for number in range(traffic.NETWORKS_MAX + 3)]
    for number, network in enumerate(networks):
        keep(made, record(f"c{number}", attachment(network, "net1")))
        kernel.counts[f"/n/c{number}", "net1"] = 2
    assert received(made) == {**dict.fromkeys(networks[: traffic.NETWORKS_MAX], 2), "other": 6}
    # A network keeps its place: its sum must not fall.
    made.view.leave([ContainerId("c0")])
    assert received(made)["web/n0"] == 2
    assert received(made)["other"] == 6


def test_a_namespace_on_record_twice_is_the_newer_containers(kernel: FakeKernel) -> None:
    made = make(kernel)
    keep(made, record("new", attachment("web/blue", "net1"), created=LATER + 1, path="/n/same"))
    keep(made, record("old", attachment("web/red", "net1"), attachment("web/red", "net2"), path="/n/same"))
    kernel.counts |= {("/n/same", "net1"): 10, ("/n/same", "net2"): 3}
    assert received(made) == {"web/blue": 10, "web/red": 3}


# --- the records -----------------------------------------------------------------------------------------------------


def test_what_earlier_daemons_attached_counts_from_the_first_reading(kernel: FakeKernel) -> None:
    store = FakeDelegateStore()
    for item in (
        record("old", attachment("web/blue", "net1"), created=EARLIER),
        record("by-predecessor", attachment("web/red", "net1")),
    ):
        store.records[item.sandbox.container_id] = item
    records = Records(store)
    made = make(kernel, records.view)
    # Before they are loaded a hot-plug writes one.
    keep(made, record("early", attachment("web/green", "net1"), created=EARLIER))
    store.records["early"] = record("early", attachment("web/green", "net1"), created=EARLIER)
    records.refresh()
    kernel.counts |= {("/n/old", "net1"): 500, ("/n/by-predecessor", "net1"): 7, ("/n/early", "net1"): 500}
    assert received(made) == {"web/blue": 0, "web/red": 7, "web/green": 0}
    kernel.counts["/n/old", "net1"] = 501
    assert received(made) == {"web/blue": 1, "web/red": 7, "web/green": 0}
    # A network that the old pod gets now counts as a whole.
    keep(made, record("old", attachment("web/blue", "net1"), attachment("web/red", "net2"), created=EARLIER))
    kernel.counts["/n/old", "net2"] = 100
    assert received(made) == {"web/blue": 1, "web/red": 107, "web/green": 0}


def test_a_change_during_a_load_wins(kernel: FakeKernel) -> None:
    class Deleting(FakeDelegateStore):
        """Returns a record whose DEL comes between."""

        def load(self, container_id: ContainerId) -> ContainerRecord | None:
            found = super().load(container_id)
            records.view.leave([container_id])
            return found

    store = Deleting()
    store.records["a"] = record("a", attachment("web/blue", "net1"))
    records = Records(store)
    made = make(kernel, records.view)
    records.refresh()
    kernel.counts["/n/a", "net1"] = 1
    assert received(made) == {}
    assert records.view.get(ContainerId("a")) is None


def test_the_records_report_what_they_write(kernel: FakeKernel, tmp_path: Path) -> None:
    records = Records(FileStore(tmp_path, ResultCache(tmp_path)))
    records.refresh()
    made = make(kernel, records.view)
    kernel.counts |= {("/n/a", "net1"): 1, ("/n/b", "net1"): 2}
    begun = record("a", attachment("web/blue", "net1", result=None))
    records.save(begun)
    assert received(made) == {}
    records.save(record("a", attachment("web/blue", "net1")), durable=False)
    assert received(made) == {"web/blue": 1}
    records.save(record("b", attachment("web/blue", "net1")))
    records.set_aside(record("a", attachment("web/blue", "net1")), since=1.0, why="x")
    kernel.counts["/n/a", "net1"] = 100
    assert received(made) == {"web/blue": 3}
    records.forget(ContainerId("b"))
    kernel.counts["/n/b", "net1"] = 100
    assert received(made) == {"web/blue": 3}


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_what_is_not_read_in_time_is_read_first_the_next_time(kernel: FakeKernel) -> None:
    made = make(kernel)
    for number in range(40):
        keep(made, record(f"c{number}", attachment("web/blue", "net1")))
        kernel.counts[f"/n/c{number}", "net1"] = 1
    # Each read takes more than half of the limit of 10 s.
    kernel.seconds = 6
    assert received(made) == {"web/blue": 32}
    kernel.reads.clear()
    assert received(made) == {"web/blue": 40}
    assert set(kernel.reads[0]) > {f"/n/c{number}" for number in range(32, 40)}


def test_a_reading_that_hangs_delays_others_only_so_long(kernel: FakeKernel) -> None:
    made = Traffic(loaded(), seconds=0.05, fresh_seconds=0, kernel=kernel)
    keep(made, record("a", attachment("web/blue", "net1")))
    kernel.counts["/n/a", "net1"] = 3
    assert received(made) == {"web/blue": 3}
    kernel.hangs, kernel.goes_on = threading.Event(), threading.Event()
    with futures.ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(made.figures)
        assert kernel.hangs.wait(10)
        try:
            assert received(made) == {"web/blue": 3}
        finally:
            kernel.goes_on.set()
        assert hanging.result(10)


def test_fresh_figures_are_not_read_again(kernel: FakeKernel) -> None:
    made = Traffic(loaded(), fresh_seconds=1, clock=lambda: kernel.clock, kernel=kernel)
    keep(made, record("a", attachment("web/blue", "net1")))
    for _ in range(3):
        made.figures()
    assert len(kernel.reads) == 1
    kernel.clock += 1
    made.figures()
    assert len(kernel.reads) == 2


def test_an_old_kernel_is_logged_once(kernel: FakeKernel, caplog: pytest.LogCaptureFixture) -> None:
    made = make(kernel)
    keep(made, record("a", attachment("web/blue", "net1")))
    kernel.error = UnsupportedKernelError(errno.ENOPROTOOPT, "too old")
    with caplog.at_level(logging.WARNING):
        assert [received(made) for _ in range(3)] == [{}, {}, {}]
    (line,) = caplog.messages
    assert "attachmentMetrics" in line


# --- the metrics -----------------------------------------------------------------------------------------------------


def test_a_scrape_has_each_figure() -> None:
    asked: list[Mapping[tuple[str, ...], Figures]] = []

    def figures() -> Mapping[tuple[str, ...], Figures]:
        asked.append({("web/blue",): Figures(*range(1, 9))})
        return asked[-1]

    metrics = Metrics()
    metrics.measure_traffic(figures)
    assert asked == []
    lines = metrics.render()[0].decode().splitlines()
    assert len(asked) == 1
    assert tuple(TRAFFIC) == Figures._fields
    for number, name in enumerate(TRAFFIC, 1):
        assert f'multus_network_{name}_total{{network="web/blue"}} {number}.0' in lines
