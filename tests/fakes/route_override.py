#!/usr/bin/python3 -IS
"""A chained plugin that changes the routes of the plugins before it, as route-override does.

Keys of its configuration: `delroutes`, a list of {"dst": ...}, and `addroutes`, a list of {"dst": ..., "gw": ...}. With
`keepresult` it hands on the result as it came, although the routes are other ones; route-override does not. Its CHECK
has the faults of route-override's: a deleted route must not be reachable by any other, and there is one gateway.
"""

import ipaddress
import json
import os
import subprocess
import sys
from typing import Any


def ip(family: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    command = ["ip", "-n", os.path.basename(os.environ["CNI_NETNS"]), family, "-j", *words]
    return subprocess.run(command, capture_output=True, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})


def family_of(route: dict[str, str]) -> str:
    return f"-{ipaddress.ip_network(route['dst']).version}"


def fail(msg: str) -> None:
    print(json.dumps({"code": 999, "msg": msg}))
    sys.exit(1)


def add(config: dict[str, Any], result: dict[str, Any]) -> None:
    deleted = config.get("delroutes", [])
    for route in deleted:
        ip(family_of(route), "route", "delete", route["dst"])
    for route in config.get("addroutes", []):
        ip(family_of(route), "route", "add", route["dst"], "via", route["gw"], "dev", os.environ["CNI_IFNAME"])
    if not config.get("keepresult"):
        gone = {route["dst"] for route in deleted}
        kept = [route for route in result.get("routes", []) if route["dst"] not in gone]
        result["routes"] = kept + config.get("addroutes", [])
    print(json.dumps(result))


def check(config: dict[str, Any], result: dict[str, Any]) -> None:
    for route in config.get("delroutes", []):
        if ip(family_of(route), "route", "get", route["dst"].partition("/")[0]).returncode == 0:
            fail(f"route-override: route is not removed: {route}")
    gateways = {address.get("gateway") for address in result.get("ips", [])}
    for route in result.get("routes", []):
        found = json.loads(ip(family_of(route), "route", "get", route["dst"].partition("/")[0]).stdout or b"[]")
        via = found[0].get("gateway") if found else None
        if route.get("gw", via) != via or via not in gateways | {route.get("gw")}:
            fail(f"route-override: failed to match route: {route} {via}")


def main() -> None:
    config = json.load(sys.stdin)
    verb = os.environ["CNI_COMMAND"]
    if verb in ("ADD", "CHECK"):
        (add if verb == "ADD" else check)(config, config["prevResult"])


main()
