"""The kubelet of a scratch node, as far as `kubectl exec` in the daemon's pod needs one: it runs `multusctl` there.

The API server reaches it by the Node's address and port, and passes the websocket on. What `multusctl` prints, the
daemon that it asks, and its log are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys
import threading

from aiohttp import web

from tests.e2e.apiserver import ApiServer
from tests.e2e.node import Node
from tests.fakes.apiserver import Execution

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
NAMESPACE = "kube-system"
CONTAINER = "kube-multus"


class ExecKubelet:
    """A context manager: inside of it the node has a pod of the daemon, in which commands run."""

    def __init__(self, server: ApiServer, node: Node, name: str) -> None:
        """`name`: the node's in the API server."""
        self.pod = f"kube-multus-ds-{name.removeprefix('node-')}"
        self._server, self._node, self._name = server, node, name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"kubelet of {name}", daemon=True)
        self._runner: web.AppRunner | None = None

    def __enter__(self) -> ExecKubelet:
        self._thread.start()
        port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(timeout=60)
        self._server.create_node(self._name, address="127.0.0.1", kubelet_port=port)
        self._server.create_daemon_pod(self.pod, self._name, namespace=NAMESPACE, container=CONTAINER)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._loop.close)
            stack.callback(self._thread.join)
            stack.callback(self._loop.call_soon_threadsafe, self._loop.stop)
            if self._runner:
                cleanup = asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop)
                stack.callback(cleanup.result, timeout=60)
            if self._server.server.running:
                self._server.delete_pod(self.pod, NAMESPACE)

    async def _start(self) -> int:
        """The port that it listens on."""
        app = web.Application()
        app.router.add_get("/exec/{namespace}/{pod}/{container}", self._exec)
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._log)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        # kube-apiserver verifies a kubelet's certificate only if it is given the kubelet's CA.
        pair = self._server.authority.client(self.pod, f"system:node:{self._name}", ("system:nodes",))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.certificate, pair.key)
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context).start()
        port: int = self._runner.addresses[0][1]
        return port

    async def _log(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("previous") == "true":
            raise web.HTTPBadRequest(text="previous terminated container not found", headers={"Connection": "close"})
        lines = self._node.log.read_text().splitlines(keepends=True)
        response = web.Response(text="".join(lines[-int(request.query["tailLines"]) :]))
        # A connection that is kept would outlive the loop.
        response.force_close()
        return response

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        asked = tuple(request.match_info[key] for key in ("namespace", "pod", "container"))
        if asked != (NAMESPACE, self.pod, CONTAINER):
            raise web.HTTPNotFound(text=f"container not found: {asked}")
        program, *words = request.query.getall("command")
        websocket = web.WebSocketResponse(protocols=PROTOCOLS)
        await websocket.prepare(request)
        execution = Execution(websocket, CONTAINER, [program, *words])
        if program != "multusctl":
            await execution.fail(f'exec: "{program}": executable file not found in $PATH')
        else:
            words += ["--config", str(self._node.config)]
            command = self._node.contained(sys.executable, "-m", "multus_tools.ctl", *words)
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, err = await process.communicate()
            assert process.returncode is not None
            await execution.write(out)
            await execution.write(err, channel=2)
            await execution.end(process.returncode)
        await websocket.close()
        return websocket
