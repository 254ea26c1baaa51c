"""A command in a container, as the API server lets it run."""

import asyncio

import pytest

from multus_daemon.cluster.kube.errors import ApiError, ApiUnavailableError
from multus_tools.kubectl import pod_exec
from tests.fakes.apiserver import FakeApiServer
from tests.unit.cluster.kube.conftest import at_once, client, server
from tests.waiting import eventually

__all__ = ["at_once", "client", "server"]

POD = ("kube-system", "multus-a")


def run(client, *words, stdout_max=1_000_000):
    return pod_exec.run(client, *POD, "kube-multus", words, stdout_max=stdout_max)


@pytest.fixture
def pod(server: FakeApiServer):
    server.add_pod("multus-a", namespace="kube-system")

    def runs(program):
        server.programs[POD] = program

    return runs


@pytest.mark.parametrize("protocol", ["v5.channel.k8s.io", "v4.channel.k8s.io"])
async def test_what_a_command_writes_and_how_it_ends(server, client, pod, protocol):
    server.protocols = (protocol,)
    asked = []

    async def program(execution):
        asked.append((execution.container, execution.words))
        await execution.write(b"")
        await execution.write(b"first ")
        await execution.write(b"of standard error", channel=2)
        await execution.write(b"of a channel that nobody knows", channel=9)
        await execution.write(b"second")
        await execution.end(3)

    pod(program)
    ended = await run(client, "multusctl", "explain", "a/b & c")
    assert (ended.stdout, ended.stderr, ended.status) == (b"first second", "of standard error", 3)
    assert "exit status 3" in ended.message
    assert asked == [("kube-multus", ["multusctl", "explain", "a/b & c"])]


async def test_a_command_that_does_well(client, pod):
    pod(lambda execution: execution.answer({}))
    assert await run(client, "true") == pod_exec.Ended(b"{}", "", 0)


async def test_a_command_that_is_not_there(client, pod):
    pod(lambda execution: execution.fail('exec: "multusctl": executable file not found in $PATH'))
    ended = await run(client, "multusctl")
    assert (ended.status, ended.stdout) == (-1, b"")
    assert "executable file not found" in ended.message


async def test_a_refusal_says_why(server, client, pod):
    pod(lambda execution: execution.answer({}))
    server.fail(403, contains="/exec")
    with pytest.raises(ApiError, match=r"pods/multus-a/exec: 403 Injected: as the test wants"):
        await run(client, "true")
    assert (await run(client, "true")).status == 0


async def test_a_pod_that_is_not_there(client):
    with pytest.raises(ApiError, match=r'404 NotFound: pods "multus-a" not found'):
        await run(client, "true")


async def test_a_connection_that_ends_before_the_command(client, pod):
    pod(lambda execution: execution.write(b"half of"))
    with pytest.raises(ApiUnavailableError, match="ended before the command did"):
        await run(client, "true")


async def test_a_server_of_another_protocol(server, client, pod):
    server.protocols = ("v1.something.else",)
    pod(lambda execution: execution.answer({}))
    with pytest.raises(ApiUnavailableError, match=r"speaks none of v5\.channel\.k8s\.io"):
        await run(client, "true")


async def test_an_endless_answer_is_not_read_to_its_end(client, pod):
    sent = 0

    async def program(execution):
        nonlocal sent
        while True:
            await execution.write(b"x" * 65536)
            sent += 65536

    pod(program)
    with pytest.raises(ApiUnavailableError, match="longer than 1000000 bytes"):
        await run(client, "true")
    assert sent < 100_000_000


async def test_endless_standard_error_takes_no_memory(client, pod):
    async def program(execution):
        for _ in range(20):
            await execution.write(b"x" * 65536, channel=2)
        await execution.end(1)

    pod(program)
    assert len((await run(client, "true")).stderr) == pod_exec.STDERR_MAX_BYTES


async def test_a_message_that_is_too_long(client, pod):
    pod(lambda execution: execution.write(b"x" * (pod_exec.MESSAGE_MAX_BYTES + 1)))
    with pytest.raises(ApiUnavailableError, match="ended before the command did"):
        await run(client, "true")


async def test_a_deadline_of_the_callers_ends_it(server, client, pod):
    pod(lambda execution: execution.hang())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await run(client, "sleep")
    await eventually(lambda: not server.executing, 10)


async def test_nobody_listens(server, client):
    await client.load()
    await server.stop()
    with pytest.raises(ApiUnavailableError, match=r"GET /api/v1/namespaces/kube-system/pods/multus-a/exec: "):
        await run(client, "true")
