"""`multus-builtin` as a process: what the tests of its main function (`tests/unit/test_plugin.py`) cannot see."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRON = {
    "CNI_COMMAND": "ADD",
    "CNI_CONTAINERID": "c1",
    "CNI_NETNS": "/nowhere",
    "CNI_IFNAME": "eth0",
    "CNI_PATH": "/nowhere",
}


def call(*argv, stdin=None, arg0=None, **changes):
    """Run the program; the variables are ENVIRON with `changes`, None removes one."""
    environ = {key: value for key, value in {**ENVIRON, **changes}.items() if value is not None}
    program = [sys.executable, "-m", "multus_tools.builtin"]
    if arg0 is not None:
        code = f"import sys; sys.argv[0] = {arg0!r}; from multus_tools.builtin import main; main()"
        program = [sys.executable, "-c", code]
    given = json.dumps(stdin).encode()
    return subprocess.run([*program, *argv], input=given, env=environ, cwd=ROOT, capture_output=True, timeout=30)


def network(tmp_path, **fields):
    ipam = {"type": "host-local", "dataDir": str(tmp_path), "subnet": "10.0.0.0/24"}
    return {"cniVersion": "1.0.0", "name": "net", "type": "ptp", "ipam": ipam, **fields}


def test_a_link_named_after_the_plugin(tmp_path):
    done = call(arg0="/opt/cni/bin/host-local", stdin=network(tmp_path))
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["ips"][0]["address"] == "10.0.0.2/24"


def test_an_error_is_on_stdout_alone(tmp_path):
    done = call("host-local", stdin=network(tmp_path), CNI_PATH=None)
    assert (done.returncode, done.stderr) == (1, b"")
    assert json.loads(done.stdout) == {"code": 4, "msg": "required env variables [CNI_PATH] missing"}


def test_a_wrong_command_line():
    done = call("no-such")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"usage: multus-builtin TYPE")


def test_version_does_not_read_stdin():
    read, write = os.pipe()
    try:
        # Nothing ever comes through the pipe: reading it would never end.
        done = subprocess.run(
            [sys.executable, "-m", "multus_tools.builtin", "ptp"],
            stdin=read,
            env={"CNI_COMMAND": "VERSION"},
            cwd=ROOT,
            capture_output=True,
            timeout=30,
        )
    finally:
        os.close(read)
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b'{"cniVersion"')


def test_a_binary_in_cni_path_is_called_for_ipam(tmp_path):
    """ptp delegates to what the caller has put into CNI_PATH, and to the built-in where there is nothing."""
    binary = tmp_path / "host-local"
    binary.write_text(
        "#!/bin/sh\ncat >/dev/null\n"
        'echo "{\\"code\\": 123, \\"msg\\": \\"the binary: $CNI_COMMAND $CNI_CONTAINERID\\"}"\nexit 1\n'
    )
    binary.chmod(0o755)
    done = call("ptp", stdin=network(tmp_path), CNI_PATH=str(tmp_path), CNI_COMMAND="DEL", CNI_NETNS=None)
    assert (done.returncode, done.stderr) == (1, b"")
    error = json.loads(done.stdout)
    # The format of the Go library: 4 spaces, no newline at the end, no cniVersion.
    assert done.stdout.decode() == json.dumps(error, indent=4)
    assert (error["code"], error["msg"]) == (123, "the binary: DEL c1")
    binary.unlink()
    done = call("ptp", stdin=network(tmp_path), CNI_PATH=str(tmp_path), CNI_COMMAND="DEL", CNI_NETNS=None)
    assert (done.returncode, done.stdout) == (0, b"")
    assert (tmp_path / "net" / "lock").exists()


def test_start_is_light():
    code = "import sys, multus_tools.builtin; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, timeout=30)
    loaded = set(done.stdout.decode().split())
    assert "multus_daemon" in loaded
    assert not loaded & {"aiohttp", "prometheus_client", "yaml", "rich", "pyroute2"}
