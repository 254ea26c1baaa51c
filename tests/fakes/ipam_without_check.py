#!/usr/bin/python3 -IS
"""An IPAM plugin that answers CHECK as whereabouts does. It gives the `addresses` and `routes` of its configuration."""

import json
import os
import sys


def main() -> None:
    config = json.load(sys.stdin)
    version, ipam = config["cniVersion"], config["ipam"]
    if os.environ["CNI_COMMAND"] == "CHECK":
        print(json.dumps({"code": 999, "msg": "CNI CHECK method is not implemented"}))
        sys.exit(1)
    if os.environ["CNI_COMMAND"] == "ADD":
        family = {"version": "4"} if version < "1" else {}
        ips = [address | family for address in ipam["addresses"]]
        print(json.dumps({"cniVersion": version, "ips": ips, "routes": ipam["routes"]}))


main()
