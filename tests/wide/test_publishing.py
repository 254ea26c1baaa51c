"""A release, tried: the steps of `release.yml` publish into a registry of this machine, and a user gets all of it.

The registry asks for a name and a token, by TLS, as the forge's. Not as there: buildah builds instead of docker, a key
signs instead of the workflow's identity, and the base is Debian's of this machine's architecture under both names.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from multus_daemon import __version__
from tests import debian
from tests.e2e import build_tools
from tests.e2e.cluster import daemon_image
from tests.programs import needed, require
from tests.waiting import until
from tests.wide import forge

RUNS: Final = ("cosign", "helm", "krew")

pytestmark = pytest.mark.timeout(1800)

TOKEN: Final = "token"
USER: Final = "someone"
# Of TOKEN (bcrypt, the only kind that the registry takes).
PASSWORDS: Final = f"{USER}:$2b$04$nZQDofcoSBEfyChO8zFERuha1dQGxFi.WcruhtCji.WXp.hhieD0e\n"
MACHINES: Final = {"amd64": 62, "arm64": 183}
"""What ELF calls them (elf(5), e_machine)."""

DOCKER: Final = """#!/bin/bash -e
# What release.yml asks docker for, by buildah.
case "$1 $2" in
"buildx create") ;;
"login "*) registry=$2; shift 2; exec buildah login "$@" "$registry" ;;
"create --platform") exec buildah from --pull-always --platform "$3" "$4" ;;
"cp "*) exec cp "$(buildah mount "${2%%:*}")${2#*:}" "$3" ;;
"rm "*) exec buildah rm "$2" ;;
*) exit 1 ;;
esac
"""
BUILDAH: Final = """#!/bin/bash -e
# The base of this machine, and its package index.
if [ "$1" = build ]; then
    shift
    set -- build --build-arg "BASE=$BASE" --secret "id=pip.conf,src=$SECRETS/pip.conf" \\
        --secret "id=ca.pem,src=$SECRETS/ca.pem" "$@"
fi
exec "$REAL_BUILDAH" "$@"
"""
COSIGN: Final = """#!/bin/bash -e
# With a key. Nothing is told to a public log.
case "$1" in
sign | sign-blob) command=$1; shift
    set -- "$command" --key "$KEY.key" --use-signing-config=false --tlog-upload=false "$@" ;;
