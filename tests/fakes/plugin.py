#!/usr/bin/python3 -IS
"""A real plugin binary that does as it is told; the tests install copies of it as executables.

It is told by the key `steer` of its configuration, an object by verb: {"ADD": {"stdout": "...", "exit": 1}}; without
an entry for the verb it succeeds, with an empty result for ADD. Keys, done in this order:

`stderr`  text to write there
`ignore`  ["TERM"]: signals to ignore
`tidy`    on SIGTERM: sleep so many seconds, then write `record` + ".tidy" and end
`record`  file that gets one JSON line: argv, env, stdin, cwd, pid
`child`   "holds-pipes": leaves a grandchild that sleeps with stdout open; its pid goes to `record` + ".child";
          "detached": the same with a session of its own; "quiet": with its pipes closed; "daemon": detached and
          quiet, its parent has ended; "daemon-on-term": the same when it gets SIGTERM
`hang`    seconds to sleep
`signal`  signal number to end itself with
`flood`   bytes to write to stdout
`stdout`  text to print, `exit` status to end with
"""

import json
import os
import signal
import sys
import time


def main() -> None:
    data = sys.stdin.buffer.read()
    try:
        config = json.loads(data)
    except ValueError:
        config = {}
    verb = os.environ.get("CNI_COMMAND", "")
    steer = config.get("steer", {}).get(verb, {})
    if "stderr" in steer:
        os.write(2, steer["stderr"].encode())
    for name in steer.get("ignore", ()):
        signal.signal(getattr(signal, "SIG" + name), signal.SIG_IGN)
    if "tidy" in steer:
        signal.signal(signal.SIGTERM, lambda number, frame: tidy(steer["tidy"], steer["record"] + ".tidy"))
    if "record" in steer:
        call = {
            "argv": sys.argv,
            "env": dict(os.environ),
            "stdin": data.decode(),
            "cwd": os.getcwd(),
            "pid": os.getpid(),
            "fds": sorted(int(name) for name in os.listdir("/proc/self/fd")),
        }
        with open(steer["record"], "a") as file:
            file.write(json.dumps(call) + "\n")
    child = steer.get("child")
    if child == "daemon-on-term":
        signal.signal(signal.SIGTERM, lambda number, frame: leave_child("daemon", steer["record"] + ".child"))
    elif child:
        leave_child(child, steer["record"] + ".child")
    if "hang" in steer:
        end = time.monotonic() + steer["hang"]
        while time.monotonic() < end:
            time.sleep(0.1)
    if "signal" in steer:
        os.kill(os.getpid(), steer["signal"])
    left = steer.get("flood", 0)
    while left > 0:
        left -= os.write(1, b"x" * min(left, 1 << 16))
    text = steer.get("stdout", "{}" if verb == "ADD" else "")
    os.write(1, text.encode())
    # Not sys.exit: nothing of Python's own must come between.
    os._exit(steer.get("exit", 0))


def tidy(seconds: float, path: str) -> None:
    time.sleep(seconds)
    with open(path, "w") as file:
        file.write("done")
    os._exit(1)


def leave_child(kind: str, path: str) -> None:
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        if kind in ("detached", "daemon"):
            os.setsid()
        if kind == "daemon" and os.fork():
            os._exit(0)
        if kind in ("quiet", "daemon"):
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
        os.write(done, str(os.getpid()).encode())
        time.sleep(60)
        os._exit(0)
    if kind == "daemon":
        os.waitpid(pid, 0)
    with open(path, "w") as file:
        file.write(os.read(ready, 20).decode())


main()
