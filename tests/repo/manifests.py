"""Make the plain manifests of the chart: `charts/multus-daemon` is the source, by `helm template`.

    make manifests                      # or: python -m tests.repo.manifests; needs helm, which `make e2e` builds
    make manifests IMAGE=NAME:TAG       # or: ... --image NAME:TAG; the name of the image from now on, without helm
    make manifests IMAGE=NAME@sha256:0123...

A manifest is what the chart renders with some values, without the labels of a release. What is already part of another
folder is left out: `manifests/webhook` has the objects that `webhook.enabled` adds.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any, Final

import yaml

from multus_daemon import __version__, settings

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
RENDERED = MANIFESTS / "multus-daemonset.yaml"
CHART = MANIFESTS.parent / "charts" / "multus-daemon"
PLACEHOLDER = "multus-daemon"
"""The name of the image in a checkout; no registry has it."""
MADE: Final = "# Made from charts/multus-daemon by `make manifests`: change it there.\n"
HEADER: Final = (
    "# Everything for a cluster of kubeadm with containerd, in one file: `kubectl apply -f multus-daemonset.yaml`.\n"
)
HOW_TO_NAME = """\
#
# No registry has an image of the name `multus-daemon`. Build and push one, then put its name in by
# `make manifests IMAGE=registry.example/multus-daemon:VERSION`. The file of a release has the name of its image.
"""
RULES = CHART / "files" / "monitoring" / "prometheusrule.yaml"
COPIES: Final = {
    "files/crd.yaml": "base/crd.yaml",
    "files/addresses-crds.yaml": "addresses-crds/crds.yaml",
    "files/monitoring/prometheusrule.yaml": "monitoring/prometheusrule.yaml",
    "files/monitoring/dashboard.json": "monitoring/dashboard.json",
}
BASE: Final = ("crd", "rbac", "config", "daemonset")
"""The files of `manifests/base`, by the template of the chart."""
DISTRIBUTIONS: Final = ("k3s", "microk8s", "microshift", "openshift", "talos")
"""Those that differ from the base."""
# One node at a time: kubectl has no `helm upgrade --atomic`.
_PLAIN: Final = {"daemonSet": {"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}}}
# The chart wants a CA; a manifest gets it by a command of docs/operations.md.
_WEBHOOK: Final = {"enabled": True, "tls": {"caBundle": "Q0E="}}
_MANAGED: Final = {"enabled": True, "certManager": {"enabled": True}}
_INJECTOR: Final = {"injector": {"enabled": True}}
ADDED: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "addresses/rbac.yaml": ({"addresses": {"enabled": True, "crds": False}}, {}),
    "cert-approver/approver.yaml": ({"perNodeCertificates": {"enabled": True}}, {}),
    "device-status/rbac.yaml": ({"deviceStatus": {"enabled": True}}, {}),
    "metrics-authorization/rbac.yaml": ({"metrics": {"tls": {"secretName": "a"}, "authorization": True}}, {}),
    "monitoring/podmonitor.yaml": ({"podMonitor": {"enabled": True}}, {}),
    "webhook/webhook.yaml": ({"webhook": _WEBHOOK}, {}),
    "webhook-cert-manager/webhook.yaml": ({"webhook": _MANAGED}, {}),
    "webhook-injector/injector.yaml": ({"webhook": _WEBHOOK | _INJECTOR}, {"webhook": _WEBHOOK}),
    "webhook-injector-cert-manager/injector.yaml": ({"webhook": _MANAGED | _INJECTOR}, {"webhook": _MANAGED}),
    "startup-taint/rbac.yaml": ({"startupTaint": {"enabled": True}}, {}),
    "uninstall/base/daemonset.yaml": ({"uninstall": {"enabled": True}}, {}),
    **{
        f"uninstall/overlays/{name}/daemonset.yaml": (
            {"distribution": name, "uninstall": {"enabled": True}},
            {"distribution": name},
        )
        for name in DISTRIBUTIONS
    },
}
"""Maps a file to two sets of values: it has the objects that only the first one renders."""
_OF_A_RELEASE: Final = re.compile(
    r"(?m)^ +(helm\.sh/[\w-]+|app\.kubernetes\.io/(name|instance|managed-by)|checksum/config|caBundle): .*\n"
    # The default of a tag that is not `latest`, and of a digest.
    r"|^ +imagePullPolicy: IfNotPresent\n|^ +# The daemon reads its configuration when it starts\.\n"
)
_EMPTY: Final = re.compile(r"(?m)^( *)(labels|annotations):\n(?!\1  )")
Document = tuple[str, str]
"""The template of the chart that rendered a text, and the text."""


def objects(folder: Path) -> list[dict[str, Any]]:
    """Return the objects of a folder of `manifests`, of which no component is part."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(kustomization) <= {"apiVersion", "kind", "resources"}, folder
    paths = [folder / name for name in kustomization["resources"]]
    return [item for path in paths for item in (objects(path) if path.is_dir() else of_file(path))]


