"""Every command on the pages exists: program, subcommand, flags, files, objects of manifests, values of the chart."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import pytest
import yaml

from multus_daemon import cli
from multus_tools.ctl import commands as ctl
from multus_tools.kubectl import commands as kubectl
from tests.repo import pages
from tests.repo.pages import PAGES, ROOT

PARSERS: Final = {"multusctl": ctl.parser(), "kubectl multus": kubectl.parser(), "multus-daemon": cli.parser()}
FOREIGN: Final = {
    "--build-arg": "docker", "--platform": "docker", "--secret": "docker", "--register-with-taints": "kubelet",
    "--take-ownership": "helm", "--set": "helm", "-t": "kubectl exec", "-k": "kubectl apply", "-ra": "pytest",
    "--seconds": "bench", "--startup-taint": "cluster-autoscaler",
    "--cleanup-config-on-exit": "upstream's thin_entrypoint", "-flag": "any", "--flag": "any",
}  # fmt: skip
"""Flags of other programs that stand alone on a page."""
UPSTREAM: Final = {
    "clusterrole/multus", "clusterrolebinding/multus", "serviceaccount/multus", "configmap/multus-daemon-config",
    "configmap/multus-cni-config", "daemonset/whereabouts",
    # MicroShift's.
    "daemonset/multus", "daemonset/dhcp-daemon",
}  # fmt: skip


def commands() -> Iterator[tuple[str, list[str]]]:
    """Page and words of each command. Parts of a pipe, and what `kubectl exec ... --` runs, are commands too."""
    for page in PAGES:
        for line in [*pages.spans(page), *pages.lines(page)]:
            for part in re.split(r" \| | && |; | -- |\$\(", line):
                words = re.sub(r"…| \.\.\.(?= |$)|[\[\]()]|<[^>]*>|^(for .* in|do|\$) ", "", part).split()
                if words:
                    yield page, [words[0].removeprefix(".venv/bin/").replace("python3", "python"), *words[1:]]


FOUND: Final = list(commands())


def of(program: str) -> Iterator[tuple[str, list[str]]]:
    """Page and arguments of each command of the program."""
    name = program.split()
    for page, words in FOUND:
        if words[: len(name)] == name:
            yield page, words[len(name) :]


def alternatives(words: list[str]) -> list[list[str]]:
    """Resolve the first `a|b|c`, and write placeholders as names (`NS/POD`: `ns/pod`)."""
    words = [word.lower() if re.fullmatch(r"[A-Z/]+", word) else word for word in words]
    for number, word in enumerate(words):
        if re.fullmatch(r"\w+(\|\w+)+", word):
            return [[*words[:number], each, *words[number + 1 :]] for each in word.split("|")]
    return [words]


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0]) if found else {}


def options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the flags of a parser and of those below it."""
    found = {name: action for action in parser._actions for name in action.option_strings}
    for below in subparsers(parser).values():
        found |= options(below)
    return found


