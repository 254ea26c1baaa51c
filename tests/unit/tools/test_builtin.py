"""`multus-builtin` as a runtime sees it: a program with variables, standard input, output and an exit status.

Here its main function, in this process; `tests/contract/test_builtin_program.py` runs the program, and
`tests/spec/test_requests.py` the table of its variables.
"""

import contextvars
import io
import json
from dataclasses import dataclass

import pytest

from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import versions
from multus_tools import builtin

ENVIRON = {
    "CNI_COMMAND": "ADD",
    "CNI_CONTAINERID": "c1",
    "CNI_NETNS": "/nowhere",
    "CNI_IFNAME": "eth0",
    "CNI_PATH": "/nowhere",
}


@dataclass(frozen=True)
class Done:
    """Outcome of a call."""

    returncode: int
    stdout: bytes
    stderr: bytes


def call(*argv, stdin=b"", arg0="/usr/bin/multus-builtin", **changes):
    """Run the command in this process; the variables are ENVIRON with `changes`, None removes one.

    `stdin`: a stream, bytes, or what becomes JSON.
    """
    environ = {key: value for key, value in {**ENVIRON, **changes}.items() if value is not None}
    if not hasattr(stdin, "read"):
        stdin = io.BytesIO(stdin if isinstance(stdin, bytes) else json.dumps(stdin).encode())
    stdout, stderr = io.BytesIO(), io.BytesIO()
    # In a context of its own, as in a process: whether the own namespace is allowed is said to no other test.
    status = contextvars.copy_context().run(builtin.run, [arg0, *argv], environ, stdin, stdout, stderr)
    return Done(status, stdout.getvalue(), stderr.getvalue())


def network(tmp_path, **fields):
    ipam = {"type": "host-local", "dataDir": str(tmp_path), "subnet": "10.0.0.0/24"}
    return {"cniVersion": "1.0.0", "name": "net", "type": "ptp", "ipam": ipam, **fields}


def error_of(done):
    assert done.returncode == 1
    assert done.stderr == b""
    error = json.loads(done.stdout)
    # The format of the Go library: 4 spaces, no newline at the end, no cniVersion.
    assert done.stdout.decode() == json.dumps(error, indent=4)
    return error["code"], error["msg"], error.get("details", "")


def test_add_and_del(tmp_path):
    done = call("host-local", stdin=network(tmp_path))
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == json.dumps(
        {"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.2/24", "gateway": "10.0.0.1"}]}, indent=4
    )
    assert (tmp_path / "net" / "10.0.0.2").read_bytes() == b"c1\r\neth0"
    done = call("host-local", stdin=network(tmp_path), CNI_COMMAND="DEL", CNI_NETNS=None)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert not (tmp_path / "net" / "10.0.0.2").exists()


@pytest.mark.parametrize("version", versions.SUPPORTED)
def test_a_plugin_that_has_nothing_to_say_says_so_in_every_version(version):
    # Libraries print `dns` in 0.x always, in 1.x never when empty; 0.1.0 and 0.2.0 have no result without an address.
    expected = {"cniVersion": version} | ({} if version.startswith("1.") else {"dns": {}})
    done = call("passthru", stdin={"cniVersion": version, "name": "net"})
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, json.dumps(expected, indent=4), b"")


def test_the_implied_version_is_printed(tmp_path):
    done = call("host-local", stdin=network(tmp_path, cniVersion=""))
    assert json.loads(done.stdout) == {
        "cniVersion": "0.1.0",
        "ip4": {"ip": "10.0.0.2/24", "gateway": "10.0.0.1"},
        "dns": {},
    }


@pytest.mark.parametrize("verb", ["DEL", "CHECK", "STATUS", "GC"])
def test_verbs_without_output_print_none(verb):
    done = call("passthru", stdin={"cniVersion": "1.1.0", "name": "net"}, CNI_COMMAND=verb)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("command", [None, ""])
def test_without_a_verb_it_tells_about_itself(command):
    done = call("ptp", CNI_COMMAND=command)
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr.startswith(b"CNI ptp plugin version ")
    assert done.stderr.endswith(b"CNI protocol versions supported: 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0\n")


CONFIG = {"cniVersion": "1.1.0", "name": "net"}


@pytest.mark.parametrize(
    ("changes", "stdin", "error"),
    [
        ({"CNI_PATH": None}, CONFIG, (4, "required env variables [CNI_PATH] missing", "")),
        ({"CNI_COMMAND": "FOO"}, b"", (6, "error unmarshall network config: unexpected end of JSON input", "")),
        ({"CNI_COMMAND": "FOO", "CNI_PATH": None}, CONFIG, (4, "unknown CNI_COMMAND: FOO", "")),
        ({}, {"name": "a/b"}, (7, "invalid characters found in network name", "a/b")),
        ({}, {"cniVersion": "1.0.0"}, (7, "missing network name", "")),
        ({}, CONFIG, (7, "IPAM config missing 'ipam' key", "")),
        ({"CNI_NETNS": "/proc/self/ns/net"}, {"name": ""}, (7, "missing network name", "")),
    ],
)
def test_errors(changes, stdin, error):
    assert error_of(call("host-local", stdin=stdin, **changes)) == error


@pytest.mark.parametrize("verb", ["ADD", "DEL"])
def test_the_plugins_own_network_namespace_is_refused_before_anything_is_done(tmp_path, verb):
    done = call("host-local", stdin=network(tmp_path), CNI_COMMAND=verb, CNI_NETNS="/proc/self/ns/net")
    message = "plugin's netns and netns from CNI_NETNS should not be the same"
    assert error_of(done) == (8, message, "/proc/self/ns/net")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("override", ["1", "true", "TRUE"])
def test_the_refusal_can_be_switched_off(tmp_path, override):
    done = call("host-local", stdin=network(tmp_path), CNI_NETNS="/proc/self/ns/net", CNI_NETNS_OVERRIDE=override)
    assert done.returncode == 0


def test_check_does_not_mind_the_namespace(tmp_path):
    done = call("host-local", stdin=network(tmp_path), CNI_COMMAND="CHECK", CNI_NETNS="/proc/self/ns/net")
    assert error_of(done) == (999, "host-local: Failed to find address added by container c1", "")


def test_too_much_stdin(tmp_path):
    stdin = b'{"name":"n","x":"' + b"x" * builtin.STDIN_MAX_BYTES + b'"}'
    code, message, _ = error_of(call("host-local", stdin=stdin))
    assert (code, message) == (5, "error reading from stdin: more than 16777216 bytes")


def test_the_versions_are_one_line():
    assert builtin.VERSION_STDOUT == (
        b'{"cniVersion":"1.1.0","supportedVersions":["0.1.0","0.2.0","0.3.0","0.3.1","0.4.0","1.0.0","1.1.0"]}\n'
    )


def test_environment_values():
    found = Invocation(**builtin.environment({**ENVIRON, "CNI_ARGS": "A=b", "CNI_NETNS_OVERRIDE": "yes"}), fields={})
    assert found == Invocation("ADD", "c1", "/nowhere", "eth0", "A=b", "/nowhere", {})
