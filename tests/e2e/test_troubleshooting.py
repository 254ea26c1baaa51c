"""Broken situations: every way of asking names the same cause, and what is advised makes the pod start.

What is seen is `docs/troubleshooting.md` (`troubleshooting.py`): the docstrings of these tests are its words.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.disks import fill
from tests.e2e.addresses.objects import forget
from tests.e2e.apiserver import ApiServer
from tests.e2e.exec_kubelet import ExecKubelet
from tests.e2e.node import Node
from tests.e2e.test_doctor import program_for
from tests.e2e.test_kubernetes import Cluster
from tests.e2e.troubleshooting import COLUMNS, Section, shortened

pytest_plugins = ["tests.e2e.kube_fixtures"]

S390X = 22
OF_THE_MACHINE = ("links", "rules", "leases", "others", "shim")
"""Checks of the doctor that look at more than the test's own node, or at what such a node does not have."""


def multusctl(node: Node, *words: str) -> tuple[int, str]:
    """Exit status and output."""
    return run(node.contained(sys.executable, "-m", "multus_tools.ctl", *words, "--config", str(node.config)))


def run(command: list[str]) -> tuple[int, str]:
    """Exit status and output of a program, as on a terminal of 100 columns without colours."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    return done.returncode, done.stdout + done.stderr


@dataclass
class Failed:
    """An ADD that has failed."""

    pod: str
    answer: str
    """The error that the runtime gets, which the kubelet makes its own Event of."""
    logged: str
    """The first line of the log that is more than a notice."""


class Broken(Cluster):
    """A node in the session's API server, with something wrong, and what an operator is told."""

    def __init__(self, server: ApiServer, node: Node, namespace: str, section: Section) -> None:
        super().__init__(server, node, namespace)
        self.section = section
        self.netns = ""
        self._containers = 0

    # --- the ways of asking ----------------------------------------------------------------------------------------

    def event(self, failed: Failed) -> str:
        """The Warning about the pod."""
        found: list[str] = []

        def is_there() -> bool:
            items = [item for item in self.events(failed.pod) if item["type"] == "Warning"]
            found[:] = [f"{item['type']}  {item['reason']}  {item['message']}" for item in items]
            return bool(found)

        self.node.wait_until(is_there, "the pod has an Event")
        return "\n".join(found)

    def event_of_the_node(self, _: Failed | None = None) -> str:
        """The Warning about the node."""
        found: list[str] = []

        def is_there() -> bool:
            items = self.server.request("GET", "/api/v1/events", fieldSelector=f"involvedObject.name={self.name}")
            found[:] = [
                f"{item['type']}  {item['reason']}  {item['message']}"
                for item in items["items"]
                if item["type"] == "Warning"
            ]
            return bool(found)

        self.node.wait_until(is_there, "the node has an Event")
        return "\n".join(found)

    def why(self, failed: Failed) -> tuple[str, str]:
        """The command and what it says, which is that something is wrong."""
        status, found = self.asked_from_anywhere(failed.pod)
        assert status == 1, found
        return f"kubectl multus why {self.namespace}/{failed.pod}", found

    def asked_from_anywhere(self, pod: str) -> tuple[int, str]:
        """Exit status and output of `kubectl multus why`."""
        words = ("why", f"{self.namespace}/{pod}", "--kubeconfig", str(self.server.admin_kubeconfig))
        return run([sys.executable, "-m", "multus_tools.kubectl", *words])

    def explain(self, failed: Failed) -> tuple[str, str]:
        """The command and what it says."""
        words = ("explain", f"{self.namespace}/{failed.pod}")
        return " ".join(("multusctl", *words)), multusctl(self.node, *words)[1]

    def doctor(self, _: Failed | None = None) -> tuple[str, str]:
        """The findings about the test's own node."""
        status, found = multusctl(self.node, "doctor")
        findings = re.findall(r"^(?:error|warning|info) .*\n(?: .*\n)*", found, flags=re.MULTILINE)
        own = [item for item in findings if item.split()[1].rstrip(":") not in OF_THE_MACHINE]
        assert status == 1 or not any(item.startswith("error") for item in own)
        return "multusctl doctor", "".join(own)

    def leaks(self, _: Failed | None = None) -> tuple[str, str]:
        """What nobody will delete."""
        return "multusctl attachments --leaks -o wide", multusctl(self.node, "attachments", "--leaks", "-o", "wide")[1]

    # --- a situation -----------------------------------------------------------------------------------------------

    def add(self, pod: str) -> tuple[int, str, str]:
        """As the kubelet tries it, each time with a new container; exit status, the error, the new lines of the log."""
        self._containers += 1
        self.netns = self.netns or self.node.add_netns()
        mark = len(self.node.log.read_text())
        answer = self.cni("ADD", pod, self.netns, f"c0ffee{self._containers:02}", stdin=self.stdin)
        text = f"{answer.json['msg']}; {answer.json.get('details', '')}" if answer.code else ""
        if answer.code:
            ended = re.compile(r"\[error\] .* verb=ADD .* outcome=")
            self.node.wait_until(
                lambda: ended.search(self.node.log.read_text()[mark:]) is not None, "the log has the end"
            )
        return answer.code, text, self.node.log.read_text()[mark:]

    @property
    def stdin(self) -> bytes:
        return self.node.stdin

    def fails(
        self,
        pod: str,
        cause: str,
        advice: str,
        *commands: Callable[[Failed], tuple[str, str]],
        event: Callable[[Failed], str] | None = None,
        shows: int = 0,
    ) -> None:
        """An ADD of `pod` fails: all ways name the cause, a pattern, and one of the commands has the advice, a text.

        `commands`: the commands on the node, beside `why` from anywhere; default: `explain`. `event`: the Event if it
        is not the pod's own. `shows`: the command that the page shows; 0 is `why`.
        """
        code, answer, logged = self.add(pod)
        assert code == 1, "the situation is not broken"
        failed = Failed(pod, answer, first_problem(logged, f"{self.namespace}/{pod}"))
        told = (event or self.event)(failed)
        asked = [ask(failed) for ask in (self.why, *(commands or (self.explain,)))]
        self.are_told(cause, advice, told, failed.logged, *asked, answer=answer, shows=shows)

    def are_told(
        self, cause: str, advice: str, event: str, log: str, *asked: tuple[str, str], answer: str = "", shows: int = 0
    ) -> None:
        """Every way names the cause; one of the commands advises. The page shows the Event and one command."""
        ways = {"event": event, "log": log, **dict(asked), **({"answer": answer} if answer else {})}
        silent = {way: text for way, text in ways.items() if not re.search(cause, text)}
        assert not silent, f"{cause} is not told by: {silent}"
        assert any(advice in text for _, text in asked), f"{advice!r} is not in {asked}"
        self.section.event(event)
        command, output = asked[shows]
        self.section.show(shortened(output), command)

    def starts(self, pod: str, cure: str) -> None:
        """Show `cure`, which was done: the runtime removes what has failed, and the pod starts."""
        for number in range(1, self._containers + 1):
            assert self.cni("DEL", pod, self.netns, f"c0ffee{number:02}", stdin=self.stdin).code == 0
        code, answer, _ = self.add(pod)
        assert code == 0, answer
        self.node.wait_until(lambda: self.asked_from_anywhere(pod)[0] == 0, "it has its networks")
        assert multusctl(self.node, "attachments", f"{self.namespace}/{pod}")[0] == 0
        self.section.say(cure)
        self.section.close()

    def again(self, pod: str, networks: str | None) -> None:
        """The pod's owner makes it anew."""
        self.server.delete_pod(pod, self.namespace)
        self.pod(pod, networks)


