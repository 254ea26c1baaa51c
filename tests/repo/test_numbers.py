"""Check the numbers on the pages, but for deadlines and measurements, against the code, the manifests and the tests."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

import multus_shim
from multus_daemon import cli, companions, settings
from multus_daemon import deadlines as d
from multus_daemon.api import admin, app, head, metrics_port, tcp, webhook, wire
from multus_daemon.api import limit as requests
from multus_daemon.cluster import device_files
from multus_daemon.cluster.kube import access, client, events, informer, objects, resource, status
from multus_daemon.cluster.kubelet import source as kubelet
from multus_daemon.diagnosis.validate import source as validate
from multus_daemon.node import spool
from multus_daemon.plugins import child
from multus_daemon.plugins import limit as processes
from multus_daemon.plugins.builtin.host_local import index
from multus_daemon.plugins.process import ProcessRunner
from multus_daemon.pod import gather, plan, upstream
from multus_daemon.pod.engine import Policy
from multus_daemon.runtime import fs, trace
from multus_daemon.runtime.timeline import Timelines
from multus_daemon.spec import ports
from multus_daemon.spec.cni import conf, gojson, names
from multus_daemon.spec.nad import requests as nad
from multus_daemon.spec.nad import selection
from multus_daemon.spec.netconf import primary
from multus_daemon.spec.netconf.model import NetConf
from multus_daemon.tools import command_line
from multus_daemon.tools.kubectl import cluster
from tests.fuzz import largest, test_corpus
from tests.repo import manifests, pages
from tests.vectors import records

ROOT: Final = pages.ROOT
KIB, MIB = 1024, 1024 * 1024
HALF: Final = 512 * MIB
"""The memory limit of the manifests; `test_the_figures_of_the_manifests`."""


WORDS: Final = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 8: "eighth", 10: "ten"}


def size(number: int) -> str:
    return f"{number // MIB} MiB" if number >= MIB else f"{number // KIB} KiB"


def constant(name: str, where: str) -> int:
    """Return a constant, a product of numbers, of the one of these files that has it."""
    sources = "\n".join(path.read_text() for path in ROOT.glob(where))
    (text,) = re.findall(rf"(?m)^(?:pub const |const )?{name}(?:: Final)? = ([\d_ *]+);?$", sources)
    number = 1
    for factor in text.split("*"):
        number *= int(factor)
    return number


def shim(name: str) -> int:
    return constant(name, "multus_shim/*.zig")


def at_once(memory: int, cores: float | None = None) -> int:
    return requests.automatic(memory, 1 << 40, cores).number


def plugins(memory: int) -> int:
    return processes.automatic(memory, 1 << 40, 64).number


OUTPUT: Final = inspect.signature(ProcessRunner).parameters["max_output"].default
OWN: Final = (requests.OWN_BYTES + requests.MOST * requests.REQUEST_BYTES) // MIB
CORES: Final = f"{requests.MOST / requests.REQUESTS_PER_CORE:g}"
LINE: Final = size(constant("_LONGEST", "multus_daemon/**/*.py"))
QUEUE: Final = size(constant("_QUEUE_BYTES", "multus_daemon/**/*.py"))
SMALLEST: Final = 50 * MIB
CALLS: Final = sum(not record.generated for session in records.load() for record in session.records)

PHRASES: Final = [
    # Limits, in the order of security.md.
    ("security", f"{size(app.BODY_LIMIT)}; {d.HEAD_SECONDS:g} s each"),
    ("security", f"| stdin of the shim; reply to it | {size(shim('max_stdin'))}; head "
                 f"{size(shim('max_head'))}, body {size(shim('max_body'))} |"),
    ("security", f"`connectionLimit`, {requests.MOST} by default"),
    ("security", f"{d.REQUEST_WAIT_SECONDS['ADD']:g} s, DEL {d.REQUEST_WAIT_SECONDS['DEL']:g} s |"),
    ("security", f"cached files | {gojson.NESTING_MAX} levels, {gojson.CONTAINERS_MAX:,} objects and arrays |"),
    ("security", f"| annotation | {size(selection.ANNOTATION_MAX_BYTES)}, {selection.ELEMENTS_MAX} networks |"),
    ("security", f"as recorded | {size(plan.REQUEST_MAX_BYTES)} |"),
    ("security", f"gateways | {NetConf.max_requested_addresses}; {nad._GATEWAYS_MAX} |"),
    ("security", f"costs the plugin several rules | {NetConf.max_port_mappings} |"),
    ("security", f"| {size(conf.CONFIG_MAX_BYTES)}; {conf.CONTAINERS_MAX:,}; {conf.PLUGINS_MAX} |"),
    ("security", f"of a network's `ipam` | {conf.ADDRESSES_MAX} |"),
    ("security", f"| plugin: output, standard error kept, time | {size(OUTPUT)}, {size(child.STDERR_TAIL)}, "),
    ("security", f"| record, cached result | {size(fs.DEFAULT_READ_LIMIT)};"),
    ("security", f"| upstream's file of a container | {size(fs.DEFAULT_READ_LIMIT)}, {upstream.ELEMENTS_MAX} net"),
    ("security", f"looked at in one go | {size(spool.ENTRY_MAX_BYTES)}; {spool.ENTRIES_MAX:,} |"),
    ("security", f"its checkpoint | {size(device_files.MAX_BYTES)}; {size(kubelet.MAX_BYTES)}, "
                 f"{d.KUBELET_DEVICES_SECONDS:g} s |"),
    ("security", f"| connections to the metrics port | {metrics_port.METRICS_CONNECTIONS}, {d.METRICS_SECONDS:g} s "
                 f"each after a handshake of {d.METRICS_HANDSHAKE_SECONDS:g} s; "
                 f"{metrics_port.METRICS_PER_SECOND} new ones a second, shared between clients; "
                 f"{metrics_port.METRICS_SHARE * 100:g} % of a core"),
    ("security", f"head of a request to a port | {size(head.HEAD_MAX)}, {head.FIELDS_MAX} fields; "
                 f"{tcp.READS_MAX} reads, and one more for each {tcp.READ_BYTES} bytes"),
    ("security", f"`BAGGAGE` | {trace.STATE_MAX} characters; {size(trace.BAGGAGE_MAX)} |"),
    ("security", f"answers kept | {access.AT_ONCE}, {access.AT_ONCE / access.PAUSE_SECONDS:g} a second; "
                 f"{d.METRICS_REVIEW_SECONDS:g} s; {access.KEPT_MAX} yes, "
                 f"{access.KEPT_MAX} no |"),
    ("security", f"handshake | {webhook.CONNECTIONS}, {webhook.PER_SECOND} new ones a second, "
                 f"{d.WEBHOOK_SECONDS:g} s and one review each; {d.WEBHOOK_HANDSHAKE_SECONDS:g} s |"),
    ("security", f"asks the API server for; time for it | {companions.LOOKUPS_MAX}; {d.WEBHOOK_LOOKUP_SECONDS:g} s |"),
    ("operations", f"for up to {companions.LOOKUPS_MAX} networks of a pod"),
    ("security", f"| {size(webhook.BODY_LIMIT)}, {d.WEBHOOK_REVIEW_SECONDS:g} s; {webhook.AT_ONCE} of up to "
                 f"{size(webhook.SMALL_BYTES)}, and one larger one |"),
    ("security", f"| {size(client.ANSWER_MAX_BYTES)}, {d.API_REQUEST_SECONDS:g} s; {size(client.LINE_MAX_BYTES)}. "),
    ("security", f"| {client.REPEATS_AT_ONCE} at once, then one each {client.REPEAT_SECONDS:g} s |"),
    ("security", f"| {size(cluster.ANSWER_MAX_BYTES)}; {cluster.AT_ONCE}; `--timeout` ({d.KUBECTL_NODE_SECONDS:g} s)."),
    ("security", f"| statuses, Events that wait | {status.PENDING_MAX}, {events.QUEUE_MAX} |"),
    ("security", f"| {ports.EVENT_MESSAGE_MAX} characters; {size(wire.ERROR_TEXT_MAX)}, and as much for details; "
                 f"{LINE} |"),
    ("security", f"| log lines that wait | {QUEUE} to standard error, {QUEUE} to"),
    ("security", f"| the daemon's configuration | {size(settings.CONFIG_MAX_BYTES)} |"),
    ("security", f"`[a-zA-Z0-9][a-zA-Z0-9_.-]*`, {names.CONTAINER_ID_MAX_BYTES} bytes"),
    ("security", f"named in an error | {resource.PAGE_SIZE}; {plan._SHOWN_NAMES} |"),
    ("security", f"names up to {WORDS[gather._SHOWN_NAMESPACES]} namespaces"),
    ("security", f"| for DEL only | one slot for plugins, an {WORDS[processes.KEPT]} of those for requests |"),
    ("security", f"event loop goes on within {largest.PAUSE_MAX:g} s and `/healthz` answers within "
                 f"{largest.ANSWER_MAX:g} s"),
    ("security", f"{test_corpus.MEMORY_FACTOR + test_corpus.MEMORY_FIXED // MIB} MiB of memory to read: "
                 f"{WORDS[test_corpus.MEMORY_FACTOR]} times its size, and {size(test_corpus.MEMORY_FIXED)} for"),
    # What is at once, and what memory and cores allow.
    ("reliability", f"one per {size(processes.PROCESS_BYTES)} of the memory limit beyond {size(processes.OWN_BYTES)}, "
                    f"at most {processes.PROCESSES_PER_CORE} per core"),
    ("reliability", f"fewer with less than {OWN} MiB or {CORES} cores: "
                    f"{WORDS[at_once(SMALLEST)]} with 50 MiB, one of them for DEL"),
    ("reliability", f"a queue of {QUEUE} each"),
    ("operations", f"as fit: {WORDS[plugins(HALF)]} with the 512Mi of the manifests"),
    ("operations", f"| {requests.MOST} at once; with less than {OWN} MiB {WORDS[MIB // requests.REQUEST_BYTES]} for "
                   f"each MiB beyond {requests.OWN_BYTES // MIB}, at least {requests.FEWEST}, so"),
    ("operations", f"less than {CORES} cores {requests.REQUESTS_PER_CORE} for each core, such as "
                   f"{at_once(1 << 40, 0.1)} with 100m"),
    ("operations", f"more than {validate.EMBEDDED_VALUES_MAX:,} values"),
    ("operations", f"port {cli.WEBHOOK_PORT} and out"),
    ("multusctl", f"more than {validate.EMBEDDED_VALUES_MAX:,} values"),
    ("multusctl", f"looks every {command_line.WATCH_SECONDS:g} s"),
    ("multusctl", f"works on {WORDS[admin.AT_ONCE]} questions at a time"),
    ("multusctl", f"last {Timelines()._kept.maxlen:,} requests since its start "
                  f"({Timelines(at_once=at_once(SMALLEST))._kept.maxlen} with a memory limit of 50Mi)"),
    ("kubectl-multus", f"{cluster.AT_ONCE} nodes are asked side by side"),
    ("kubectl-multus", f"longer than {size(cluster.ANSWER_MAX_BYTES)} does not delay"),
    ("security", f"| {WORDS[plugins(448 * MIB)]} or more (448 MiB of memory) |"),
    ("configuration", f"below {OWN} MiB {WORDS[MIB // requests.REQUEST_BYTES]} for each MiB beyond "
                      f"{requests.OWN_BYTES // MIB}, below {CORES} cores {requests.REQUESTS_PER_CORE} for each core, "
                      f"at least {requests.FEWEST}"),
    ("configuration", f"{size(processes.PROCESS_BYTES)} of memory for each, after {size(processes.OWN_BYTES)} for the"),
    ("configuration", f"at most {processes.PROCESSES_PER_CORE} for each core and {processes.MOST}, at least "
                      f"{processes.FEWEST}; {plugins(255 * MIB)} if the limit is below 256 MiB"),
    ("configuration", f"At most {metrics_port.METRICS_CONNECTIONS} connections at once to an address, "
                      f"{d.METRICS_SECONDS:g} s"),
    ("configuration", f"up to {WORDS[Policy.networks_at_once]} networks of a pod are attached at the same time"),
    ("configuration", f"at most {size(shim('max_shown'))} of the error"),
    *(("configuration", f"`{name}*`") for name in primary._FILES_OF_ENGINES),
    ("networks", f"A pod may ask for {selection.ELEMENTS_MAX} networks"),
    ("networks", f"A pod may have {NetConf.max_port_mappings} ports"),
    ("networks", f"At most {names.IFNAME_MAX_BYTES} characters"),
    ("protocol", f"The path may have {app._MAX_SOCKET_PATH} bytes"),
    ("protocol", f"at the {spool.ENTRIES_MAX} oldest entries"),
    ("protocol", f"{WORDS[spool.AT_ONCE]} at once. A served entry"),
    ("protocol", f"larger than {size(spool.ENTRY_MAX_BYTES)}, not a regular file"),
    ("protocol", f"The {spool.REJECTED_MAX} newest are kept for {spool.REJECTED_SECONDS / 86400:g} days"),
    ("protocol", f"repeats a request, up to {WORDS[shim('most_repeats')]} times"),
    ("builtin-plugins", f"at most {index.DIRECTORIES_MAX} directories, with a watch each, and {index.NAMES_MAX:,} lea"),
    ("scaling", f"pauses that double from {informer.RETRY_SECONDS[0]:g} s to {informer.RETRY_SECONDS[1]:g} s"),
    ("scaling", f"a list in pages of {objects.PAGE_SIZE}"),
    # What the tests have.
    ("compatibility", f"{CALLS} calls of upstream v4.3.0 were recorded"),
]  # fmt: skip


@pytest.mark.parametrize(("page", "phrase"), PHRASES, ids=lambda value: value[:40])
def test_the_page_has_the_number(page: str, phrase: str) -> None:
    assert phrase in pages.one_line(f"docs/{page}.md")


def test_every_limit_is_compared() -> None:
    """A row of security.md's limits without a number above would not be compared with the code."""
    table = pages.text("docs/security.md").partition("| input | limit |\n| --- | --- |\n")[2]
    with_code = [" ".join(phrase.split()) for page, phrase in PHRASES if page == "security"]
    own = {"plugin processes at once", "descriptors"}
    bare = [row for row in table.splitlines() if not any(phrase in row for phrase in with_code)]
    assert {row.split(" | ")[0].strip("| ") for row in bare} == own


