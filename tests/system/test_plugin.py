"""`multus-builtin` as a runtime sees it: a program with variables, standard input, output and an exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from multus_daemon import plugin
from multus_daemon.builtin.runner import PLUGINS
from multus_daemon.cni import skel
from multus_daemon.cni.errors import CniError

ROOT = Path(__file__).parents[2]
VERSIONS = '{"cniVersion":"1.1.0","supportedVersions":["0.1.0","0.2.0","0.3.0","0.3.1","0.4.0","1.0.0","1.1.0"]}\n'
ENVIRON = {
    "CNI_COMMAND": "ADD",
    "CNI_CONTAINERID": "c1",
    "CNI_NETNS": "/nowhere",
    "CNI_IFNAME": "eth0",
    "CNI_PATH": "/nowhere",
}


def call(*argv, stdin=b"", arg0=None, **changes):
    """Run the command; the variables are ENVIRON with `changes`, None removes one."""
    environ = {key: value for key, value in {**ENVIRON, **changes}.items() if value is not None}
    program = [sys.executable, "-m", "multus_daemon.plugin"]
    if arg0 is not None:
        code = f"import sys; sys.argv[0] = {arg0!r}; from multus_daemon.plugin import main; main()"
        program = [sys.executable, "-c", code]
    if not isinstance(stdin, bytes):
        stdin = json.dumps(stdin).encode()
    return subprocess.run([*program, *argv], input=stdin, env=environ, cwd=ROOT, capture_output=True, timeout=30)


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


def test_a_link_named_after_the_plugin(tmp_path):
    done = call(arg0="/opt/cni/bin/host-local", stdin=network(tmp_path))
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["ips"][0]["address"] == "10.0.0.2/24"


@pytest.mark.parametrize("plugin_type", sorted(PLUGINS))
def test_version_does_not_read_stdin(plugin_type):
    read, write = os.pipe()
    try:
        # Nothing ever comes through the pipe: reading it would never end.
        done = subprocess.run(
            [sys.executable, "-m", "multus_daemon.plugin", plugin_type],
            stdin=read,
            env={"CNI_COMMAND": "VERSION"},
            cwd=ROOT,
            capture_output=True,
            timeout=30,
        )
    finally:
        os.close(read)
        os.close(write)
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, VERSIONS, b"")


@pytest.mark.parametrize("command", [None, ""])
def test_without_a_verb_it_tells_about_itself(command):
    done = call("ptp", CNI_COMMAND=command)
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr.startswith(b"CNI ptp plugin version ")
    assert done.stderr.endswith(b"CNI protocol versions supported: 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0\n")


@pytest.mark.parametrize(("argv", "code"), [([], 2), (["no-such"], 2), (["ptp", "more"], 2), (["--help"], 0)])
def test_usage(argv, code):
    done = call(*argv)
    assert (done.returncode, done.stdout) == (code, b"")
    assert done.stderr.startswith(b"usage: multus-builtin TYPE")


CONFIG = {"cniVersion": "1.1.0", "name": "net"}


@pytest.mark.parametrize(
    ("changes", "stdin", "error"),
    [
        ({"CNI_PATH": None}, CONFIG, (4, "required env variables [CNI_PATH] missing", "")),
        ({"CNI_COMMAND": "FOO"}, b"", (6, "error unmarshall network config: unexpected end of JSON input", "")),
        ({"CNI_COMMAND": "FOO", "CNI_PATH": None}, CONFIG, (4, "unknown CNI_COMMAND: FOO", "")),
        ({"CNI_COMMAND": "add"}, CONFIG, (4, "unknown CNI_COMMAND: add", "")),
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
    stdin = b'{"name":"n","x":"' + b"x" * plugin.STDIN_MAX_BYTES + b'"}'
    code, message, _ = error_of(call("host-local", stdin=stdin))
    assert (code, message) == (5, "error reading from stdin: more than 16777216 bytes")


def test_a_binary_in_cni_path_is_called_for_ipam(tmp_path):
    """ptp delegates to what the caller has put into CNI_PATH, and to the built-in where there is nothing."""
    binary = tmp_path / "host-local"
    binary.write_text(
        "#!/bin/sh\ncat >/dev/null\n"
        'echo "{\\"code\\": 123, \\"msg\\": \\"the binary: $CNI_COMMAND $CNI_CONTAINERID\\"}"\nexit 1\n'
    )
    binary.chmod(0o755)
    done = call("ptp", stdin=network(tmp_path), CNI_PATH=str(tmp_path), CNI_COMMAND="DEL", CNI_NETNS=None)
    assert error_of(done)[:2] == (123, "the binary: DEL c1")
    binary.unlink()
    done = call("ptp", stdin=network(tmp_path), CNI_PATH=str(tmp_path), CNI_COMMAND="DEL", CNI_NETNS=None)
    assert (done.returncode, done.stdout) == (0, b"")
    assert (tmp_path / "net" / "lock").exists()


def test_start_is_light():
    code = "import sys, multus_daemon.plugin; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, timeout=30)
    loaded = {name.partition(".")[0] for name in done.stdout.decode().split()}
    assert "multus_daemon" in loaded
    assert not loaded & {"aiohttp", "prometheus_client", "yaml", "rich", "pyroute2", "watchfiles"}


# --- the table of variables, without processes -----------------------------------------------------------------------

VARIABLES = ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"]
NEEDED = {
    "ADD": VARIABLES,
    "CHECK": VARIABLES,
    "DEL": ["CNI_CONTAINERID", "CNI_IFNAME", "CNI_PATH"],
    "STATUS": ["CNI_PATH"],
    "GC": ["CNI_PATH"],
    "VERSION": [],
    "FOO": [],
}


@pytest.mark.parametrize("verb", NEEDED)
def test_missing_variables_are_told_together(verb):
    needed = NEEDED[verb]
    for environ in ({}, dict.fromkeys(VARIABLES, "")):
        if not needed:
            assert skel.environment({**environ, "CNI_COMMAND": verb}).verb == verb
            continue
        with pytest.raises(CniError) as caught:
            skel.environment({**environ, "CNI_COMMAND": verb})
        assert caught.value.to_object() == {
            "code": 4,
            "msg": f"required env variables [{','.join(needed)}] missing",
        }


def test_no_verb():
    with pytest.raises(CniError, match=r"required env variables \[CNI_COMMAND\] missing"):
        skel.environment({})


@pytest.mark.parametrize(
    ("name", "value", "msg", "details"),
    [
        ("CNI_CONTAINERID", "-x", "invalid characters in containerID", "-x"),
        ("CNI_CONTAINERID", "a\n", "invalid characters in containerID", "a\n"),
        ("CNI_IFNAME", "e:0", "interface name contains / or : or whitespace characters", ""),
        ("CNI_IFNAME", "..", "interface name is . or ..", ""),
        ("CNI_IFNAME", "a" * 16, "interface name is too long", "interface name should be less than 16 characters"),
    ],
)
def test_bad_variables(name, value, msg, details):
    # A bad one is told before a missing one.
    environ = {**ENVIRON, name: value, "CNI_PATH": ""}
    for verb in ("ADD", "DEL", "CHECK"):
        with pytest.raises(CniError) as caught:
            skel.environment({**environ, "CNI_COMMAND": verb})
        assert (caught.value.code, caught.value.msg, caught.value.details) == (4, msg, details)
    # Where a verb has no use for it, it is not looked at.
    assert skel.environment({**environ, "CNI_COMMAND": "GC", "CNI_PATH": "/x"}).verb == "GC"


def test_environment_values():
    found = skel.environment({**ENVIRON, "CNI_ARGS": "A=b", "CNI_NETNS_OVERRIDE": "yes"})
    assert found == skel.Environment("ADD", "c1", "/nowhere", "eth0", "A=b", "/nowhere", netns_override=False)
