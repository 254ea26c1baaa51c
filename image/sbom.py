"""What is in the image, as a CycloneDX 1.6 document on standard output.

    python3 image/sbom.py ROOT VERSION

ROOT is the image's root directory, of any architecture: nothing of it is executed. Named are the Python packages with
their licenses, the packages of the base, the interpreter, and the shim with its digest. The same image gives the same
document. The standard library is all that there is.
"""

from __future__ import annotations

import email.parser
import hashlib
import json
import re
import sys
import urllib.parse
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

SHIM: Final = "opt/multus/bin/multus-shim"
_OWN: Final = "multus-daemon"


def main() -> None:
    """The command."""
    print(json.dumps(document(Path(sys.argv[1]), sys.argv[2]), indent=2, sort_keys=True))


def document(root: Path, version: str) -> dict[str, Any]:
    """The bill of materials of the image at `root`."""
    found = [*python_packages(root), *debian_packages(root), shim(root, version), *interpreter(root)]
    unique = {item["bom-ref"]: item for item in found}
    components = [unique[reference] for reference in sorted(unique)]
    subject = {
        "type": "container",
        "bom-ref": f"container:{_OWN}",
        "name": _OWN,
        "version": version,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }
    content = json.dumps([subject, components], sort_keys=True)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": {"component": subject},
        "components": components,
    }


def python_packages(root: Path) -> Iterator[dict[str, Any]]:
    """Those of the daemon's environment (core metadata, PEP 566)."""
    for path in sorted(root.glob("opt/multus/lib/python*/site-packages/*.dist-info/METADATA")):
        fields = email.parser.Parser().parsestr(path.read_text("utf-8", "replace"), headersonly=True)
        name = re.sub(r"[-_.]+", "-", fields["Name"]).lower()
        component = _component(
            "library", f"pkg:pypi/{_quoted(name)}@{_quoted(fields['Version'])}", name, fields["Version"]
        )
        if expression := fields["License-Expression"]:
            component["licenses"] = [{"expression": expression}]
        elif words := [line.rpartition(" :: ")[2] for line in fields.get_all("Classifier", []) if "License ::" in line]:
            component["licenses"] = [{"license": {"name": word}} for word in words]
        yield component


def debian_packages(root: Path) -> Iterator[dict[str, Any]]:
    """Those of the base, whose distribution and release are in the package addresses."""
    release = _release(root)
    status = root / "var/lib/dpkg/status"
    texts = [status] if status.is_file() else []
    for path in [*texts, *sorted(root.glob("var/lib/dpkg/status.d/*"))]:
        for paragraph in path.read_text("utf-8", "replace").split("\n\n"):
            fields = dict(re.findall(r"^([A-Z][\w-]*): (.*)$", paragraph, re.MULTILINE))
            if "Package" not in fields or not fields.get("Status", "install ok installed").endswith(" installed"):
                continue
            name, version = fields["Package"], fields["Version"]
            query = urllib.parse.urlencode({"arch": fields["Architecture"], "distro": release})
            address = f"pkg:deb/{release.partition('-')[0]}/{_quoted(name)}@{_quoted(version)}?{query}"
            yield _component("library", address, name, version)


def interpreter(root: Path) -> Iterator[dict[str, Any]]:
    """Python, where it is no package of the base: as in the official image, below /usr/local."""
    for path in sorted(root.glob("usr/local/include/python3*/patchlevel.h")):
        if matched := re.search(r'PY_VERSION\s+"([^"]+)"', path.read_text()):
            yield _component("application", f"pkg:generic/python@{_quoted(matched[1])}", "python", matched[1])


def shim(root: Path, version: str) -> dict[str, Any]:
    """The native program that the runtime executes."""
    digest = hashlib.sha256((root / SHIM).read_bytes()).hexdigest()
    return {
        "type": "application",
        "bom-ref": "application:multus-shim",
        "name": "multus-shim",
        "version": version,
        "hashes": [{"alg": "SHA-256", "content": digest}],
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }


def _component(kind: str, address: str, name: str, version: str) -> dict[str, Any]:
    return {"type": kind, "bom-ref": address, "name": name, "version": version, "purl": address}


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="")


def _release(root: Path) -> str:
    """Such as `debian-12`."""
    path = root / "etc/os-release"
    fields = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', path.read_text(), re.MULTILINE)) if path.is_file() else {}
    return f"{fields.get('ID', 'debian')}-{fields.get('VERSION_ID', 'unknown')}"


if __name__ == "__main__":
    main()
