"""The rules about the variables of a request, once for all that implement them.

CNI SPEC section 2 "Parameters", in order, words and codes of containernetworking/cni `pkg/skel`. Three programs check
them: the shim (Zig), every built-in plugin as a program (`multus_tools.builtin`), and the daemon, which gets
requests from other clients than our shim too (`multus_daemon.api.wire`). Where one differs, the case says so and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

Implementation = Literal["shim", "skel", "wire"]
IMPLEMENTATIONS: Final[tuple[Implementation, ...]] = get_args(Implementation)

INVALID_ENVIRONMENT: Final = 4
VERBS: Final = ("ADD", "DEL", "CHECK", "STATUS", "GC")
CONTAINER_VERBS: Final = ("ADD", "DEL", "CHECK")
NODE_VERBS: Final = ("STATUS", "GC")
VARIABLES: Final = {
    "CNI_CONTAINERID": "c0ffee",
    "CNI_NETNS": "/nowhere/netns",
    "CNI_IFNAME": "eth0",
    "CNI_ARGS": "K8S_POD_NAMESPACE=web;K8S_POD_NAME=web-1",
    "CNI_PATH": "/opt/cni/bin",
}
"""Values that satisfy every verb."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The CNI error that the caller sees, to the letter."""

    msg: str
    details: str = ""
    code: int = INVALID_ENVIRONMENT


ACCEPTED: Final = None
Outcome = Refusal | None


@dataclass(frozen=True, slots=True)
class Difference:
    """A deviating outcome of one implementation."""

    outcome: Outcome
    why: str


@dataclass(frozen=True, slots=True)
class Case:
    """One set of variables and what becomes of it."""

    name: str
    verb: str | None
    """CNI_COMMAND; None: not set."""
    changes: Mapping[str, str | None]
    """Against VARIABLES; None: not set."""
    outcome: Outcome
    but: Mapping[Implementation, Difference] = field(default_factory=dict)
    broken_configuration: bool = False
    """The configuration is broken as well: the variables are looked at first."""

    @property
    def environ(self) -> dict[str, str]:
        """All variables that are set."""
        given: dict[str, str | None] = {"CNI_COMMAND": self.verb, **VARIABLES, **self.changes}
        return {name: value for name, value in given.items() if value is not None}

    def expected(self, implementation: Implementation) -> Outcome:
        """Return the outcome that the implementation has for this request."""
        return self.but[implementation].outcome if implementation in self.but else self.outcome


# --- missing variables -----------------------------------------------------------------------------------------------

NEEDED_BY: Final[dict[str, tuple[str, ...]]] = {
    "CNI_CONTAINERID": CONTAINER_VERBS,
    "CNI_NETNS": ("ADD", "CHECK"),
    "CNI_IFNAME": CONTAINER_VERBS,
    "CNI_PATH": VERBS,
    "CNI_ARGS": (),
}
"""In the order in which missing ones are named."""

DAEMON_DIFFERS: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "CNI_IFNAME": ((), "upstream's daemon takes eth0 where a client sends none, and so does ours"),
    "CNI_PATH": ((), "the daemon has plugin directories of its own"),
    "CNI_ARGS": (("ADD", "CHECK"), "the daemon works for pods, which CNI_ARGS name; another plugin can do without"),
}


def _missing(verb: str, needed_by: Mapping[str, tuple[str, ...]], absent: Mapping[str, object]) -> Outcome:
    names = [name for name, verbs in needed_by.items() if name in absent and verb in verbs]
    return Refusal(f"required env variables [{','.join(names)}] missing") if names else ACCEPTED


def _without(verb: str, absent: Mapping[str, str | None], name: str) -> Case:
    """Variables that are not there or empty, which is the same."""
    outcome = _missing(verb, NEEDED_BY, absent)
    in_daemon = _missing(verb, NEEDED_BY | {key: verbs for key, (verbs, _) in DAEMON_DIFFERS.items()}, absent)
    why = "; ".join(reason for key, (_, reason) in DAEMON_DIFFERS.items() if key in absent)
    return Case(name, verb, absent, outcome, {} if in_daemon == outcome else {"wire": Difference(in_daemon, why)})


