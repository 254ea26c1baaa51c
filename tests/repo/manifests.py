"""Build a folder of manifests as `kubectl apply -k` does, as far as this project uses kustomize, and its plain file.

    make manifests                      # or: python -m tests.repo.manifests
    make manifests IMAGE=NAME:TAG       # or: ... --image NAME:TAG; the name of the image from now on
    make manifests IMAGE=NAME@sha256:0123...

`manifests/image` has the name of the image. From there, and from `manifests/base`, come the plain file, the chart's
default and its custom resource; the version and the keys of the configuration come from the code.

Strategic merge patches by Kubernetes' own rules for the lists that occur: volumes, containers and variables by `name`,
mounts by `mountPath`; any other list is replaced; `null` removes a key. JSON patches append to lists.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from multus_daemon import __version__, settings

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
RENDERED = MANIFESTS / "multus-daemonset.yaml"
IMAGE = MANIFESTS / "image" / "kustomization.yaml"
CHART = MANIFESTS.parent / "charts" / "multus-daemon"
PLACEHOLDER = "multus-daemon"
"""The name in the sources; as it is no registry has it."""
HEADER = """\
# Everything for a cluster of kubeadm with containerd, in one file: `kubectl apply -f multus-daemonset.yaml`. Made from
# manifests/base and manifests/image by `make manifests`; change it there.
"""
HOW_TO_NAME = """\
#
# No registry has an image of the name `multus-daemon`. Build and push one, then put its name in, here or by
# `make manifests IMAGE=registry.example/multus-daemon:VERSION`. The file of a release has the name of its image.
"""
RULES = MANIFESTS / "monitoring" / "prometheusrule.yaml"
OF_MONITORING = ("prometheusrule.yaml", "dashboard.json")
"""Files of `manifests/monitoring` that the chart has too."""
MERGE_KEYS = ("mountPath", "name")


def image() -> str:
    """The name of the image with its tag or digest, as `manifests/image` has it."""
    (found,) = yaml.safe_load(IMAGE.read_text())["images"]
    return _named(found)


def _named(found: dict[str, str]) -> str:
    name = found.get("newName", found["name"])
    return f"{name}@{found['digest']}" if "digest" in found else f"{name}:{found['newTag']}"


def rendered() -> str:
    """The base in one file, comments included."""
    base = MANIFESTS / "base"
    names = yaml.safe_load((base / "kustomization.yaml").read_text())["resources"]
    text = "".join("---\n" + (base / name).read_text() for name in names)
    head = HEADER + (HOW_TO_NAME if image().startswith(f"{PLACEHOLDER}:") else "")
    return head + text.replace(f"image: {PLACEHOLDER}\n", f"image: {image()}\n")


def build(folder: Path) -> list[dict[str, Any]]:
    """The objects that `folder` stands for. Raises AssertionError for what is not understood here."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert kustomization["kind"] == "Kustomization", folder
    assert set(kustomization) <= {"apiVersion", "kind", "resources", "components", "patches"}, folder
    objects: list[dict[str, Any]] = []
    for name in kustomization["resources"]:
        path = folder / name
        objects += build(path) if path.is_dir() else [item for item in yaml.safe_load_all(path.read_text()) if item]
    for name in kustomization.get("components", ()):
        objects = with_component(folder / name, objects)
    return _patched(folder, kustomization, objects)