esac
exec "$REAL_COSIGN" "$@"
"""
GH: Final = """#!/bin/bash -e
# The release: its text and files.
[ "$1 $2 $4 $5 $7" = "release create --verify-tag --notes-file --title" ]
mkdir "$RELEASED" && cp "$6" "$RELEASED.notes" && shift 8 && cp "$@" "$RELEASED"
"""


@dataclass(frozen=True)
class Published:
    """What the run left, and how a user looks at it."""

    registry: str
    files: Path
    """The files of the release."""
    notes: str
    image: str
    """With its digest."""
    environment: Mapping[str, str]
    steps: list[str]
    subjects: list[dict[str, str]]
    """The inputs of the steps that attest where something is from."""

    def run(self, *command: str | Path, cwd: Path | None = None) -> str:
        """Run a program as a user; what it printed."""
        return run(*command, env=self.environment, cwd=cwd)

    def verify(self, name: str) -> list[dict[str, Any]]:
        """What cosign says of the image's or chart's signatures."""
        said = self.run("cosign", "verify", "--key", self.environment["KEY"] + ".pub", *UNLOGGED, name)
        return [item["critical"] for item in json.loads(said)]


UNLOGGED: Final = ("--insecure-ignore-tlog=true",)


def run(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


# --- the run ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A registry of this machine, and the certificates that a client needs."""
    program, openssl = needed("docker-registry"), needed("openssl")
    place = tmp_path_factory.mktemp("registry")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    key, certificate = place / "key.pem", place / "certificate.pem"
    run(
        *(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
        *("-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate),
    )
    (place / "passwords").write_text(PASSWORDS)
    configuration = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(place / "data")}},
        "http": {"addr": f"127.0.0.1:{port}", "tls": {"certificate": str(certificate), "key": str(key)}},
        "auth": {"htpasswd": {"realm": "test", "path": str(place / "passwords")}},
    }
    (place / "config.yml").write_text(yaml.safe_dump(configuration))
    trusted = place / "trusted.pem"
    known = Path(debian.pip_settings().get("cert", "/etc/ssl/certs/ca-certificates.crt"))
    trusted.write_bytes(certificate.read_bytes() + (known.read_bytes() if known.exists() else b""))
    with (place / "log").open("wb") as log:
        server = subprocess.Popen([program, "serve", place / "config.yml"], stdout=log, stderr=log)
    try:
        until(lambda: listens(port), what="the registry does not start")
        yield f"localhost:{port}", trusted
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture(scope="module")
def environment(registry: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a runner: its programs, a home directory, and a key instead of the workflow's identity."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    require("buildah", "git")
    try:
        found = build_tools.find_all(("cosign", "krew", "helm", "kubectl"))
        base = daemon_image.base()
    except build_tools.ToolError as error:
        pytest.skip(str(error))
    name, trusted = registry
    place = tmp_path_factory.mktemp("runner")
    programs, secrets = place / "bin", place / "secrets"
    for folder in (programs, secrets, place / "home"):
        folder.mkdir()
    for program, text in (("docker", DOCKER), ("buildah", BUILDAH), ("cosign", COSIGN), ("gh", GH)):
        (programs / program).write_text(text)
        (programs / program).chmod(0o755)
    for program, path in (("helm", found["helm"]), ("kubectl", found["kubectl"]), ("kubectl-krew", found["krew"])):
        (programs / program).symlink_to(path)
    # A job installs into what actions/setup-python has made for it.
    run(sys.executable, "-m", "venv", place / "python")
    settings = debian.pip_settings()
    (secrets / "ca.pem").write_bytes(trusted.read_bytes())
    (secrets / "pip.conf").write_text(debian.pip_conf(settings | {"cert": "/run/secrets/ca.pem"}))
    (place / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{place}/storage"\nrunroot = "{place}/run"\n'
    )
    cache = run(sys.executable, "-m", "pip", "cache", "dir")
    inherited = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    made = inherited | {
        "BASE": f"{name}/base:1",
        "BUILDAH_ISOLATION": "chroot",
        "CONTAINERS_STORAGE_CONF": str(place / "storage.conf"),
        "COSIGN_PASSWORD": "",
        "HOME": str(place / "home"),
        "KEY": str(place / "cosign"),
        "KREW_NO_UPGRADE_CHECK": "1",
        "KREW_ROOT": str(place / "krew"),
        "LANG": "C.UTF-8",
        "PATH": f"{programs}:{place}/python/bin:{place}/krew/bin:{os.environ['PATH']}",
        "PIP_CACHE_DIR": cache.strip(),
        "PIP_CERT": str(trusted),
        "REAL_BUILDAH": needed("buildah"),
        "REAL_COSIGN": str(found["cosign"]),
        "REGISTRY_AUTH_FILE": str(place / "home" / ".docker" / "config.json"),
        "RELEASED": str(place / "released"),
        "SECRETS": str(secrets),
        "SSL_CERT_FILE": str(trusted),
    }
    run("cosign", "generate-key-pair", "--output-key-prefix", place / "cosign", env=made)
    push_base(name, base, made)
    return made


def push_base(registry: str, base: Path, environment: Mapping[str, str]) -> None:
    """Put the base into the registry, for both architectures: nothing of it is executed but for the builder's."""

    def buildah(*arguments: str | Path) -> str:
        return run(environment["REAL_BUILDAH"], *arguments, env=environment).strip()

    Path(environment["REGISTRY_AUTH_FILE"]).parent.mkdir()
    buildah("login", "--username", USER, "--password", TOKEN, registry)
    target = environment["BASE"]
    buildah("manifest", "create", target)
    for architecture in MACHINES:
        container = buildah("from", "--arch", architecture, "scratch")
        buildah("add", "--quiet", container, base, "/")
        buildah("config", "--arch", architecture, container)
        buildah("commit", "--quiet", "--rm", container, f"localhost/base-{architecture}")
        buildah("manifest", "add", "--arch", architecture, target, f"localhost/base-{architecture}")
    buildah("manifest", "push", "--all", target, f"docker://{target}")
    buildah("logout", registry)


@pytest.fixture(scope="module")
def published(
    registry: tuple[str, Path], environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Published:
    """Every job of release.yml but the tests, as they follow each other."""
    place = tmp_path_factory.mktemp("forge")
    artifacts = place / "artifacts"
    artifacts.mkdir()
    subjects: list[dict[str, str]] = []

    def upload(job: Path, inputs: Mapping[str, str]) -> None:
        shutil.copytree(job / inputs["path"], artifacts, dirs_exist_ok=True)

    def download(job: Path, inputs: Mapping[str, str]) -> None:
        shutil.copytree(artifacts, job / inputs["path"], dirs_exist_ok=True)

    def attest(job: Path, inputs: Mapping[str, str]) -> None:
        if "subject-checksums" in inputs:
            assert (job / inputs["subject-checksums"]).is_file()
        subjects.append(dict(inputs))

    run_ = forge.Forge(
        place,
        forge.workflow("release.yml"),
        environment,
        {"REGISTRY": registry[0]}
        | {"GITHUB_REF_NAME": f"v{__version__}", "GITHUB_REPOSITORY": "Owner/Repository"}
        | {"GITHUB_REPOSITORY_OWNER": "Owner"},
        {"secrets.GITHUB_TOKEN": TOKEN, "github.actor": USER},
        {
            "actions/checkout": lambda job, _: forge.sources(job),
            "actions/setup-python": lambda *_: None,
            "sigstore/cosign-installer": lambda *_: None,
            "actions/upload-artifact": upload,
            "actions/download-artifact": download,
            "actions/attest-build-provenance": attest,
        },
    )
    for job in ("image", "wheels", "publish"):
        run_.run(job)
    released = Path(environment["RELEASED"])
    image = f"{run_.values['needs.image.outputs.name']}@{run_.values['needs.image.outputs.digest']}"
    notes = released.with_name("released.notes").read_text()
    return Published(registry[0], released, notes, image, environment, run_.log, subjects)


# --- what a user gets ------------------------------------------------------------------------------------------------


def test_the_image_is_there_for_both_architectures_and_signed(published: Published) -> None:
    assert published.image.startswith(f"{published.registry}/owner/repository@sha256:")
    index = json.loads(published.run("buildah", "manifest", "inspect", published.image))
    images = {item["platform"]["architecture"]: item["digest"] for item in index["manifests"]}
    assert set(images) == set(MACHINES)
    named = {"docker-manifest-digest": published.image.partition("@")[2]}
    assert {item["image"] == named for item in published.verify(published.image)} == {True}
    for architecture, digest in images.items():
        name = f"{published.image.partition('@')[0]}@{digest}"
        assert published.verify(name)
        container = published.run("buildah", "from", "--platform", f"linux/{architecture}", name).strip()
        root = Path(published.run("buildah", "mount", container).strip())
        shim = (root / "opt/multus/bin/multus-shim").read_bytes()
        (module, *_) = root.glob("opt/multus/lib/python3*/site-packages/aiohttp/_http_parser*.so")
        for program in (shim, module.read_bytes()):
            assert struct.unpack_from("<H", program, 18) == (MACHINES[architecture],)
        document = json.loads((published.files / f"multus-daemon-{architecture}.cdx.json").read_text())
        (component,) = [item for item in document["components"] if item["name"] == "multus-shim"]
        assert component["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(shim).hexdigest()}]


def test_a_signature_of_another_key_is_refused(published: Published, tmp_path: Path) -> None:
    """So that the verification above is one."""
    published.run("cosign", "generate-key-pair", "--output-key-prefix", tmp_path / "other")
    with pytest.raises(AssertionError, match="no matching (attestations|signatures)"):
        published.run("cosign", "verify", "--key", tmp_path / "other.pub", *UNLOGGED, published.image)


def test_the_chart_is_there_signed_and_names_the_image(published: Published, tmp_path: Path) -> None:
    address = f"{published.registry}/owner/charts/multus-daemon"
    published.run("helm", "pull", f"oci://{address}", "--version", __version__, "--destination", tmp_path)
    (chart,) = tmp_path.iterdir()
    assert chart.read_bytes() == (published.files / f"multus-daemon-{__version__}.tgz").read_bytes()
    rendered = [item for item in yaml.safe_load_all(published.run("helm", "template", "multus", chart)) if item]
    manifest = [item for item in yaml.safe_load_all((published.files / "multus-daemonset.yaml").read_text()) if item]
    for objects in (rendered, manifest):
        (daemons,) = [item for item in objects if item["kind"] == "DaemonSet"]
        spec = daemons["spec"]["template"]["spec"]
        containers = [*spec["containers"], *spec.get("initContainers", ())]
        assert {container["image"] for container in containers} == {published.image}
    assert published.verify(f"{address}:{__version__}")


def test_the_files_are_those_of_the_page_and_their_checksums_are_signed(published: Published) -> None:
    names = {path.name for path in published.files.iterdir()}
    wheels = {name for name in names if name.endswith(".whl")}
    assert {name.removesuffix(".whl").rpartition("-")[2] for name in wheels} == {
        *("any", "linux_x86_64", "linux_aarch64"),
    }
    assert names == wheels | {
        *(f"multus-daemon-{architecture}.cdx.json" for architecture in MACHINES),
        f"multus-daemon-{__version__}.tgz",
        f"manifests-{__version__}.tar.gz",
        f"kubectl-multus-{__version__}.tar.gz",
        *("multus-daemonset.yaml", "multus.yaml", "SHA256SUMS", "SHA256SUMS.sigstore.json"),
    }
    published.run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=published.files)
    published.run(
        *("cosign", "verify-blob", "--key", published.environment["KEY"] + ".pub", *UNLOGGED),
        *("--bundle", published.files / "SHA256SUMS.sigstore.json", published.files / "SHA256SUMS"),
    )
    with tarfile.open(published.files / f"manifests-{__version__}.tar.gz") as tar:
        assert "manifests/multus-daemonset.yaml" in tar.getnames()


def test_where_all_of_it_is_from_is_told(published: Published) -> None:
    """The forge makes the statement; these are the inputs of its action."""
    name, _, digest = published.image.partition("@")
    image = {"subject-name": name, "subject-digest": digest, "push-to-registry": "True"}
    assert published.subjects == [image, {"subject-checksums": "release/SHA256SUMS"}]


def test_krew_installs_kubectl_multus(published: Published) -> None:
    archive = published.files / f"kubectl-multus-{__version__}.tar.gz"
    published.run("kubectl", "krew", "install", f"--manifest={published.files / 'multus.yaml'}", f"--archive={archive}")
    assert published.run("kubectl", "multus", "--help").startswith("usage: ")


def test_the_text_is_the_section_of_the_changelog(published: Published) -> None:
    section = (forge.ROOT / "CHANGELOG.md").read_text().partition(f"\n## {__version__}\n")[2].partition("\n## ")[0]
    assert published.notes.strip() == section.strip() != ""