def _missing_variables() -> Iterator[Case]:
    for verb in VERBS:
        for variable in NEEDED_BY:
            yield _without(verb, {variable: None}, f"{verb} without {variable}")
            yield _without(verb, {variable: ""}, f"{verb} with an empty {variable}")
        yield _without(verb, dict.fromkeys(VARIABLES), f"{verb} without any")
        yield _without(verb, dict.fromkeys(VARIABLES, ""), f"{verb} with all empty")
        yield Case(f"{verb} with all", verb, {}, ACCEPTED)


# --- bad values ------------------------------------------------------------------------------------------------------

BAD_CONTAINER_IDS: Final = ("../../etc", "a b", "_a", ".a", "-a", "a\n", "a<&>", "é")

_LONG: Final = ("interface name is too long", "interface name should be less than 16 characters")
_DOTS: Final = ("interface name is . or ..", "")
_CHARACTERS: Final = ("interface name contains / or : or whitespace characters", "")
_PERCENT: Final = ("interface name contains %, which the kernel replaces with a number", "")
BAD_INTERFACES: Final = {
    "x" * 16: _LONG,
    "é" * 8: _LONG,  # 16 bytes
    ".": _DOTS,
    "..": _DOTS,
    "a/b": _CHARACTERS,
    "e:0": _CHARACTERS,
    "a b": _CHARACTERS,
    "a\u3000b": _CHARACTERS,
    "a\u0085": _CHARACTERS,
    "%/": _CHARACTERS,
    "net%d": _PERCENT,
    "100%": _PERCENT,
}
GOOD_INTERFACES: Final = ("x" * 15, "eth0.100", "é" * 7, "a\u200bb")

_NO_POD: Final = "CNI_ARGS must name the pod"
BAD_ARGS: Final = {
    "nonsense": ("CNI_ARGS: an item is not of the form KEY=value", "'nonsense'"),
    "K8S_POD_NAME=a": ("missing K8S_POD_NAMESPACE", _NO_POD),
    "K8S_POD_NAMESPACE=a;K8S_POD_NAME=": ("missing K8S_POD_NAME", _NO_POD),
    "K8S_POD_NAMESPACE=../a;K8S_POD_NAME=b": (
        "CNI_ARGS: K8S_POD_NAMESPACE is not a valid name of Kubernetes",
        "'../a'",
    ),
    "K8S_POD_NAMESPACE=a;K8S_POD_NAME=..": ("CNI_ARGS: K8S_POD_NAME is not a valid name of Kubernetes", "'..'"),
    "K8S_POD_NAMESPACE=a;K8S_POD_NAME=b;K8S_POD_UID=a/b": (
        "CNI_ARGS: K8S_POD_UID is not a valid name of Kubernetes",
        "'a/b'",
    ),
}

_SHOWN: Final = "the daemon quotes the name: its caller need not be the one that gave it"


def _bad_interface(name: str) -> tuple[Refusal, dict[Implementation, Difference]]:
    msg, details = BAD_INTERFACES[name]
    return Refusal(msg, details), {"wire": Difference(Refusal(msg, name), _SHOWN)}