def with_component(folder: Path, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The objects with what the component adds to them."""
    component = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert component["kind"] == "Component", folder
    assert set(component) <= {"apiVersion", "kind", "resources", "patches", "images"}, folder
    for name in component.get("resources", ()):
        objects = [*objects, *(item for item in yaml.safe_load_all((folder / name).read_text()) if item)]
    names = {found["name"]: _named(found) for found in component.get("images", ())}
    return [_with_images(item, names) for item in _patched(folder, component, objects)]


def _patched(folder: Path, kustomization: dict[str, Any], objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    objects = list(objects)
    for patch in kustomization.get("patches", ()):
        assert set(patch) <= {"patch", "target"}, folder
        change = yaml.safe_load(patch["patch"])
        if "target" in patch:
            (number,) = [number for number, item in enumerate(objects) if _is_target(item, patch["target"])]
            objects[number] = _appended(objects[number], change)
            continue
        (number,) = [number for number, item in enumerate(objects) if identity(item) == identity(change)]
        objects[number] = merge(objects[number], change)
    return objects


def _is_target(item: dict[str, Any], target: dict[str, str]) -> bool:
    return (item["kind"], item["metadata"]["name"]) == (target["kind"], target["name"])


def _appended(item: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    """`item` after a JSON patch (RFC 6902) that only appends to lists."""
    changed: dict[str, Any] = copy.deepcopy(item)
    for operation in operations:
        assert operation["op"] == "add", operation
        *steps, last = operation["path"].removeprefix("/").split("/")
        assert last == "-", operation
        found: Any = changed
        for step in steps:
            found = found[int(step) if isinstance(found, list) else step]
        found.append(operation["value"])
    return changed


def _with_images(item: Any, names: dict[str, str]) -> Any:
    """`item` with the images of its containers renamed."""
    if isinstance(item, list):
        return [_with_images(each, names) for each in item]
    if not isinstance(item, dict):
        return item
    changed = {key: _with_images(value, names) for key, value in item.items()}
    if isinstance(item.get("image"), str) and item["image"] in names:
        changed["image"] = names[item["image"]]
    return changed


def identity(item: dict[str, Any]) -> tuple[str, str, str]:
    """Return the kind, namespace and name, which identify an object."""
    return item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"]


def merge(old: Any, new: Any) -> Any:
    """`old` with the strategic merge patch `new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        merged = {key: merge(old.get(key), value) for key, value in new.items() if value is not None}
        return {key: value for key, value in old.items() if key not in new} | merged
    key = _merge_key(old, new)
    if key is None:
        return new
    changes = {item[key]: item for item in new}
    kept = [merge(item, changes.pop(item[key], {})) for item in old]
    return [*kept, *changes.values()]


def _merge_key(old: Any, new: Any) -> str | None:
    if not (isinstance(old, list) and isinstance(new, list)):
        return None
    items = [*old, *new]
    return next((key for key in MERGE_KEYS if all(isinstance(item, dict) and key in item for item in items)), None)


# --- what is made of them --------------------------------------------------------------------------------------------


def set_image(name: str) -> None:
    """Put the name of the image, `NAME:TAG` or `NAME@DIGEST`, into `manifests/image` and the chart."""
    matched = re.fullmatch(r"(?P<name>[^@\s]+?)(?::(?P<tag>[\w.-]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?", name)
    if not matched or not (matched["tag"] or matched["digest"]):
        raise SystemExit(f"--image {name}: NAME:TAG or NAME@sha256:DIGEST is needed")
    text = IMAGE.read_text()
    which = f"digest: {matched['digest']}" if matched["digest"] else f"newTag: {_text(matched['tag'])}"
    text = text[: text.index("images:")]
    IMAGE.write_text(f"{text}images:\n  - name: {PLACEHOLDER}\n    newName: {matched['name']}\n    {which}\n")
    values = (CHART / "values.yaml").read_text()
    for key, value in (("repository", matched["name"]), ("tag", matched["tag"]), ("digest", matched["digest"])):
        # The tag of the code's own version is left to the chart's appVersion.
        shown = '""' if not value or (key == "tag" and value == __version__) else _text(value)
        values, number = re.subn(rf"^  {key}:.*$", f"  {key}: {shown}", values, count=1, flags=re.MULTILINE)
        assert number == 1, f"values.yaml has no image.{key}"
    (CHART / "values.yaml").write_text(values)


def _text(value: str) -> str:
    """Return a text as YAML has it: kustomize refuses a tag that is a number, and Helm shortens `1.20`."""
    return value if isinstance(yaml.safe_load(value), str) else json.dumps(value)


def runbook_page() -> str:
    """The address of the page that alerts lead to, below the project's documentation in `pyproject.toml`."""
    project = tomllib.loads((MANIFESTS.parent / "pyproject.toml").read_text())["project"]
    page: str = project["urls"]["Documentation"].replace("/tree/", "/blob/")
    return f"{page}/runbook.md"


def alerts() -> str:
    """The rules with the address of the runbook in each alert."""
    return re.sub(r"(?m)^( +runbook_url: )[^#]*#", rf"\g<1>{runbook_page()}#", RULES.read_text())


def chart_values() -> str:
    """The chart's values with the address of the runbook."""
    text = (CHART / "values.yaml").read_text()
    return re.sub(r"(?m)^(  runbookUrl: ).*$", rf"\g<1>{runbook_page()}", text)


def chart_schema() -> str:
    """`values.schema.json` with the configuration's keys."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    schema["properties"]["config"]["propertyNames"]["enum"] = sorted(settings.known_keys())
    return json.dumps(schema, indent=2) + "\n"


def chart_head() -> str:
    """`Chart.yaml` with the version of the code."""
    text = (CHART / "Chart.yaml").read_text()
    text = re.sub(r"^version:.*$", f"version: {__version__}", text, flags=re.MULTILINE)
    return re.sub(r"^appVersion:.*$", f'appVersion: "{__version__}"', text, flags=re.MULTILINE)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.repo.manifests", description=__doc__.partition("\n")[0])
    parser.add_argument("--image", default="", help="NAME:TAG or NAME@DIGEST, from now on the name everywhere")
    options = parser.parse_args()
    if options.image:
        set_image(options.image)
    elif re.search(rf"newName: {PLACEHOLDER}$", IMAGE.read_text(), re.MULTILINE):
        # The placeholder always has the version of the code.
        set_image(f"{PLACEHOLDER}:{__version__}")
    RENDERED.write_text(rendered())
    (CHART / "Chart.yaml").write_text(chart_head())
    (CHART / "values.schema.json").write_text(chart_schema())
    (CHART / "files" / "crd.yaml").write_text((MANIFESTS / "base" / "crd.yaml").read_text())
    RULES.write_text(alerts())
    (CHART / "values.yaml").write_text(chart_values())
    for name in OF_MONITORING:
        (CHART / "files" / "monitoring" / name).write_text((MANIFESTS / "monitoring" / name).read_text())


if __name__ == "__main__":
    main()