# --- our programs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", PARSERS)
def test_every_command_line_is_understood(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(parser: argparse.ArgumentParser, message: str) -> None:
        # A page may mention a command without what it needs.
        if " required" not in message:
            raise ValueError(f"{parser.prog}: {message}")
        parser.exit()

    monkeypatch.setattr(argparse.ArgumentParser, "error", refuse)
    wrong, understood = [], 0
    for page, given in of(program):
        for words in alternatives(given) if given else ():
            understood += 1
            try:
                PARSERS[program].parse_args(words)
            except ValueError as error:
                wrong.append(f"{page}: {' '.join(words)}: {error}")
            except SystemExit:
                pass
    assert wrong == []
    assert understood >= 10


def test_every_flag_that_stands_alone_exists() -> None:
    of_a_page = {"docs/multusctl.md": ["multusctl"], "docs/kubectl-multus.md": ["kubectl multus"]}
    unknown = []
    for page in PAGES:
        known = FOREIGN.keys() | {name for key in of_a_page.get(page, PARSERS) for name in options(PARSERS[key])}
        flags = [re.split(r"[ =]", span)[0] for span in pages.spans(page) if re.match(r"--?[a-z]", span, re.IGNORECASE)]
        unknown += [f"{page}: {flag}" for flag in flags if flag not in known]
    assert unknown == []


# --- make, python ----------------------------------------------------------------------------------------------------


def test_every_target_of_make_and_its_variables_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    # A target needs .PHONY: a folder such as `tests` may have its name.
    targets = re.findall(r"(?m)^\.PHONY: (.*)$", makefile)[0].split()
    told = [(page, " ".join(words)) for page, words in of("make")]
    for name in (".ci/run", ".pre-commit-config.yaml", ".github/workflows/ci.yml", ".github/PULL_REQUEST_TEMPLATE.md"):
        lines = re.findall(r"(?m)(?:^ *|entry: |run: |`)make ([\w =/]+)", (ROOT / name).read_text())
        assert lines, name
        told += [(name, line) for line in lines]
    for page, given in told:
        for word in re.findall(r"[\w.-]\S*", re.sub(r'"[^"]*"', "", given)):
            name, is_set, _ = word.partition("=")
            assert f"$({name})" in makefile if is_set else name in targets, f"{page}: make {word}"


def test_every_module_and_its_flags_exist() -> None:
    found = [(page, words) for page, words in of("python -m") if words]
    found += [
        (page, [span]) for page in PAGES for span in pages.spans(page) if re.match(r"(tests|bench)(\.\w+)+$", span)
    ]
    assert len(found) > 20
    for page, (module, *words) in found:
        if module.split(".")[0] not in ("tests", "bench", "image", "multus_shim"):
            continue
        path = ROOT / module.replace(".", "/")
        source = "".join(file.read_text() for file in (path if path.is_dir() else path.parent).glob("*.py"))
        assert importlib.util.find_spec(module), f"{page}: {module}"
        assert [flag for flag in words if flag.startswith("--") and f'"{flag}"' not in source] == [], module


# --- kubectl and helm ------------------------------------------------------------------------------------------------


def objects() -> list[dict[str, Any]]:
    files = [*ROOT.glob("manifests/**/*.yaml"), *ROOT.glob("examples/*.yaml")]
    found = [item for file in files for item in yaml.safe_load_all(file.read_text()) if item]
    return [item for item in found if "name" in item.get("metadata", {})]


OBJECTS: Final = objects()
TEXT: Final = json.dumps(OBJECTS)


def test_every_object_that_kubectl_is_told_exists() -> None:
    names = UPSTREAM | {f"{item['kind'].lower()}/{item['metadata']['name']}" for item in OBJECTS}
    kinds = {name.partition("/")[0] for name in names}
    told = set()
    for _, words in of("kubectl"):
        for word, following in pairwise([*words, ""]):
            if word.partition("/")[0] in kinds and "/" in word:
                told.add(word)
            elif word in kinds and re.match(r"[a-z]", following) and words[0] != "multus" and "create" not in words:
                told.add(f"{word}/{following}")
    assert {"daemonset/kube-multus-ds", "daemonset/multus-uninstall"} <= told
    assert told - names == {"pod/hello", "pod/status"} - names


def test_containers_labels_and_files_of_kubectl_exist() -> None:
    checked = 0
    for page, words in of("kubectl"):
        for flag, value in pairwise([*words, ""]):
            if flag == "-c":
                known = f'"name": "{value}"' in TEXT
            elif flag == "-l" and words[0] != "multus":
                known = '"{}": "{}"'.format(*value.split("=")) in TEXT
            elif flag in ("-f", "-k") and "/" in value:
                known = (ROOT / value.removesuffix("...")).exists()
            elif re.match(r"[\w-]+=registry", value):
                known = f'"name": "{value.partition("=")[0]}"' in TEXT
            else:
                continue
            checked += 1
            assert known, f"{page}: {flag} {value}"
    assert checked > 15


def test_every_value_of_the_chart_exists() -> None:
    values = yaml.safe_load((ROOT / "charts/multus-daemon/values.yaml").read_text())
    told = {match[1] for _, words in of("helm") for word in words if (match := re.match(r"([\w.]+)=", word))}
    nested = [key for key, value in values.items() if isinstance(value, dict)]
    spans = (span for page in PAGES for span in pages.spans(page) if not span.endswith(".txt"))
    told |= {span for span in spans if re.match(rf"(?:{'|'.join(nested)})\.[\w.]+$", span)}
    assert len(told) > 5
    for path in told:
        inner: Any = values
        for key in path.split("."):
            assert key in inner, path
            inner = inner[key]


def test_what_is_given_to_kubectl_in_place_is_valid() -> None:
    """Objects of a here-document, and patches."""
    objects = [
        item
        for page in PAGES
        for text in re.findall(r"(?ms)^ *kubectl .*<<'?EOF'?\n(.*?)^ *EOF$", pages.text(page))
        for item in yaml.safe_load_all(text)
    ]
    patches = [
        (page, text)
        for page in PAGES
        for text in re.findall(r"(?s)kubectl [^\n`]*patch [^`]*?-p\s+'([^']+)'", pages.text(page))
    ]
    assert objects
    assert patches
    for item in objects:
        assert {"apiVersion", "kind", "metadata"} <= item.keys(), item
        if item["kind"] == "HelmChartConfig":
            assert yaml.safe_load(item["spec"]["valuesContent"]) == {"manifests": {"daemonSet": False}}
    for page, text in patches:
        assert json.loads(text), page
