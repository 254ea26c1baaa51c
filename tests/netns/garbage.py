"""The objects that a served ADD, CHECK and DEL leave to the garbage collector, because they refer to each other.

A new process prints them as JSON: `python -m tests.netns.garbage NETNS DIRECTORY`. Under a tight memory limit the full
collections are too rare for them: a cycle holds the request's plan, record and results for minutes.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections import Counter
from pathlib import Path

from tests.fakes.cluster import WarmStore
from tests.netns.trace import POD, make_daemon, ptp
from tests.unit.api.harness import body


async def served(netns: str, directory: Path) -> Counter[str]:
    """Serve each verb twice; return the number of our objects by class that are found after the second time."""
    (directory / "run").mkdir()
    api = make_daemon(directory, WarmStore({"cluster": ptp("cluster", directory)}, POD))._api
    found: list[object] = []
    for _ in range(2):
        # Imports and caches of the first round leave garbage once.
        gc.collect()
        gc.disable()
        for verb in ("ADD", "CHECK", "DEL"):
            # CHECK gets no prevResult and fails: a failure must leave nothing either.
            await asyncio.gather(api.call(body(verb, CNI_NETNS=netns)), return_exceptions=True)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        found = [item for item in gc.garbage if type(item).__module__.startswith("multus_daemon.")]
        gc.garbage.clear()
    return Counter(f"{type(item).__module__}.{type(item).__qualname__}" for item in found)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(served(sys.argv[1], Path(sys.argv[2])))))
