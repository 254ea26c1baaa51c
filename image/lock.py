"""Write the hashes of what goes into the image, and of what builds it: `make lock`.

    python3 -m image.lock

constraints.txt has the versions; `image/requirements.txt` and `image/build-requirements.txt` get the names and hashes
of the wheels that pip takes for each architecture and Python. They name no index: pip's
configuration chooses it. The script uses the standard library only.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

from image.install import EXTRAS, platforms

ROOT: Final = Path(__file__).resolve().parent.parent
CONSTRAINTS: Final = ROOT / "constraints.txt"
MACHINES: Final = ("x86_64", "aarch64")
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
HEADER: Final = (
    "# Made from constraints.txt by `make lock`. The image's build takes wheels with these hashes and no others.\n"
)


def main() -> None:
    """The command."""
    for path, wanted in files().items():
        path.write_text(HEADER + "".join(locked(wanted)))


def files() -> dict[Path, list[str]]:
    """The files and the requirements that each is made from."""
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = described["project"]
    extras = [item for name in EXTRAS.split(",") for item in project["optional-dependencies"][name]]
    return {
        ROOT / "image" / "requirements.txt": [*project["dependencies"], *extras],
        ROOT / "image" / "build-requirements.txt": described["build-system"]["requires"],
    }


def locked(wanted: list[str]) -> list[str]:
    """Return one entry for each package that `wanted` needs."""
    found: dict[str, set[str]] = {}
    for machine in MACHINES:
        for python in PYTHONS:
            for item in resolved(wanted, machine, python):
                name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
                hashes = found.setdefault(f"{name}=={item['metadata']['version']}", set())
                hashes.add(item["download_info"]["archive_info"]["hashes"]["sha256"])
    return [
        " \\\n    ".join([name, *(f"--hash=sha256:{digest}" for digest in sorted(found[name]))]) + "\n"
        for name in sorted(found)
    ]


def resolved(wanted: list[str], machine: str, python: str) -> list[Any]:
    """Return the items of pip's report of what it would install. Exits if pip fails."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report=-"]
    command += ["--only-binary=:all:", f"--python-version={python}", f"--constraint={CONSTRAINTS}", "--target=unused"]
    command += [f"--platform={name}" for name in platforms(machine)]
    done = subprocess.run([*command, *wanted], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"image/lock.py: pip has no wheels for Python {python} on {machine}")
    items: list[Any] = json.loads(done.stdout)["install"]
    return items


if __name__ == "__main__":
    main()