def first_problem(log: str, pod: str = "") -> str:
    """The first line of the log that is a warning or an error, of those about the pod, where one is named."""
    problems = [line for line in log.splitlines() if "[error]" in line or "[warning]" in line]
    return next(line for line in problems if f"pod={pod}" in line or not pod)


@pytest.fixture
def broken(request: pytest.FixtureRequest, api_server: ApiServer, make_node: Callable[..., Node]) -> Iterator[Broken]:
    """A node in a namespace of the test's own name, not started."""
    namespace = request.function.__name__.removeprefix("test_").replace("_", "-")
    api_server.create_namespace(namespace)
    node = make_node(standalone=False)
    (node.root / "run").mkdir()
    made = Broken(api_server, node, namespace, Section(request.function, node))
    made.prepare()
    with api_server.reachable_in(node.host), ExecKubelet(api_server, node, made.name):
        yield made
        node.kill()


def test_bad_json(broken: Broken) -> None:
    """Bad JSON in a NetworkAttachmentDefinition.

    A comma is missing in `spec.config`. Line and column are those of the text in `spec.config`.
    """
    broken.definition("storage", '{\n  "cniVersion": "1.0.0",\n  "name": "storage"\n  "type": "ptp"\n}')
    broken.pod("web", "storage")
    broken.node.start()
    broken.fails(
        "web",
        r"not JSON: expected ',' or '}' \(line 4, column 3\) \(network bad-json/storage\)",
        "correct spec.config of NetworkAttachmentDefinition bad-json/storage",
    )
    broken.network("storage", "10.86.0.0/16")
    known = ("explain", "bad-json/web")
    broken.node.wait_until(lambda: multusctl(broken.node, *known)[0] == 0, "the daemon has heard of it")
    broken.starts("web", "Fix: correct it (`kubectl -n bad-json edit net-attach-def storage`).")