def of_file(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file."""
    # By libyaml: ten times as fast, and every wheel of PyYAML has it.
    return [item for item in yaml.load_all(path.read_text(), yaml.CSafeLoader) if item]


# --- what the chart renders ------------------------------------------------------------------------------------------


def made(helm: str | Path) -> dict[str, str]:
    """Return each file that is made from the chart, by its path below `manifests`."""
    default = _documents(helm, {})
    files = {f"base/{name}.yaml": _joined(_of(default, name)) for name in BASE}
    files |= {copy: MADE + (CHART / name).read_text() for name, copy in COPIES.items() if name.endswith(".yaml")}
    files |= {copy: (CHART / name).read_text() for name, copy in COPIES.items() if not name.endswith(".yaml")}
    for name in DISTRIBUTIONS:
        files[f"overlays/{name}/multus.yaml"] = _joined(_documents(helm, {"distribution": name}))
    for path, (values, without) in ADDED.items():
        known = {_identity(document) for document in (_documents(helm, without) if without else default)}
        files[path] = _joined([item for item in _documents(helm, values) if _identity(item) not in known])
    files[RENDERED.name] = plain_file(files, image())
    return files


def plain_file(files: dict[str, str], name: str) -> str:
    """Return the base in one file, with the head for an image of this name."""
    head = MADE + HEADER + (HOW_TO_NAME if name.startswith(f"{PLACEHOLDER}:") else "")
    return head + "".join(f"---\n{files[f'base/{part}.yaml'].removeprefix(MADE)}" for part in BASE)


def _documents(helm: str | Path, values: dict[str, Any]) -> list[Document]:
    """Render the chart. Raises CalledProcessError, whose output says why it refuses."""
    command = [helm, "template", "multus", CHART, "--namespace", "kube-system", "--values", "-"]
    given = json.dumps({**_PLAIN, **values})
    text = subprocess.run(command, input=given, capture_output=True, text=True, check=True, timeout=120).stdout
    text = _EMPTY.sub("", _OF_A_RELEASE.sub("", text))
    _, *parts = re.split(r"(?m)^---\n# Source: multus-daemon/templates/(\w+)\.yaml\n", text)
    return list(zip(parts[::2], parts[1::2], strict=True))


def _of(documents: list[Document], template: str) -> list[Document]:
    return [document for document in documents if document[0] == template]


def _identity(document: Document) -> tuple[str, str]:
    found = yaml.safe_load(document[1])
    return found["kind"], found["metadata"]["name"]


def _joined(documents: list[Document]) -> str:
    return MADE + "---\n".join(text for _, text in documents)


# --- the image's name ------------------------------------------------------------------------------------------------


def image() -> str:
    """The name of the image with its tag or digest, as the chart's values have it."""
    (values,), (head,) = of_file(CHART / "values.yaml"), of_file(CHART / "Chart.yaml")
    found, version = values["image"], head["appVersion"]
    return str(found["repository"]) + (f"@{found['digest']}" if found["digest"] else f":{found['tag'] or version}")


def set_image(name: str) -> None:
    """Put the name of the image, `NAME:TAG` or `NAME@DIGEST`, into the chart and the manifests."""
    matched = re.fullmatch(r"(?P<name>[^@\s]+?)(?::(?P<tag>[\w.-]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?", name)
    if not matched or not (matched["tag"] or matched["digest"]):
        raise SystemExit(f"--image {name}: NAME:TAG or NAME@sha256:DIGEST is needed")
    values = (CHART / "values.yaml").read_text()
    for key, value in (("repository", matched["name"]), ("tag", matched["tag"]), ("digest", matched["digest"])):
        # The tag of the code's own version is left to the chart's appVersion.
        shown = '""' if not value or (key == "tag" and value == __version__) else _text(value)
        values, number = re.subn(rf"^  {key}:.*$", f"  {key}: {shown}", values, count=1, flags=re.MULTILINE)
        assert number == 1, f"values.yaml has no image.{key}"
    (CHART / "values.yaml").write_text(values)
    ours = re.compile(rf"(?m)^( +image: ){re.escape(_named_in_the_base())}$")
    for path in MANIFESTS.rglob("*.yaml"):
        path.write_text(ours.sub(rf"\g<1>{image()}", path.read_text()))
    base = {f"base/{part}.yaml": (MANIFESTS / f"base/{part}.yaml").read_text() for part in BASE}
    (MANIFESTS / RENDERED.name).write_text(plain_file(base, image()))


def _named_in_the_base() -> str:
    (name,) = set(re.findall(r"(?m)^ +image: (\S+)$", (MANIFESTS / "base" / "daemonset.yaml").read_text()))
    return str(name)


def _text(value: str) -> str:
    """Return a text as YAML has it: Helm shortens a tag `1.20`."""
    return value if isinstance(yaml.safe_load(value), str) else json.dumps(value)


# --- what the chart has of the code ----------------------------------------------------------------------------------


def runbook_page() -> str:
    """The address of the page that alerts lead to, below the project's documentation in `pyproject.toml`."""
    project = tomllib.loads((MANIFESTS.parent / "pyproject.toml").read_text())["project"]
    page: str = project["urls"]["Documentation"].replace("/tree/", "/blob/")
    return f"{page}/runbook.md"


def of_the_code() -> dict[Path, str]:
    """Return each file of the chart that has something of the code, as it should be."""
    values, head = (CHART / "values.yaml").read_text(), (CHART / "Chart.yaml").read_text()
    schema = json.loads((CHART / "values.schema.json").read_text())
    schema["properties"]["config"]["propertyNames"]["enum"] = sorted(settings.known_keys())
    head = re.sub(r"(?m)^version:.*$", f"version: {__version__}", head)
    return {
        CHART / "Chart.yaml": re.sub(r"(?m)^appVersion:.*$", f'appVersion: "{__version__}"', head),
        CHART / "values.schema.json": json.dumps(schema, indent=2) + "\n",
        CHART / "values.yaml": re.sub(r"(?m)^(  runbookUrl: ).*$", rf"\g<1>{runbook_page()}", values),
        RULES: re.sub(r"(?m)^( +runbook_url: )[^#]*#", rf"\g<1>{runbook_page()}#", RULES.read_text()),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.repo.manifests", description=__doc__.partition("\n")[0])
    parser.add_argument("--image", default="", help="NAME:TAG or NAME@DIGEST, from now on the name everywhere")
    options = parser.parse_args()
    for path, text in of_the_code().items():
        path.write_text(text)
    if options.image:
        set_image(options.image)
        return
    from tests.e2e import build_tools
    from tests.programs import path_of

    for name, text in made(path_of("helm") or build_tools.find("helm")).items():
        (MANIFESTS / name).write_text(text)


if __name__ == "__main__":
    main()
