"""Every name on the pages exists: files, modules, keys, variables, metrics, Events, checks, messages."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from multus_daemon.metrics.declared import GROUPS
from multus_daemon.spec.nad import selection
from tests.repo import pages
from tests.repo.pages import PAGES, ROOT

PACKAGES: Final = ("multus_daemon", "multus_shim", "multus_tools")
OF_THE_PRODUCT: Final = (*PACKAGES, "manifests", "charts", "image", "Dockerfile", "Makefile")
OF_THE_TESTS: Final = ("bench", "tests/e2e", "tests/netns", "tests/spec")
NAME: Final = re.compile(r"[A-Z][a-z]+[A-Z]\w+|[A-Z]+(_[A-Z0-9]+)+|[a-z]+[A-Z]\w*|multus_\w+")
"""Of an Event or type, a variable or constant, a key, a metric."""
FOREIGN: Final = {
    "CONFIG_BRIDGE_VLAN_FILTERING": "the kernel", "SO_NETNS_COOKIE": "the kernel", "SYS_MODULE": "Kubernetes",
    "allNodes": "Kubernetes", "extendedResourceClaimStatus": "Kubernetes",
    "shapedSubnets": "bandwidth", "unshapedSubnets": "bandwidth",
    "additionalNetworks": "OpenShift", "configMapGenerator": "kustomize", "dynamicNetworksController": "rke2-multus",
    "ignoreDifferences": "Argo CD", "valuesContent": "RKE2",
    "maxSurge": "Kubernetes", "restartCount": "Kubernetes", "startupTaints": "Karpenter",
}  # fmt: skip
EVENT: Final = re.compile(r"(CNI)?([A-Z][a-z]+){2,}")
NO_EVENT: Final = {"ConfList", "CNINetworkConfigList", "DisableCheck"}
"""Names in upstream's files."""


def files(*tops: str) -> Iterator[Path]:
    for top in tops:
        path = ROOT / top
        yield from [path] if path.is_file() else (each for each in path.rglob("*") if each.suffix != ".pyc")


@functools.cache
def source(*tops: str) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(files(*tops)) if path.is_file())


def test_every_path_exists() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"build", "dist"}
    checked, missing = 0, []
    for page in PAGES:
        for span in pages.spans(page):
            path, _, test = span.partition("::")
            if path.partition("/")[0] not in folders or not re.fullmatch(r"[\w./*-]+", path):
                continue
            checked += 1
            found = list(ROOT.glob(path.rstrip("/")))
            if not found or (test and f"def {test}(" not in found[0].read_text()):
                missing.append(f"{page}: {span}")
    assert missing == []
    assert checked > 150


def test_every_module_of_the_architecture_exists() -> None:
    spans = [span for span in pages.spans("docs/architecture.md") if re.fullmatch(r"[a-z_]+(/[a-z_]+)+", span)]
    assert len(spans) > 10
    assert [span for span in spans if not [*ROOT.glob(f"multus_daemon/{span}*"), *ROOT.glob(f"{span}*")]] == []


def test_the_house_has_every_package_and_its_modules_exist() -> None:
    (block,) = re.findall(r"(?s)```\n(multus_daemon/\n.*?)```", pages.text("docs/architecture.md"))
    block = re.sub(r"\([^)]*\)", "", re.sub(r"\n {10,}", " ", block))
    named, top = set(), ""
    for line in block.splitlines():
        if line.startswith("  "):
            folders = re.findall(r"([a-z_]+)/   ", line)
            named |= {f"{top}{folder}" for folder in folders}
            for item in line.partition(": ")[2].split(","):
                path = ROOT / top / (folders[0] if folders else "") / item.strip().rstrip("/")
                assert path.is_dir() or path.with_suffix(".py").is_file(), line
                named |= {f"{top}{path.name}"} if not folders else set()
        else:
            top = line.partition(" ")[0]
    packages = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("multus_*/*/__init__.py")}
    assert packages - named == set()


def test_every_name_in_the_font_of_code_is_one_of_the_code() -> None:
    known = set(re.findall(r"[A-Za-z_]\w*", source(*OF_THE_PRODUCT) + source(*OF_THE_TESTS))) | FOREIGN.keys()
    known |= {metric.name for group in GROUPS.values() for metric in group}
    unknown, checked = [], 0
    for page in PAGES:
        for span in pages.spans(page):
            name = re.split(r"[ ={\[]", span)[0]
            if NAME.fullmatch(name):
                checked += 1
                if name not in known:
                    unknown.append(f"{page}: {name}")
    assert unknown == []
    assert checked > 300


def test_every_key_of_the_annotation_has_its_row() -> None:
    rows = re.findall(r"(?m)^\| \[`([\w-]+)`\]\(#", pages.text("docs/networks.md"))
    assert {*rows, "interfaceRequest"} == set(selection.KEYS)


# --- Events, checks, messages ----------------------------------------------------------------------------------------


def events(*tops: str) -> set[str]:
    """Return the strings of the code that name an Event."""
    texts = [path.read_text() for path in files(*tops) if path.suffix == ".py"]
    constants = [node.value for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    found = {value for value in constants if isinstance(value, str) and EVENT.fullmatch(value)} - NO_EVENT
    assert found
    return found


def test_every_event_is_on_a_page() -> None:
    shown = {name for page in PAGES for name in re.findall(r"`(\w+)`", pages.text(page))}
    assert events("multus_daemon/pod", "multus_daemon/node") - shown == set()
    rows = re.findall(r"(?m)^\| (?:Normal|Warning).*? \| `(\w+)` \|", pages.text("docs/protocol.md"))
    assert events("multus_daemon/pod/publish.py", "multus_daemon/pod/unsupported.py") == set(rows)


def test_every_finding_of_validate_has_its_row_with_its_severity() -> None:
    """As the files of tests/spec/validate have them."""
    found = set()
    for path in (ROOT / "tests/spec/validate").glob("*.expected"):
        found |= set(re.findall(r"(?m)^[\d:]+ (error|warning) ([a-z-]+) ", path.read_text()))
    table = pages.text("docs/multusctl.md").partition("| check | error | warning |")[2].partition("\n\n")[0]
    rows = re.findall(r"(?m)^\| (`.+?) \| ([^|]*)\| ([^|]*)\|$", table)
    told = {(kind, check) for names, *cells in rows for check in re.findall(r"[a-z-]+", names)
            for kind, cell in zip(("error", "warning"), cells, strict=True) if cell.strip()}  # fmt: skip
    assert len(found) > 15
    assert found - told == set()
    assert {check for _, check in told} - {check for _, check in found} == {"plugin-missing"}


def test_every_message_that_operators_look_for_is_one() -> None:
    table = pages.text("docs/operations.md").partition("| the message has | cause |")[2].partition("\n2. ")[0]
    cells = re.findall(r"(?m)^   \| (`.+?) \| ", table)
    product = source(*PACKAGES)
    words = [
        part for cell in cells for span in re.findall(r"`([^`]+)`", cell) for part in re.split(r'"?\.\.\."?', span)
    ]
    checked = [part.partition(": Permission")[0].strip('() "') for part in words if len(part) > 7]
    assert len(checked) > 10
    assert [part for part in checked if part not in product] == []