# --- manifests and versions ------------------------------------------------------------------------------------------


def the_daemon() -> dict[str, Any]:
    (found,) = (item for item in manifests.build(manifests.MANIFESTS / "base") if item["kind"] == "DaemonSet")
    return dict(found["spec"]["template"]["spec"])


def test_the_figures_of_the_manifests() -> None:
    (container,) = the_daemon()["containers"]
    assert container["resources"]["limits"]["memory"] == "512Mi"
    assert "the limit is 50Mi in upstream's manifests, 512Mi in ours" in pages.one_line("docs/migration.md")
    for name in ("webhook", "webhook-injector"):
        found = yaml.safe_load((manifests.MANIFESTS / name / "configuration.yaml").read_text())
        assert {hook["timeoutSeconds"] for hook in found["webhooks"]} == {5}
    assert pages.one_line("docs/operations.md").count("takes longer than 5 s") == 2
    liveness = container["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] == 120
    assert "fails after two minutes without an answer" in pages.one_line("docs/operations.md")
    table = pages.text("docs/security.md").partition("| capability |")[2].partition("\n\n")[0]
    assert set(re.findall(r"(?m)^\| `(\w+)` ", table)) == set(container["securityContext"]["capabilities"]["add"])


def test_every_overlay_has_the_paths_of_its_row() -> None:
    table = pages.text("docs/operations.md").partition("| `kubectl apply -k manifests/overlays/...` |")[2]
    rows = re.findall(r"(?m)^\| (`[\w`, ]+) \| `(.+?)` \| `(.+?)`.*\|$", table.partition("\n\n")[0])
    told = {name: paths for names, *paths in rows for name in re.findall(r"\w+", names)}
    overlays = [path for path in (manifests.MANIFESTS / "overlays").iterdir() if path.is_dir()]
    assert sorted(told) == sorted(path.name for path in overlays)
    for overlay in overlays:
        (daemons,) = (item for item in manifests.build(overlay) if item["kind"] == "DaemonSet")
        volumes = {item["name"]: item for item in daemons["spec"]["template"]["spec"]["volumes"]}
        assert [volumes[name]["hostPath"]["path"] for name in ("cni", "cnibin")] == told[overlay.name], overlay.name


def test_the_oldest_kubernetes_is_that_of_the_chart() -> None:
    chart = yaml.safe_load((manifests.CHART / "Chart.yaml").read_text())
    oldest = chart["kubeVersion"].removeprefix(">=").removesuffix(".0-0")
    told = {page: set(re.findall(r"Kubernetes (\d\.\d+) or newer", pages.text(page))) for page in pages.PAGES}
    assert {page: found for page, found in told.items() if found} == {
        f"{page}.md": {oldest} for page in ("README", "docs/quickstart", "docs/operations", "docs/migration")
    }


def test_the_oldest_python_and_go_are_those_of_the_project() -> None:
    everything = "\n".join([*map(pages.text, pages.PAGES), (ROOT / "Makefile").read_text()])
    python = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert set(re.findall(r"Python (3\.\d+) or newer", everything)) == {python.removeprefix(">=")}
    modules = [path.read_text() for path in (ROOT / "tests/e2e/tools").rglob("go.mod")]
    needed = sorted(re.findall(r"(?m)^go (\S+)$", "\n".join(modules)))
    told = re.findall(r"Go (\d[.\d]*\d) or newer", everything)
    assert set(told) == {needed[0].removesuffix(".0"), needed[-1]}


def test_the_shim_has_the_size_of_the_readme() -> None:
    (kilobytes,) = re.findall(r"native \*\*shim\*\* of (\d+) KB", pages.text("README.md"))
    assert abs(Path(multus_shim.binary()).stat().st_size - int(kilobytes) * 1000) < 10_000


def test_the_long_proofs_are_those_of_make_soak() -> None:
    soak = re.findall(r"-m (tests\.soak\.\w+)", (ROOT / "Makefile").read_text())
    rows = re.findall(r"(?m)^\| `(tests\.soak\.\w+)` \|", pages.text("docs/reliability.md"))
    assert sorted(rows) == sorted(soak)


def test_the_tiers_are_those_of_make() -> None:
    for row, variable in (("| `make unit` |", "UNIT"), ("| `make test` |", "INTEGRATION")):
        (line,) = (line for line in pages.text("CONTRIBUTING.md").splitlines() if line.startswith(row))
        (folders,) = re.findall(rf"(?m)^{variable} *:= (.*)$", (ROOT / "Makefile").read_text())
        assert sorted(re.findall(r"`(tests/\w+)`", line)) == sorted(folders.split()), row
