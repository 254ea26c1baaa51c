"""`image/`: what builds the image, and the bill of materials that is in it."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from multus_daemon import __version__

ROOT = Path(__file__).resolve().parents[2]


def module(name: str) -> ModuleType:
    """A file of `image/`, which is no package."""
    spec = importlib.util.spec_from_file_location(f"image_{name}", ROOT / "image" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


build, install, sbom = (module(name) for name in ("build", "install", "sbom"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root directory of an image."""
    packages = tmp_path / "opt/multus/lib/python3.11/site-packages"
    for name, head in {
        "PyYAML": "Classifier: License :: OSI Approved :: MIT License",
        "prometheus_client": "License-Expression: Apache-2.0 AND BSD-2-Clause",
        "bare": "Summary: nothing about its license",
    }.items():
        (packages / f"{name}-1.0.dist-info").mkdir(parents=True)
        text = f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{head}\n\nLong text.\nVersion: 9\n"
        (packages / f"{name}-1.0.dist-info" / "METADATA").write_text(text)
    for path, text in {
        sbom.SHIM: "shim",
        "etc/os-release": 'ID=debian\nVERSION_ID="12"\n',
        "var/lib/dpkg/status": (
            "Package: libc6\nStatus: install ok installed\nArchitecture: arm64\nVersion: 2.36-9+deb12u1\n\n"
            "Package: gone\nStatus: deinstall ok config-files\nArchitecture: arm64\nVersion: 1\n"
        ),
        "usr/local/include/python3.11/patchlevel.h": '#define PY_VERSION      \t"3.11.9"\n',
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_the_bill_of_materials(root: Path) -> None:
    found = sbom.document(root, "1.2.3")
    assert (found["bomFormat"], found["specVersion"], found["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", found["serialNumber"])
    by_name = {item["name"]: item for item in found["components"]}
    assert set(by_name) == {"pyyaml", "prometheus-client", "bare", "libc6", "python", "multus-shim"}
    assert by_name["pyyaml"]["purl"] == "pkg:pypi/pyyaml@1.0"
    assert by_name["pyyaml"]["licenses"] == [{"license": {"name": "MIT License"}}]
    assert by_name["prometheus-client"]["licenses"] == [{"expression": "Apache-2.0 AND BSD-2-Clause"}]
    assert "licenses" not in by_name["bare"]
    assert by_name["libc6"]["purl"] == "pkg:deb/debian/libc6@2.36-9%2Bdeb12u1?arch=arm64&distro=debian-12"
    assert by_name["python"]["version"] == "3.11.9"
    assert by_name["multus-shim"]["hashes"] == [
        {"alg": "SHA-256", "content": hashlib.sha256(b"shim").hexdigest()}
    ]  # fmt: skip
    references = [item["bom-ref"] for item in found["components"]]
    assert references == sorted(set(references))


def test_the_same_image_gives_the_same_bill(root: Path) -> None:
    command = [sys.executable, str(ROOT / "image" / "sbom.py"), str(root), "1.2.3"]
    first, second = (subprocess.run(command, capture_output=True, check=True, timeout=30).stdout for _ in range(2))
    assert first == second
    assert json.loads(first) == sbom.document(root, "1.2.3")
    (root / sbom.SHIM).write_text("another")
    assert sbom.document(root, "1.2.3")["serialNumber"] != json.loads(first)["serialNumber"]


def test_the_labels_are_of_the_checkout() -> None:
    facts = build.facts()
    assert facts["VERSION"] == __version__
    labels = re.findall(r'org\.opencontainers\.image\.(\w+)="', (ROOT / "Dockerfile").read_text())
    assert {"version", "revision", "source", "created", "licenses", "title", "description"} <= set(labels)
    arguments = set(re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    assert set(facts) <= arguments


def test_every_platform_has_a_shim() -> None:
    from multus_shim.build import TARGETS

    assert set(install.ARCHITECTURES.values()) <= set(TARGETS)
    assert {platform.removeprefix("linux/") for platform in build.PLATFORMS.split(",")} <= set(install.ARCHITECTURES)


def test_every_program_of_the_wheel_is_in_the_image() -> None:
    scripts = re.findall(
        r'^([\w-]+) = "multus_(?:daemon|tools)\.[\w.]+:', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert {*scripts, "multus-shim"} == set(install.PROGRAMS)


def archive(path: Path, *platforms: tuple[str, list[int]]) -> Path:
    """An OCI archive as builders write it: one index, with another in it."""
    blobs: dict[str, bytes] = {}

    def put(content: Any) -> dict[str, Any]:
        data = json.dumps(content).encode()
        digest = hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        return {"digest": f"sha256:{digest}", "size": len(data)}

    images = []
    for architecture, layers in platforms:
        config = put({"architecture": architecture, "os": "linux"})
        images.append(put({"config": config, "layers": [{"digest": "sha256:0", "size": size} for size in layers]}))
    index = {"manifests": [put({"manifests": images})]}
    with tarfile.open(path, "w") as tar:
        for name, data in {
            "index.json": json.dumps(index).encode(),
            **{f"blobs/sha256/{k}": v for k, v in blobs.items()},
        }.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return path


def test_sizes_are_told_by_platform(tmp_path: Path) -> None:
    made = archive(tmp_path / "image.tar", ("amd64", [10, 20]), ("arm64", [7]))
    assert build.sizes(made) == [("linux/amd64", 30), ("linux/arm64", 7)]


def test_without_a_builder_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.main(["registry.example/multus-daemon:VERSION"]) == 1
    assert "install one of them" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["docker", "buildah"])
def test_what_is_asked_of_the_builder(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a builder that is a script: it notes its arguments, and writes the archive and the digest."""
    made = archive(tmp_path / "made.tar", ("amd64", [1_000_000]))
    digest = "sha256:" + "ab" * 32
    body = f"""#!/bin/sh
        echo "$0 $*" >>{tmp_path}/log
        for word; do case "$word" in
            --metadata-file=*) echo '{{"containerimage.digest": "{digest}"}}' >"${{word#*=}}";;
            --digestfile=*) echo {digest} >"${{word#*=}}";;
            --output=type=oci,dest=*) cp {made} "${{word##*=}}";;
            oci-archive:*) cp {made} "${{word#*:}}";;
        esac; done
    """
    (tmp_path / program).write_text(body)
    (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "ARCHIVE", tmp_path / "build" / "image.tar")
    monkeypatch.setattr(build, "facts", lambda: {"VERSION": "1", "REVISION": ""})
    name = "registry.example/multus-daemon:VERSION"
    assert build.main([name, "--builder", program]) == 0
    said = capsys.readouterr().out
    assert f"{name}@{digest}" in said
    assert "linux/amd64: 1.0 MB" in said
    log = (tmp_path / "log").read_text()
    assert "--platform=linux/amd64,linux/arm64" in log
    assert "--build-arg=VERSION=1" in log
    assert "REVISION" not in log
    assert build.main([name, "--builder", program, "--push", "--digest-file", str(tmp_path / "digest")]) == 0
    assert (tmp_path / "digest").read_text() == digest + "\n"
    pushed = (tmp_path / "log").read_text().removeprefix(log)
    assert ("--output=type=registry" if program == "docker" else f"docker://{name}") in pushed


@pytest.mark.parametrize("program", ["multus-daemon", "multus-probe", "multusctl", "multus-builtin", "kubectl-multus"])
def test_every_program_starts_without_docstrings(program: str) -> None:
    """The image has them stripped (PYTHONOPTIMIZE=2)."""
    path = Path(sys.executable).with_name(program)
    done = subprocess.run([sys.executable, "-OO", path, "--help"], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert "usage: " in done.stdout + done.stderr
