#!/usr/bin/python3 -IS
"""A plugin that needs 40 MB, the interpreter's own 8 included, holds them for half a second and makes nothing."""

import json
import sys
import time

MIB = 1024 * 1024
HELD = 32 * MIB

json.load(sys.stdin)
# Every page is written to.
memory = bytearray(b"x") * HELD
time.sleep(0.5)
print(json.dumps({"cniVersion": "1.0.0"}), flush=True)
del memory
