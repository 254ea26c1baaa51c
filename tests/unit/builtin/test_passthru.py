"""`passthru`, in this process and as a command."""

import json
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.builtin.runner import BuiltinRunner
from multus_daemon.cni import versions
from multus_daemon.ports import Invocation

# Results of CNI SPEC 0.1.0 to 1.1.0 that say nothing: libraries print `dns` in 0.x always, in 1.x never when empty.
EMPTY: dict[str, dict[str, Any]] = {
    version: {"cniVersion": version} | ({} if version.startswith("1.") else {"dns": {}})
    for version in versions.SUPPORTED
}
PREVIOUS = {
    "0.1.0": {"ip4": {"ip": "10.0.0.2/24"}},
    "1.0.0": {"ips": [{"address": "10.0.0.2/24"}]},
}


def invocation(verb: str, **fields: object) -> Invocation:
    stdin = json.dumps({"name": "chain", "type": "passthru"} | fields).encode()
    return Invocation(verb, "c1", "/run/netns/none", "eth0", "", "/none", stdin)


@pytest.mark.parametrize("version", versions.SUPPORTED)
async def test_add_answers_nothing_in_every_version(tmp_path: Path, version: str) -> None:
    printed = await BuiltinRunner(tmp_path).run("passthru", invocation("ADD", cniVersion=version))
    assert json.loads(printed) == EMPTY[version]


@pytest.mark.parametrize("version", PREVIOUS)
async def test_it_does_not_pass_on_what_it_gets(tmp_path: Path, version: str) -> None:
    given = invocation("ADD", cniVersion=version, prevResult=PREVIOUS[version])
    assert json.loads(await BuiltinRunner(tmp_path).run("passthru", given)) == EMPTY[version]


@pytest.mark.parametrize("verb", ["DEL", "CHECK", "STATUS", "GC"])
async def test_the_other_verbs_do_nothing(tmp_path: Path, verb: str) -> None:
    assert await BuiltinRunner(tmp_path).run("passthru", invocation(verb, cniVersion="1.1.0")) == b""
