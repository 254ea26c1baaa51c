"""Where we differ from upstream v4.3.0 on purpose: which records, which part of what came back, what is ours, and why.

The rows are applied in their order to what upstream showed; what comes out is what we must show. So a row says exactly
what becomes of upstream's text, a row without effect is found, and a difference that goes away fails its record.
`docs/compatibility.md` sums them up for readers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from tests.vectors import normalise
from tests.vectors.replay import View


@dataclass(frozen=True)
class Error:
    """A CNI error with this code, whose message begins with a match of `begins`."""

    code: int
    begins: str

    def matches(self, text: str) -> bool:
        """Return whether `text` is this error and nothing else."""
        try:
            found = json.loads(text)
        except ValueError:
            return False
        return (
            isinstance(found, dict)
            and set(found) <= {"code", "msg", "details"}
            and found.get("code") == self.code
            and re.match(self.begins, str(found.get("msg"))) is not None
        )


Expected: TypeAlias = str | Error
"""The answer must be this text after normalising, or this error."""


@dataclass(frozen=True)
class Difference:
    """One row of the table."""

    records: tuple[str, ...]
    """Ids of records, `*` as in file names; each must match some."""
    parts: tuple[str, ...]
    """Parts of a view, see replay.py."""
    ours: Expected | Callable[[str], str]
    """We show this instead; a function gets upstream's text, and returns it unchanged where the row does not apply."""
    what: str
    why: str

    def pattern(self, record_id: str) -> str | None:
        """Which of `records` matches."""
        return next((pattern for pattern in self.records if fnmatchcase(record_id, pattern)), None)


def expected(
    record_id: str, upstream: View, first_answer: View | None = None
) -> tuple[dict[str, Expected], set[tuple[int, str]]]:
    """Return the view that we must show where upstream showed `upstream`, and the rows that changed it.

    Each row comes with its pattern. `first_answer` is upstream's view of the same call before, where the scenario
    repeats one.
    """
    view: dict[str, Expected] = dict(upstream)
    effective: set[tuple[int, str]] = set()
    if first_answer is not None and (pattern := REPEATED.pattern(record_id)):
        view |= {part: text for part, text in first_answer.items() if part in view}
        effective.add((TABLE.index(REPEATED), pattern))
    for number, row in enumerate(TABLE):
        pattern = row.pattern(record_id)
        if row is REPEATED or pattern is None:
            continue
        for part in row.parts:
            if isinstance(before := view.get(part), str):
                after = _changed(row.ours, before)
                if after != before:
                    view[part] = after
                    effective.add((number, pattern))
    return view, effective


def meets(shown: str | None, wanted: Expected | None) -> bool:
    """Return whether a part of a view is as expected; None stands for a missing part."""
    return wanted.matches(shown or "") if isinstance(wanted, Error) else shown == wanted


def _changed(ours: Expected | Callable[[str], str], before: str) -> Expected:
    return ours if isinstance(ours, str | Error) else ours(before)


# --- what becomes of upstream's text -------------------------------------------------------------------------------


def _substitute(pattern: str, by: str) -> Callable[[str], str]:
    """`by` in place of each match; both as in `re.sub`."""
    return lambda text: re.sub(pattern, by, text)


def _header(name: str, value: str) -> Callable[[str], str]:
    """`name: value` in place of the header, an empty value takes it out."""

    def change(text: str) -> str:
        lines = [line for line in text.split("\n") if not line.startswith(f"{name}: ")]
        return "\n".join(sorted([*lines, *([f"{name}: {value}"] if value else [])]))

    return change


def _cache(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[str], str]:
    """A change to each file of the result cache."""

    def apply(text: str) -> str:
        lines = [line.partition(" ") for line in text.splitlines()]
        changed = [(path, json.dumps(change(json.loads(content)), separators=(",", ":"))) for path, _, content in lines]
        return "\n".join(f"{path} {content}" for path, content in changed)

    return apply


def _in_the_order_of_libcni(fields: dict[str, Any]) -> dict[str, Any]:
    order = ("kind", "containerId", "config", "ifName", "networkName", "netns", "cniArgs", "capabilityArgs", "result")
    return {key: fields[key] for key in order if key in fields}


