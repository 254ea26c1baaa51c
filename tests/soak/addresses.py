"""Worlds of nodes that share addresses (tests.fakes.address_world): 10,000 seeds, on all processors.

python -m tests.soak.addresses [--seeds N] [--first N] [--steps N]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import os
import sys
import time

from tests.fakes import address_world


def outcome(seed: int, steps: int) -> str:
    """What a world has broken; empty if nothing."""
    try:
        address_world.run(seed, steps=steps)
    except AssertionError as error:
        return str(error)
    except Exception as error:
        return f"seed {seed}: {type(error).__name__}: {error}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    began, seeds = time.monotonic(), range(options.first, options.first + options.seeds)
    with concurrent.futures.ProcessPoolExecutor(options.processes) as pool:
        work = functools.partial(outcome, steps=options.steps)
        broken = [text for text in pool.map(work, seeds, chunksize=20) if text]
    for text in broken[:20]:
        print(text)
    print(f"{len(seeds)} worlds in {time.monotonic() - began:.0f} s, {len(broken)} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