def test_missing_network(broken: Broken) -> None:
    """A network that does not exist.

    The pod's annotation names a NetworkAttachmentDefinition that does not exist.
    """
    broken.pod("web", "archive")
    broken.node.start()
    broken.fails(
        "web",
        r"network missing-network/archive does not exist",
        "create it, or correct the pod's annotation",
    )
    broken.network("archive", "10.86.0.0/16")
    broken.starts("web", "Fix: create the network, or correct the annotation in the pod's template.")


RESULT = '{"cniVersion": "1.0.0", "interfaces": [], "ips": []}'
"""What a plugin prints that has done its work."""


def test_missing_plugin(broken: Broken) -> None:
    """A plugin that is not on the node.

    The network uses a plugin whose binary is not installed.
    """
    broken.definition("storage", json.dumps({"cniVersion": "1.0.0", "name": "storage", "type": "fabric"}))
    broken.pod("web", "storage")
    broken.node.start()
    broken.fails("web", r'failed to find plugin "fabric" in path \[\S*/bin\]', "install the plugin on the node")
    broken.node.plugin("fabric", f"echo '{RESULT}'")
    broken.starts(
        "web", "Fix: install the plugin on the node. `kubectl multus networks NETWORK` lists the nodes that lack it."
    )


def test_foreign_plugin(broken: Broken) -> None:
    """A plugin for another architecture.

    The binary was built for another architecture than the node's.
    """
    broken.definition("storage", json.dumps({"cniVersion": "1.0.0", "name": "storage", "type": "fabric"}))
    binary = broken.node.bin_dir / "fabric"
    binary.write_bytes(program_for(S390X))
    binary.chmod(0o755)
    broken.pod("web", "storage")
    broken.node.start()
    machine = os.uname().machine
    broken.fails(
        "web",
        f"is a program for s390x, and this node is {machine}",
        "install the plugins of this node's architecture",
        broken.explain,
        broken.doctor,
    )
    broken.node.plugin("fabric", f"echo '{RESULT}'")
    broken.starts(
        "web", "Fix: install the plugin for the node's architecture. `multusctl doctor` lists every such binary."
    )


def test_no_addresses(broken: Broken) -> None:
    """No addresses left.

    Containers hold all addresses of the network's range.
    """
    broken.network("storage", "10.86.0.0/30")
    broken.pod("db", "storage")
    broken.pod("web", "storage")
    broken.node.start()
    netns = broken.node.add_netns()
    assert broken.cni("ADD", "db", netns, "c0ffee90").code == 0
    broken.fails(
        "web",
        r"no IP addresses available in range set: 10\.86\.0\.1-10\.86\.0\.2",
        "delete pods, or give the network a larger range",
    )
    assert "10.86.0.2/30" in multusctl(broken.node, "attachments")[1], "who holds the address"
    broken.server.delete_pod("db", broken.namespace)
    assert broken.cni("DEL", "db", netns, "c0ffee90").code == 0
    broken.starts(
        "web",
        "Fix: give the network a larger range, or delete pods. `multusctl attachments` shows which pod holds which "
        "address.",
    )