def _in_cni_1_0_0(fields: dict[str, Any]) -> dict[str, Any]:
    if fields["networkName"] not in ("bridge-b", "caps"):
        return fields
    config = fields["config"].replace('"cniVersion": "1.1.0"', '"cniVersion": "1.0.0"')
    return fields | {"config": config, "result": fields["result"] | {"cniVersion": "1.0.0"}}


def _only_what_was_asked_for(fields: dict[str, Any]) -> dict[str, Any]:
    config = json.loads(fields["config"])
    ipam = {key: config["ipam"][key] for key in ("type", "subnet")}
    ours = {key: config[key] for key in ("cniVersion", "name", "type")} | {"ipam": ipam}
    args = [
        [key, fields["containerId"] if key == "K8S_POD_INFRA_CONTAINER_ID" else value]
        for key, value in fields["cniArgs"]
    ]
    return fields | {"config": json.dumps(ours), "cniArgs": args}


def _with_default_route(text: str) -> str:
    gateways = '[\n        "10.201.0.1"\n    ]'
    return text.removesuffix("\n}]") + f',\n    "gateway": {gateways},\n    "default-route": {gateways}\n}}]'


def _pinned(text: str) -> str:
    """A number of its own for the MAC address of a bridge that has that of its first port; those behind it move up."""
    found = re.search(r'(<mac (\d+)>","name":"recbr\d"\},\{"mac":")<mac \2>', text)
    if not found:
        return text
    number = int(found[2])
    moved = re.sub(r"<mac (\d+)>", lambda mac: f"<mac {int(mac[1]) + (int(mac[1]) > number)}>", text)
    return moved.replace(f"{found[1]}<mac {number}>", f"{found[1]}<mac {number + 1}>")


# --- the table -----------------------------------------------------------------------------------------------------

ANSWER = ("stdout", "body")
# The shim refuses that of 0.3.1, as upstream's.
CHECKED = tuple(f"{version}/same-network-twice/CHECK" for version in ("0.4.0", "1.0.0", "1.1.0"))
DELETED = ("*/missing-plugin/DEL", "*/no-cni-args/DEL", "*/args-without-pod/DEL", "conflist-primary/DEL")
FAILED = (
    "same-network-twice/ADD",
    "missing-plugin/ADD",
    "duplicate-interface/ADD",
    "exhausted/ADD",
    "netns-missing/ADD",
)


def _refusal(records: Iterable[str], code: int, begins: str, why: str = "") -> Difference:
    return Difference(
        tuple(records),
        ANSWER,
        Error(code, begins),
        f"code {code}, and a message that begins with the cause",
        why or "upstream says 999 for everything, and the cause comes last, behind the whole request",
    )


REPEATED = Difference(
    ("*/add-twice/ADD#2",),
    ("exit", "stdout", "status", "headers", "body", "network-status", "results", "reservations", "remembered"),
    "",
    "the stored result is returned and nothing is touched",
    "upstream fails, and its undoing takes the living pod's network away",
)