def _bad_values() -> Iterator[Case]:
    for verb in CONTAINER_VERBS:
        for value in BAD_CONTAINER_IDS:
            refusal = Refusal("invalid characters in containerID", value)
            yield Case(f"{verb} with the container id {value!a}", verb, {"CNI_CONTAINERID": value}, refusal)
        yield Case(
            f"{verb} with a container id of 129 bytes",
            verb,
            {"CNI_CONTAINERID": "a" * 129},
            Refusal("containerID is longer than 128 bytes", "a" * 129),
            {"shim": Difference(ACCEPTED, "the limit is that of file names, and the shim makes none of it")},
        )
        yield Case(f"{verb} with a container id of 128 bytes", verb, {"CNI_CONTAINERID": "a" * 128}, ACCEPTED)
        for name in BAD_INTERFACES:
            yield Case(f"{verb} with the interface {name!a}", verb, {"CNI_IFNAME": name}, *_bad_interface(name))
        for name in GOOD_INTERFACES:
            yield Case(f"{verb} with the interface {name!a}", verb, {"CNI_IFNAME": name}, ACCEPTED)
        for text, error in BAD_ARGS.items():
            why = "only the daemon reads CNI_ARGS, and a DEL goes by what the ADD left"
            but: dict[Implementation, Difference] = {} if verb == "DEL" else {"wire": Difference(Refusal(*error), why)}
            yield Case(f"{verb} with the arguments {text}", verb, {"CNI_ARGS": text}, ACCEPTED, but)
    for verb in VERBS:
        why = "the daemon says it before it works, the others leave it to whoever opens the path; a DEL needs none"
        relative = Refusal("CNI_NETNS is not an absolute path", "'netns/a'")
        but = {"wire": Difference(relative, why)} if verb == "ADD" else {}
        yield Case(f"{verb} with a relative CNI_NETNS", verb, {"CNI_NETNS": "netns/a"}, ACCEPTED, but)
    for verb in NODE_VERBS:
        bad: dict[str, str | None] = {"CNI_CONTAINERID": "a b", "CNI_IFNAME": "..", "CNI_ARGS": "nonsense"}
        yield Case(f"{verb} looks at nothing that it does not need", verb, bad, ACCEPTED)


# --- verbs, and what comes first -------------------------------------------------------------------------------------


def _verbs() -> Iterator[Case]:
    known = "known are ADD, CHECK, DEL, GC and STATUS"
    for verb in ("FROB", "add", "FR<B"):
        refusal = Refusal(f"unknown CNI_COMMAND: {verb}")
        but: dict[Implementation, Difference] = {
            "wire": Difference(Refusal(refusal.msg, known), "a client's author reads the details, a runtime's user not")
        }
        yield Case(f"the verb {verb}", verb, {}, refusal, but)
        yield Case(f"the verb {verb} needs no variables", verb, dict.fromkeys(VARIABLES), refusal, but)
    why = "VERSION needs no daemon: clients answer it"
    unknown = Refusal("unknown CNI_COMMAND: VERSION", known)
    yield Case("VERSION", "VERSION", dict.fromkeys(VARIABLES), ACCEPTED, {"wire": Difference(unknown, why)})
    by_hand = Difference(ACCEPTED, "somebody calls it by hand: it says what it is")
    for name, verb_given in (("no verb", None), ("an empty verb", "")):
        yield Case(name, verb_given, {}, Refusal("required env variables [CNI_COMMAND] missing"), {"shim": by_hand})


def _order() -> Iterator[Case]:
    """Each is wrong in that way and in every later one."""
    refusal, but = _bad_interface("e:0")
    invalid = Refusal("invalid characters in containerID", "a b")
    missing = Refusal("required env variables [CNI_CONTAINERID] missing")
    orders: tuple[tuple[str, dict[str, str | None], Refusal, dict[Implementation, Difference]], ...] = (
        ("a bad value before missing ones", {"CNI_NETNS": None, "CNI_IFNAME": "e:0", "CNI_PATH": None}, refusal, but),
        ("the container id before the interface", {"CNI_CONTAINERID": "a b", "CNI_IFNAME": "e:0"}, invalid, {}),
        ("the variables before the configuration", {"CNI_CONTAINERID": None}, missing, {}),
    )
    for verb in CONTAINER_VERBS:
        for name, changes, refusal, but in orders:
            yield Case(f"{verb}: {name}", verb, changes, refusal, but, broken_configuration=True)


CASES: Final = (*_missing_variables(), *_bad_values(), *_verbs(), *_order())