MANIFESTS = Path(__file__).parents[2] / "manifests"


@pytest.fixture
def shared_addresses(broken: Broken) -> Iterator[None]:
    """The addresses that the cluster shares are those of this test."""
    forget(broken.server)
    yield
    broken.node.kill()
    forget(broken.server)


def shared_network(broken: Broken, start: str) -> None:
    """A network with one address for the whole cluster, and its custom resources."""
    ipam = {"type": "whereabouts", "range": f"{start}.0/30", "range_start": f"{start}.2", "gateway": f"{start}.1"}
    for crd in yaml.safe_load_all((MANIFESTS / "addresses-crds" / "crds.yaml").read_text()):
        broken.server.install_crd(crd)
    broken.definition("lan", json.dumps({"cniVersion": "1.0.0", "name": "lan", "type": "ptp", "ipam": ipam}))


@pytest.mark.usefixtures("shared_addresses")
def test_no_shared_addresses(broken: Broken) -> None:
    """No addresses left in the whole cluster.

    Pods of all nodes hold all addresses of a range of `whereabouts`.
    """
    shared_network(broken, "10.86.4")
    broken.server.apply(*yaml.safe_load_all((MANIFESTS / "addresses" / "rbac.yaml").read_text()))
    broken.pod("db", "lan")
    broken.pod("web", "lan")
    broken.node.start()
    netns = broken.node.add_netns()
    added = broken.cni("ADD", "db", netns, "c0ffee90")
    assert added.code == 0, added.stdout
    broken.fails(
        "web",
        r"no free address in range 10\.86\.4\.0/30 \S*: 1 of 1 are held: 1 by node-no-shared-addresses",
        "`kubectl multus addresses -o wide` shows who holds them; delete pods, or give the network a larger range",
    )
    broken.server.delete_pod("db", broken.namespace)
    assert broken.cni("DEL", "db", netns, "c0ffee90").code == 0
    broken.starts(
        "web",
        "Fix: delete pods, enlarge the range, or [release](addresses.md#release) what nodes hold that are gone.",
    )


@pytest.mark.usefixtures("shared_addresses")
def test_no_right_to_addresses(broken: Broken) -> None:
    """No right to reserve addresses.

    A network uses `whereabouts`, and the daemon may not reserve addresses.
    """
    shared_network(broken, "10.86.5")
    broken.server.delete("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", "multus-addresses")
    broken.pod("web", "lan")
    broken.node.start()
    broken.fails("web", r"no address can be reserved now: .* 403 Forbidden", "kubectl apply -k manifests/addresses")
    broken.server.apply(*yaml.safe_load_all((MANIFESTS / "addresses" / "rbac.yaml").read_text()))
    broken.node.wait_until(lambda: broken.add("web")[0] == 0, "it may now", timeout=60)
    broken.starts("web", "Fix: `kubectl apply -k manifests/addresses` ([addresses.md](addresses.md#install)).")


def test_api_server_down(broken: Broken) -> None:
    """The API server is away.

    The daemon started without the API server, so it does not know the pods of the node. The kubelet has the first text
    from the runtime; it sends its Event when the API server answers again.
    """
    broken.pod("web")
    broken.server.stop()
    broken.node.start(ready=False)
    broken.fails(
        "web",
        r"Cannot connect to host",
        "bring the API server back",
        broken.explain,
        broken.doctor,
        event=lambda failed: failed.answer,
        shows=2,
    )
    assert broken.asked_from_anywhere("web")[1].startswith("kubectl-multus: the API server can't be asked: GET ")
    broken.server.start()
    broken.node.wait_until(lambda: broken.node.get("/readyz?gates")[0] == 200, "the daemon has found the API server")
    broken.starts("web", "Fix: bring the API server back, or the node's route to it. The kubelet tries the pod again.")


