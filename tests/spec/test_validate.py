"""`multusctl validate` on files that are good and bad: `validate/<file>.expected` has what is found in each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from multus_tools import validate
from tests.fuzz import corpus
from tests.repo.manifests import MANIFESTS

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for path in Path(__file__).with_name("validate").iterdir() if path.suffix != ".expected")
DEFINITION = {"apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition"}


def shown(report: validate.Report) -> str:
    """A line for each finding; then what was passed over."""
    lines = [
        f"{item.place.line}:{item.place.column} {item.severity} {item.check} [{item.key}] {item.subject or '-'}: "
        f"{item.problem} -> {item.advice}".rstrip()
        for item in report.sorted()
    ]
    return "".join(f"{line}\n" for line in [*lines, *(f"passed over: {why}" for _, why in report.passed_over)])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_findings_of_a_file(path: Path) -> None:
    report = validate.of([(path.name, path.read_bytes())])
    assert shown(report) == path.with_name(f"{path.name}.expected").read_text()


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/**/*.yaml")), ids=lambda path: path.name)
def test_nothing_is_wrong_with_the_examples(path: Path) -> None:
    report = validate.of([(path.name, path.read_bytes())])
    assert (shown(report), report.objects > 0) == ("", True)


def test_nothing_is_wrong_with_what_the_pages_show() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        blocks = page.read_text().split("```")[1::2]
        for block in blocks:
            kind, _, text = block.partition("\n")
            if kind.strip() not in ("yaml", "json"):
                continue
            report = validate.of([(f"block.{kind.strip()}", text.encode())])
            assert not report.findings, f"{page.name}: {text}\n{shown(report)}"


def test_nothing_is_wrong_with_the_manifests() -> None:
    files = [(str(path), path.read_bytes()) for path in sorted(MANIFESTS.rglob("*.yaml"))]
    report = validate.of(files)
    assert (shown(report).replace("passed over: nothing of Multus' is in it\n", ""), report.objects > 0) == ("", True)


@pytest.mark.parametrize("style", ["|", ">", "'", '"', None])
@pytest.mark.parametrize("width", [20, 1000])
@pytest.mark.parametrize("indent", [None, 2])
def test_the_column_is_that_of_the_file_in_each_style_of_yaml(
    style: str | None, width: int, indent: int | None
) -> None:
    fields = {"cniVersion": "1.0.0", "comment": "it's \n\"\u00e9\U0001f600\\", "type": "bridge", "bridgee": "x"}
    config = json.dumps(fields, indent=indent, ensure_ascii=False)
    text = yaml.dump(
        {**DEFINITION, "metadata": {"name": "a"}, "spec": {"config": config}}, default_style=style, width=width
    )
    for name, data in (("a.yaml", text), ("a.json", json.dumps(yaml.safe_load(text)))):
        (found,) = [item for item in validate.of([(name, data.encode())]).findings if item.key == "bridgee"]
        rest = "\n".join(data.split("\n")[found.place.line - 1 :])[found.place.column - 1 :]
        # Where a double-quoted line is too long it is broken anywhere.
        assert "".join(rest.replace("\\", "").split()).startswith('"bridgee"'), data


def test_in_a_large_configuration_an_error_has_the_place_of_the_whole() -> None:
    routes = [{"dst": f"10.{number // 250}.{number % 250}.0/24"} for number in range(2600)]
    ipam = {"type": "host-local", "subnet": "10.1.0.0/33", "routes": routes}
    config = json.dumps({"cniVersion": "1.0.0", "type": "bridge", "ipam": ipam})
    text = yaml.dump({**DEFINITION, "metadata": {"name": "a"}, "spec": {"config": config}}, width=1_000_000)
    (found,) = validate.of([("a.yaml", text.encode())]).findings
    assert (found.problem, text.split("\n")[found.place.line - 1].strip()[:7]) == (
        "invalid CIDR address: 10.1.0.0/33",
        "config:",
    )


@pytest.mark.parametrize("kind", ["nad_config", "cni_config", "annotation", "api_object"])
def test_whatever_is_given_is_answered(kind: str) -> None:
    for data in corpus.read(kind):
        text = data.decode("utf-8", "replace")
        network = {**DEFINITION, "metadata": {"name": "a"}, "spec": {"config": text}}
        annotations = {"k8s.v1.cni.cncf.io/networks": text}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "annotations": annotations}}
        for value in (network, pod):
            report = validate.of([("a.json", json.dumps(value).encode()), ("b.yaml", yaml.dump(value).encode())])
            assert report.objects == 2
        validate.of([(name, data) for name in ("a.yaml", "a.conf", "a.json")])
