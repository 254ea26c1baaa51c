"""Upper limits of the figures: one table, by bench and by the figure's key.

A figure without an aim is recorded and shown, but not judged. `bare` is the reference ptp and host-local,
started directly, for a pod with ONE network and no Multus at all, whatever the number of networks on our side.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Aim(NamedTuple):
    """The most that a figure should be, in the figure's unit, and what the figure is."""

    limit: float
    text: str


_PEER = {
    f"{verb} {size} ours/peer": Aim(limits[size], f"{verb}, {more}, against upstream")
    for verb, limits in (("ADD", {0: 0.38, 1: 0.30, 4: 0.20}), ("DEL", {0: 0.65, 1: 0.55, 4: 0.35}))
    for size, more in ((0, "cluster network only"), (1, "1 more network"), (4, "4 more networks"))
}

AIMS: Final[dict[str, dict[str, Aim]]] = {
    "verbs": {
        # Faster with Multus than the plugin is without it.
        "ADD 0 ours/bare": Aim(0.75, "ADD, cluster network only, against bare"),
        "ADD 1 ours/bare": Aim(1.0, "ADD, 1 more network, against bare"),
        "ADD 4 ours/bare": Aim(1.8, "ADD, 4 more networks, against bare"),
        "ADD 16 ours/bare": Aim(6.0, "ADD, 16 more networks, against bare"),
        "DEL 0 ours/bare": Aim(0.9, "DEL, cluster network only, against bare"),
        "DEL 4 ours/bare": Aim(1.5, "DEL, 4 more networks, against bare"),
        "ADD dual ours/ADD 0 ours": Aim(1.3, "ADD, dual-stack ptp, against IPv4 only"),
        "processor 0 ours/base": Aim(0.45, "processor time, cluster network only, against `base`"),
        "processor 4 ours/base": Aim(0.45, "processor time, 4 more networks, against `base`"),
        "ADD 0 ours": Aim(10.0, "ADD, cluster network only"),
        # Networks of a pod are attached together.
        "ADD 4 ours/ADD 1 ours": Aim(2.0, "ADD, 4 more networks against 1 more, built-in"),
        "ADD 4 binaries/ADD 1 binaries": Aim(2.0, "ADD, 4 more networks against 1 more, binaries"),
    },
    "chains": {
        # With nothing to do, portmap and bandwidth cost nothing.
        **{
            f"{verb} full ours/{other}": Aim(limit, f"{verb}, `[ptp, portmap, bandwidth]`, against {text}")
            for other, limit, text in (
                ("ptp ours", 1.05, "`[ptp]`"),
                ("bare", 0.40, "the list without Multus"),
                ("peer", 0.20, "upstream with the list"),
            )
            for verb in ("ADD", "DEL")
        },
        "ADD port ours/bare": Aim(0.35, "ADD, `[ptp, portmap]` and a host port, against the list without Multus"),
        "DEL port ours/bare": Aim(0.35, "DEL, `[ptp, portmap]` and a host port, against the list without Multus"),
        "time per pod full networks 16 at a time ours/peer": Aim(
            0.20, "time for a pod of `[ptp, portmap, bandwidth]`, 16 at a time, against upstream"
        ),
    },
    "peer": {
        **_PEER,
        "requests ours": Aim(2.0, "requests to the API server for ADD and DEL, 1 more network"),
        "start ours": Aim(0.7, "exec to serving"),
    },
    "burst": {
        # 2.8 times as many pods a second.
        "time per pod 0 networks 16 at a time ours/peer": Aim(0.36, "time for a pod, 16 at a time, against upstream"),
    },
    "memory": {
        "idle ours": Aim(45.0, "anonymous memory, idle"),
        "after pods ours": Aim(48.0, "anonymous memory, after many pods"),
    },
    "density": {
        "sandbox at 1 ours/peer": Aim(0.8, "sandbox with its networks, one pod a second, against upstream"),
        "processor start at 10 ours/peer": Aim(0.6, "processor time of the daemon, start of a pod, against upstream"),
        "most at 10 ours": Aim(64.0, "anonymous memory, most while 128 pods start"),
    },
    "growth": {
        "leases ADD 10000/10": Aim(1.2, "ADD with 10,000 leases in the network, against 10"),
        "attachments ADD 250/0": Aim(1.1, "ADD with 250 pods attached, against none"),
        "networks ADD 5000/0": Aim(1.1, "ADD with 5,000 networks declared, against none"),
    },
    "asking": {
        "ADD 1 at a time asked/quiet": Aim(1.05, "ADD, 1 at a time, while `multusctl` asks, against without"),
        "ADD 16 at a time asked/quiet": Aim(1.05, "ADD, 16 at a time, while `multusctl` asks, against without"),
    },
    "shim": {"ours time": Aim(2.0, "the shim alone, start to exit")},
}
