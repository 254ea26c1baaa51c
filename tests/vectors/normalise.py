"""From what a call left behind to texts that can be compared: what is random has a name in place of its value.

Random are MAC addresses that nobody asked for, the names of veth links, and the last byte of host-local's addresses,
which count on. Each value gets a number in the order in which it appears, so that the same value in two places is still
the same: the MAC of the result is that of the network-status, the address that of the reservation.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.vectors.records import CNI_DIR, NETWORKS_DIR, Message

_RANDOM = re.compile(
    r"(?P<mac>\b(?!02:00:00:00:00:07)[0-9a-f]{2}(?::[0-9a-f]{2}){5}\b)"
    r"|(?P<veth>\bveth[0-9a-f]{8}\b)"
    # The subnets of host-local; .1 is the gateway. 10.210.0.0/24 is of the static plugin.
    r"|\b(?P<subnet>10\.(?:244|20[0-9])\.0)\.(?!0\b|1\b)[0-9]+\b"
)


@dataclass
class Names:
    """Names for the random values of one call."""

    _numbers: dict[str, dict[str, int]] = field(default_factory=dict)

    def replace(self, text: str) -> str:
        """`text` with names for what is random in it."""
        return _RANDOM.sub(self._name, text)

    def _name(self, match: re.Match[str]) -> str:
        kind = match["subnet"] or next(kind for kind in ("mac", "veth") if match[kind])
        numbers = self._numbers.setdefault(kind, {})
        return f"<{kind} {numbers.setdefault(match[0], len(numbers) + 1)}>"


def headers(message: Message) -> str:
    """Headers, sorted; the body's length depends on what is random, the date was not recorded."""
    left_out = ("Content-Length: ", "Date: ")
    return "\n".join(sorted(header for header in message.headers if not header.startswith(left_out)))


def without_nil_gateway(text: str) -> str:
    """A network-status without upstream's text for a default route that has no gateway."""
    return text.replace(',\n    "gateway": [\n        "\\u003cnil\\u003e"\n    ]', "")


def results(files: Mapping[str, str]) -> str:
    """libcni's result cache: a line for each file, as it is but for its configuration, which is in clear text.

    And without how many the container has, which libcni passes over.
    """
    prefix = f"{CNI_DIR}/results/"
    return "\n".join(f"{path} {_result(files[path])}" for path in sorted(files) if path.startswith(prefix))


def _result(content: str) -> str:
    content = re.sub(r',"multusNetworks":[1-9][0-9]*}$', "}", content)
    return re.sub(r'(?<="config":)"([A-Za-z0-9+/=]*)"', _clear, content, count=1)


def _clear(match: re.Match[str]) -> str:
    return json.dumps(base64.b64decode(match[1]).decode())


def reservations(files: Mapping[str, str]) -> str:
    """List host-local's leases with their owners. Leave out its lock and its last reserved address."""
    taken = [
        (path.rpartition("/"), content)
        for path, content in files.items()
        if path.startswith(f"{NETWORKS_DIR}/") and re.search(r"/[0-9.]+$", path)
    ]
    return "\n".join(
        f"{folder}/{address}: {content!r}"
        for (folder, _, address), content in sorted(taken, key=lambda t: (t[0][0], t[1]))
    )


def remembered(files: Mapping[str, str]) -> str:
    """Files that tell which networks a container has: all that are neither results nor host-local's."""
    other = (f"{CNI_DIR}/results/", f"{NETWORKS_DIR}/")
    return "\n".join(sorted(path for path in files if not path.startswith(other)))