TABLE: tuple[Difference, ...] = (
    REPEATED,
    # --- everywhere
    Difference(
        ("*",),
        ("network-status",),
        normalise.without_nil_gateway,
        "no `gateway` for a default route without one",
        'upstream writes the text "<nil>" as an address',
    ),
    Difference(
        ("*",),
        ("network-status",),
        _substitute(r'(\n    "mac": "[^"]*",)(?=\n    "dns")', r'\1\n    "default": false,'),
        '`"default": false` at networks that are not the default one',
        "the specification asks for the key (5.3.5); upstream leaves a false one out",
    ),
    Difference(
        (
            "1.1.0/json-ips-mac/ADD",
            "1.1.0/json-ips-mac/CHECK",
            "1.1.0/conflist-network/ADD",
            "1.1.0/conflist-network/CHECK",
        ),
        ("results",),
        _pinned,
        "a new bridge has a MAC address of its own",
        "without one it takes the lowest of its ports, so that another pod's ADD changes it",
    ),
    Difference(
        ("*",),
        ("remembered",),
        _substitute(r"(?m)^(/var/lib/cni/multus/)([^/\n]+)$", r"\1attachments/\2.json\n\g<0>"),
        "`<cniDir>/attachments/<id>.json` beside `<cniDir>/<id>`",
        "upstream's file has no results, and upstream's own loses the keys of a conflist that its types do not have. "
        "It is written for a roll-back, and read where there is no record of ours",
    ),
    Difference(
        ("*/ADD", "*/ADD#2", "delegate/unknown verb", "http/POST /cni"),
        ("headers",),
        _substitute("Content-Type: text/plain; charset=utf-8", "Content-Type: application/json"),
        "`Content-Type: application/json`",
        "every body is JSON; upstream's clients do not look at the type",
    ),
    Difference(
        ("*/ADD", "delegate/unknown verb", "http/POST /cni"),
        ("headers",),
        _header("X-Content-Type-Options", ""),
        "no `X-Content-Type-Options` with an error",
        "it goes with Go's plain text errors",
    ),
    # --- ADD refused, as upstream does, with its reason
    _refusal(
        ["*/same-network-twice/ADD"],
        999,
        r"failed to add route .*10\.201\.0\.1/32.*: [Ff]ile exists",
        "the same failure of the same plugin; upstream puts it behind the whole request",
    ),
    _refusal(["*/missing-nad/ADD"], 7, r"network web/nope does not exist"),
    _refusal(["*/missing-namespace/ADD"], 7, r"network nowhere/ptp-a does not exist"),
    _refusal(["*/broken-nad/ADD"], 6, r"CNI configuration: .*\(network web/broken\)"),
    _refusal(["*/nad-without-type/ADD"], 7, r"CNI configuration has neither 'type' nor 'plugins'"),
    _refusal(["*/missing-plugin/ADD"], 7, r'failed to find plugin "no-such-plugin" in path \[/opt/cni/bin\]'),
    _refusal(["*/bad-annotation-json/ADD"], 6, r"not JSON: .*\(annotation k8s\.v1\.cni\.cncf\.io/networks\)"),
    _refusal(["*/bad-annotation-chars/ADD"], 7, r"name: 'ptp a!' must consist of"),
    _refusal(
        ["*/duplicate-interface/ADD"],
        7,
        r"interface 'x0' is asked for twice",
        "found before anything is attached; upstream finds it in the pod's namespace, after two networks",
    ),
    _refusal(["*/bad-interface-name/ADD"], 7, r"interface: 'this-name-is-much-too-long': interface name is too long"),
    _refusal(["*/exhausted/ADD"], 999, r"failed to allocate for range 0: no IP addresses available in range set"),
    _refusal(["*/uid-mismatch/ADD"], 11, r"pod web/web-\d+ has UID 1{8}-.*, and the request is for 9{8}-"),
    _refusal(["*/no-cni-args/ADD"], 4, r"required env variables \[CNI_ARGS\] missing$"),
    _refusal(["*/args-without-pod/ADD"], 4, r"missing K8S_POD_NAMESPACE$"),
    _refusal(["*/netns-missing/ADD"], 8, r"/var/run/netns/absent is no network namespace$"),
    _refusal(["delegate/unknown verb"], 4, r"unknown CNI_COMMAND: FROB$"),
    _refusal(["http/POST /cni"], 6, r"request body: unexpected end of JSON input$"),
    Difference(
        (*(f"*/{name}" for name in FAILED), "*/same-network-twice/CHECK"),
        ("remembered",),
        "",
        "nothing is remembered of an ADD that failed",
        "it has been undone whole; upstream's file stays, and with it networks that are not there",
    ),
    # --- a pod that nobody knows
    _refusal(
        ["*/pod-unknown/ADD"],
        11,
        r"pod web/web-\d+ is not known$",
        "upstream crashes (0.3.1) or answers an empty success (1.0.0), and the pod runs without networks",
    ),
    Difference(
        ("*/pod-unknown/ADD",),
        ("status",),
        "HTTP/1.1 400 Bad Request",
        "400",
        "as every failure; upstream closes the connection (0.3.1) or answers 200 (1.0.0)",
    ),
    Difference(("1.0.0/pod-unknown/ADD",), ("exit",), "1", "the ADD fails", "upstream's pod runs without networks"),
    Difference(
        ("0.3.1/pod-unknown/ADD",),
        ("headers",),
        "Connection: close\nContent-Type: application/json",
        "there is an answer",
        "upstream's handler crashes",
    ),
    # --- CHECK
    _refusal(
        CHECKED,
        3,
        r"container c0ffee\d+ has no record$",
        "CHECK of a container whose ADD failed; upstream's CHECK never fails once there is a cluster network",
    ),
    Difference(CHECKED, ("exit",), "1", "CHECK of a container whose ADD failed fails", "upstream's never does"),
    Difference(CHECKED, ("status",), "HTTP/1.1 400 Bad Request", "400", "as every failure"),
    Difference(
        CHECKED, ("headers",), _header("Content-Type", "application/json"), "the error is JSON", "as every failure"
    ),
    # --- DEL
    Difference(
        DELETED,
        ("status",),
        "HTTP/1.1 200 OK",
        "success",
        "what is not attached is detached, and DEL needs no pod; upstream's shim hides the error from the runtime",
    ),
    Difference(DELETED, ("body",), "", "no error", "it succeeded"),
    Difference(DELETED, ("headers",), "Connection: close", "no body, no type", "it succeeded"),
    Difference(
        ("conflist-primary/DEL",),
        ("results", "reservations"),
        "",
        "the cluster network's address is freed, its cached result removed",
        "upstream has lost the conflist's ranges, so its DEL fails and the address leaks",
    ),
    # --- default-route
    Difference(
        ("*/default-route/ADD",),
        ANSWER,
        _substitute(r',\s*"routes":\s*\[[^]]*\]', ""),
        "the cluster network's result is without the default route",
        "it has moved to the network that was asked for it; upstream's stays where it was",
    ),
    Difference(
        ("*/default-route/*",),
        ("network-status",),
        _with_default_route,
        "`gateway` and `default-route` at the network that was asked for it",
        "`gateway` is what is true now, `default-route` what the specification asks for (5.3.6.4)",
    ),
    Difference(
        ("*/default-route/*",),
        ("results",),
        _cache(_in_the_order_of_libcni),
        "the order of the keys is libcni's",
        "upstream writes the patched file with its keys sorted",
    ),
    # --- hot-plug
    Difference(
        ("delegate/ADD", "delegate/CHECK"),
        ("results",),
        _cache(_only_what_was_asked_for),
        "the plugin gets the network's own configuration, and the container's id in CNI_ARGS",
        "upstream lays the whole daemon configuration over it, and leaves K8S_POD_INFRA_CONTAINER_ID empty",
    ),
    Difference(
        ("delegate/ADD", "delegate/CHECK"),
        ("remembered",),
        "/var/lib/cni/multus/attachments/c0ffee91.json",
        "what is plugged in is remembered",
        "so that the pod's DEL detaches it, and CHECK and GC know it; upstream's address leaks",
    ),
    # --- plain HTTP
    Difference(("http/GET /readyz",), ("status",), "HTTP/1.1 200 OK", "there is a `/readyz`", "as in v4.3.1"),
    Difference(
        ("http/GET /readyz",),
        ("headers",),
        _header("Content-Type", "application/json"),
        "there is a `/readyz`",
        "as in v4.3.1",
    ),
    Difference(
        ("http/GET /cni",),
        ("headers",),
        _header("Allow", "POST"),
        "`Allow: POST` beside the same text",
        "RFC 9110, section 15.5.6",
    ),
    # --- of the test
    Difference(
        tuple(
            f"1.1.0/{scenario}/{verb}" for scenario in ("conflist-network", "json-ips-mac") for verb in ("ADD", "CHECK")
        ),
        ("results",),
        _cache(_in_cni_1_0_0),
        "no difference of the programs: networks that need binaries are declared with CNI 1.0.0",
        "reference plugins before 1.6, as distributions have them, know no 1.1.0; ptp is the built-in there",
    ),
)