class WithRuntimesDirectory:
    """A node whose configuration is made from the cluster network's, in the runtime's directory."""

    def __init__(self, broken: Broken) -> None:
        self.path = broken.node.root / "net.d"
        self.path.mkdir()
        broken.node.settings |= {"cniConfigDir": str(self.path), "multusAutoconfigDir": str(self.path)}
        del broken.node.settings["clusterNetwork"]
        self._dir = str(broken.node.networks_dir)

    def put(self, name: str, **changes: Any) -> None:
        """The cluster network's file."""
        ipam = {"type": "host-local", "subnet": "10.87.0.0/16", "dataDir": self._dir}
        plugin = {"type": "ptp", "ipam": ipam}
        made = {"cniVersion": "1.0.0", "name": "cluster-net", "plugins": [plugin], **changes}
        self.path.joinpath(f".{name}").write_text(json.dumps(made))
        self.path.joinpath(f".{name}").rename(self.path / name)


def test_wrong_primary(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster network's configuration is wrong.

    The agent of the cluster network writes `10-cluster.conflist`. Here the file has no list of plugins. The daemon
    writes no configuration for the runtime, and the kubelet reports `cni plugin not initialized`. The Event is the
    node's.
    """
    directory = WithRuntimesDirectory(broken)
    directory.put("10-cluster.conflist", plugins="none")
    broken.pod("web")
    broken.node.start(ready=False)
    event = broken.event_of_the_node()
    failed = Failed("web", "", "")

    def asked(way: Callable[[Failed], tuple[str, str]]) -> tuple[str, str]:
        # After 10 s without a change, the daemon ignores the file and reports another error.
        directory.put("10-cluster.conflist", plugins="none")
        return way(failed)

    assert not (directory.path / "00-multus.conf").exists()
    broken.node.wait_for_log("10-cluster.conflist can't be read")
    broken.are_told(
        r"10-cluster\.conflist\s.*CNI configuration: plugins: an array is needed",
        "correct or remove the file",
        event,
        first_problem(broken.node.log.read_text()),
        asked(broken.why),
        asked(broken.explain),
        asked(broken.doctor),
    )
    directory.put("10-cluster.conflist")
    broken.node.wait_until(lambda: broken.node.get("/readyz?gates")[0] == 200, "the daemon has found the configuration")
    monkeypatch.setattr(Broken, "stdin", (directory.path / "00-multus.conf").read_bytes())
    broken.starts("web", "Fix: correct the file, or the agent that writes it. `multusctl doctor` names the file.")


def test_isolation(broken: Broken) -> None:
    """A network of another namespace, under namespaceIsolation.

    The pod names a network of another namespace, and `namespaceIsolation` is on.
    """
    broken.node.settings["namespaceIsolation"] = True
    broken.server.create_namespace("private")
    broken.pod("web", "private/storage")
    broken.node.start()
    broken.fails(
        "web",
        r"network private/storage must not be used from namespace isolation",
        "networks of the pod's namespace and of default may be used: declare it in one of them, and name that",
    )
    broken.network("storage", "10.86.0.0/16")
    broken.again("web", "storage")
    broken.starts("web", "Fix: declare the network in the pod's namespace, and name it in the annotation.")


def test_duplicate_interface(broken: Broken) -> None:
    """Two networks want the same interface.

    The annotation gives both networks the name `net1`.
    """
    broken.network("storage", "10.86.0.0/16")
    broken.network("backup", "10.88.0.0/16")
    broken.pod("web", "storage@net1,backup@net1")
    broken.node.start()
    broken.fails(
        "web",
        r"interface 'net1' is asked for twice: in element 0 \(\S+/storage\) and element 1 \(\S+/backup\)",
        "give each an interface of its own in the pod's annotation, NETWORK@INTERFACE, or leave it out",
    )
    broken.again("web", "storage@net1,backup@net2")
    broken.starts("web", "Fix: give each network its own interface: `storage@net1,backup@net2`.")


def test_hung_plugin(broken: Broken) -> None:
    """A plugin that does not end.

    The plugin waits for its own agent, which does not run. Here `delegateTimeoutSeconds` is 5; the default is 120.
    """
    broken.node.settings["delegateTimeoutSeconds"] = 5
    broken.definition("storage", json.dumps({"cniVersion": "1.0.0", "name": "storage", "type": "fabric"}))
    agent = broken.node.root / "agent"
    waits = f'[ "$CNI_COMMAND" = DEL ] || [ -e {agent} ] || {{ echo waiting for fabric-agent >&2; sleep 60; }}'
    broken.node.plugin("fabric", f"{waits}\necho '{RESULT}'")
    broken.pod("web", "storage")
    broken.node.start()
    broken.fails(
        "web",
        r'plugin "fabric" did not end within 5 s and was ended[^$]*stderr: waiting for fabric-agent',
        "what it waits for is in its stderr",
    )
    agent.touch()
    broken.starts(
        "web",
        "Fix: start the agent that the plugin waits for. The plugin's stderr, which the error shows, may name it.",
    )


@pytest.fixture
def small_disk(broken: Broken) -> Iterator[Path]:
    """`cniDir` is a disk of its own, of 256 KiB."""
    path = broken.node.cni_dir
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "multus-test", str(path)], check=True)
    yield path
    broken.node.kill()
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_full_disk(broken: Broken, small_disk: Path) -> None:
    """The disk is full.

    The daemon cannot write the record of the container. A later DEL would need it, so the ADD fails.
    """
    broken.pod("web")
    broken.node.start()
    filler = fill(small_disk)
    broken.fails(
        "web",
        r"record of (?:the container|container c0ffee01) can't be written: .*No space left on device"
        r"|KiB are free: ADDs fail where a record can't be written",
        "make room",
        broken.explain,
        broken.doctor,
    )
    filler.unlink()
    broken.starts("web", "Fix: free space on the file system of `cniDir`. `multusctl doctor` shows what is free.")


def test_record_that_stays(broken: Broken) -> None:
    """A record that can't be deleted.

    The plugin could not free the port of a deleted pod. After `deleteTries` failing DELs the daemon answers with
    success, so that the pod terminates, and keeps the record. The next pod finds the port in use.
    """
    broken.node.settings["deleteTries"] = 2
    broken.definition("storage", json.dumps({"cniVersion": "1.0.0", "name": "storage", "type": "fabric"}))
    port = broken.node.root / "port"
    error = '{"cniVersion": "1.0.0", "code": 999, "msg": "port 7 of the switch is locked"}'
    fails = f"{{ echo '{error}'; exit 1; }}"
    broken.node.plugin("fabric", f"[ ! -e {port} ] || {fails}\n[ $CNI_COMMAND = DEL ] || touch {port}\necho '{RESULT}'")
    broken.pod("web", "storage")
    broken.node.start()
    netns = broken.node.add_netns()
    assert broken.cni("ADD", "web", netns, "c0ffee90").code == 0
    mark = len(broken.node.log.read_text())
    assert broken.cni("DEL", "web", netns, "c0ffee90").code == 1
    assert broken.cni("DEL", "web", netns, "c0ffee90").code == 0
    said = broken.node.log.read_text
    broken.node.wait_until(lambda: "CNI DEL finished" in said()[mark:], "the log has the second DEL")
    failed = Failed("web", "", first_problem(said()[mark:]))
    event = broken.event(failed)
    broken.again("web", "storage")
    assert broken.add("web")[0] == 1, "its successor has what it needs"
    broken.are_told(
        "port 7 of the switch is locked",
        "multusctl attachments forget c0ffee90",
        event,
        failed.logged,
        broken.why(failed),
        broken.leaks(),
    )
    forget = ("attachments", "forget", "c0ffee90", "--yes")
    refused, why = multusctl(broken.node, *forget)
    assert refused == 1
    assert "can't be forgotten: its network namespace" in why
    broken.section.say(
        "Fix: remove the cause; the daemon repeats the DEL. Or free by hand what the plugin holds (here the port),\n"
        "then forget the container. `multusctl` refuses that while the container's network namespace exists:"
    )
    broken.section.show(why, " ".join(("multusctl", *forget)))
    port.unlink()
    broken.node.remove_netns(netns)
    status, done = multusctl(broken.node, *forget)
    assert status == 0, done
    broken.section.say("When the namespace is gone:")
    broken.section.show(done, " ".join(("multusctl", *forget)))
    assert "nothing is left over" in broken.leaks()[1]
    broken.starts("web", "Then the next pod starts.")
