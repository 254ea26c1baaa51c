#!/usr/bin/python3 -IS
"""A chained plugin that passes prevResult on, or misbehaves, as chance has it: what a plugin can do to its caller.

Its configuration: `chance`, by verb, from 0 to 1, and `ways`, any of

`fail`     a CNI error
`garbage`  something that is not JSON, with the exit status of success
`crash`    ends itself with SIGSEGV
`flood`    100 MB on stdout
`hang`     sleeps for an hour, SIGTERM ignored
`hold`     succeeds, and leaves a child that keeps stdout open for an hour
"""

import json
import os
import random
import signal
import sys
import time

HOUR = 3600
MB = 1000 * 1000


def main() -> None:
    config = json.load(sys.stdin)
    verb = os.environ["CNI_COMMAND"]
    if random.random() < config["chance"].get(verb, 0):
        misbehave(random.choice(config["ways"]))
    if verb == "ADD":
        print(json.dumps({"cniVersion": config["cniVersion"], **config["prevResult"]}), flush=True)


def misbehave(way: str) -> None:
    if way == "fail":
        print(json.dumps({"cniVersion": "1.0.0", "code": 111, "msg": "no mood for it"}))
        sys.exit(1)
    if way == "garbage":
        print("\0{]")
        sys.exit(0)
    if way == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if way == "flood":
        for _ in range(100):
            os.write(1, b"x" * MB)
        sys.exit(0)
    if way == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(HOUR)
    if way == "hold" and os.fork() == 0:
        time.sleep(HOUR)


main()
