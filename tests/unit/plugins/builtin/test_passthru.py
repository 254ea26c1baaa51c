"""`passthru`, in this process and as a command."""

import json
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.plugins.builtin.registry import Builtin
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import result, versions
from multus_daemon.spec.cni.result import Result
from tests.calls import run

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
    config = {"name": "chain", "type": "passthru"} | fields
    return Invocation(verb, "c1", "/run/netns/none", "eth0", "", "/none", config)


@pytest.mark.parametrize("version", versions.SUPPORTED)
def test_add_answers_nothing_in_every_version(tmp_path: Path, version: str) -> None:
    found = run(Builtin("passthru", tmp_path), invocation("ADD", cniVersion=version))
    assert found == Result()
    assert json.loads(result.empty_stdout(version)) == EMPTY[version]


@pytest.mark.parametrize("version", PREVIOUS)
def test_it_does_not_pass_on_what_it_gets(tmp_path: Path, version: str) -> None:
    given = invocation("ADD", cniVersion=version, prevResult=PREVIOUS[version])
    assert run(Builtin("passthru", tmp_path), given) == Result()


@pytest.mark.parametrize("verb", ["DEL", "CHECK", "STATUS", "GC"])
def test_the_other_verbs_do_nothing(tmp_path: Path, verb: str) -> None:
    assert run(Builtin("passthru", tmp_path), invocation(verb, cniVersion="1.1.0")) == Result()
