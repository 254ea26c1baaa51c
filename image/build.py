"""Build the image for several architectures from one machine, and say how large each is: `make image IMAGE=NAME`.

    python3 image/build.py registry.example/multus-daemon:VERSION
    python3 image/build.py NAME --platforms linux/arm64 --push

With docker buildx where there is one that runs, else with buildah. Without --push it is an OCI archive in
`build/multus-daemon.oci.tar`, which containerd (`ctr images import`), skopeo and buildah read. The standard library is
all that there is.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
ARCHIVE: Final = ROOT / "build" / "multus-daemon.oci.tar"
PLATFORMS: Final = "linux/amd64,linux/arm64"
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


class BuildError(Exception):
    """There is no image; the message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="make image IMAGE=NAME", description="Build the image.")
    parser.add_argument("name", metavar="NAME", help="such as registry.example/multus-daemon:VERSION")
    parser.add_argument("--platforms", default=PLATFORMS, help="(default: %(default)s)")
    parser.add_argument("--push", action="store_true", help="into the registry of NAME")
    parser.add_argument("--digest-file", type=Path, help="with --push: the digest goes there")
    parser.add_argument("--base", default="", help="another base image, see Dockerfile")
    parser.add_argument("--build-base", default="", help="the same for the builder's architecture")
    parser.add_argument("--builder", choices=("docker", "buildah"), default="", help="(default: the first that works)")
    parser.add_argument("--builder-flags", default="", help="for the builder, separated by blanks")
    options = parser.parse_args(arguments)
    try:
        build(options, options.builder or builder())
    except BuildError as error:
        print(f"image/build.py: {error}", file=sys.stderr)
        return 1
    return 0


def build(options: argparse.Namespace, program: str) -> None:
    """Build with `program`, report the sizes. Raises BuildError."""
    ARCHIVE.parent.mkdir(exist_ok=True)
    arguments = [f"--build-arg={key}={value}" for key, value in facts().items() if value]
    for key, value in (("BASE", options.base), ("BUILD_BASE", options.build_base)):
        arguments += [f"--build-arg={key}={value}"] if value else []
    arguments += [f"--platform={options.platforms}", *options.builder_flags.split()]
    metadata = ARCHIVE.with_suffix(".json")
    if program == "docker":
        output = "type=registry" if options.push else f"type=oci,dest={ARCHIVE}"
        run("docker", "buildx", "build", *arguments, f"--tag={options.name}", f"--output={output}",
            "--provenance=false", f"--metadata-file={metadata}", str(ROOT))  # fmt: skip
        digest = json.loads(metadata.read_text()).get("containerimage.digest", "")
    else:
        # A list of one image for each platform; one of an earlier run would grow.
        subprocess.run(["buildah", "manifest", "rm", options.name], capture_output=True, check=False)
        run("buildah", "build", *arguments, f"--manifest={options.name}", str(ROOT))
        target = f"docker://{options.name}" if options.push else f"oci-archive:{ARCHIVE}"
        run("buildah", "manifest", "push", "--all", f"--digestfile={metadata}", options.name, target)
        digest = metadata.read_text().strip()
    if not _DIGEST.fullmatch(digest):
        raise BuildError(f"{program} gave no digest of the image, but {digest!r}")
    print(f"{options.name}@{digest}")
    if options.digest_file:
        options.digest_file.write_text(digest + "\n")
    if not options.push:
        print(f"{ARCHIVE.relative_to(ROOT)}:")
        for platform, compressed in sizes(ARCHIVE):
            print(f"  {platform}: {compressed / 1e6:.1f} MB, as a registry sends it")


def builder() -> str:
    """The builder that works here. Raises BuildError."""
    if shutil.which("docker"):
        done = subprocess.run(["docker", "buildx", "inspect"], capture_output=True, check=False)
        if done.returncode == 0:
            return "docker"
    if shutil.which("buildah"):
        return "buildah"
    raise BuildError("neither docker with buildx and a running daemon nor buildah is there: install one of them")


def facts() -> dict[str, str]:
    """The arguments of the labels. Time and commit are those of the checkout, so that the same gives the same."""
    text = (ROOT / "multus_daemon" / "__init__.py").read_text()
    source = re.search(r'^Source = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    version = re.search(r'__version__ = "([^"]+)"', text)
    seconds = os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct")
    created = datetime.datetime.fromtimestamp(int(seconds), datetime.UTC).isoformat() if seconds else ""
    return {
        "VERSION": version[1] if version else "",
        "REVISION": git("rev-parse", "HEAD"),
        "SOURCE": source[1] if source else "",
        "CREATED": created,
    }


def git(*arguments: str) -> str:
    """What git says of the checkout; empty where it is none."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def sizes(archive: Path) -> list[tuple[str, int]]:
    """Platform and compressed bytes of each image of an OCI archive (OCI image layout)."""
    found = []
    with tarfile.open(archive) as tar:

        def blob(descriptor: dict[str, Any]) -> Any:
            algorithm, _, digest = descriptor["digest"].partition(":")
            file = tar.extractfile(f"blobs/{algorithm}/{digest}")
            assert file is not None
            return json.load(file)

        index = tar.extractfile("index.json")
        assert index is not None
        waiting = list(json.load(index)["manifests"])
        while waiting:
            content = blob(waiting.pop(0))
            if "manifests" in content:
                waiting += content["manifests"]
            else:
                config = blob(content["config"])
                size = sum(layer["size"] for layer in content["layers"])
                found.append((f"{config['os']}/{config['architecture']}", size))
    return found


def run(*command: str) -> None:
    """Run a program, what it prints shown. Raises BuildError."""
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command[:3])} failed with status {done.returncode}")


if __name__ == "__main__":
    sys.exit(main())
