"""The heads of requests to the ports: what is read, and what is refused unread."""

from __future__ import annotations

import time
from http import HTTPStatus

import pytest

from multus_daemon.api import tcp

GET = {"GET": False}
BOTH = {"GET": False, "POST": True}


def read(*lines: str, methods: dict[str, bool] = GET) -> tcp.Head:
    return tcp.read_head("\r\n".join([*lines, "", ""]).encode("latin-1"), methods)


@pytest.mark.parametrize(
    ("target", "path"),
    [("/metrics", "/metrics"), ("/a?b=/c?d", "/a"), ("http://node:9059/metrics", "/metrics"), ("//a/b", "//a/b"),
     ("/%6d", "/%6d")],
)  # fmt: skip
def test_the_path_is_that_of_the_target(target: str, path: str) -> None:
    assert read(f"GET {target} HTTP/1.1") == tcp.Head("GET", path, {})


def test_fields_have_one_name_in_any_case() -> None:
    found = read("GET / HTTP/1.0", "Accept: a", "ACCEPT:\tb ", "X:", "Authorization: Bearer \xe9").fields
    assert found == {"accept": "a, b", "x": "", "authorization": "Bearer \xe9"}


def test_a_body_of_a_known_length_is_allowed_where_there_is_one() -> None:
    assert read("POST / HTTP/1.1", "Content-Length: 5", methods=BOTH).method == "POST"
    assert read("GET / HTTP/1.1", "Content-Length: 0", methods=BOTH).method == "GET"


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["GET /"], 400),
        (["GET / HTTP/2.0"], 400),
        (["GET  / HTTP/1.1"], 400),
        (["get / HTTP/1.1"], 400),
        (["GET * HTTP/1.1"], 400),
        (["GET a HTTP/1.1"], 400),
        (["GET /\x80 HTTP/1.1"], 400),
        (["CONNECT a:1 HTTP/1.1"], 400),
        (["", "GET / HTTP/1.1"], 400),
        (["GET / HTTP/1.1", "A"], 400),
        (["GET / HTTP/1.1", "A : b"], 400),
        (["GET / HTTP/1.1", ": b"], 400),
        (["GET / HTTP/1.1", "A: b", " c"], 400),
        (["GET / HTTP/1.1", "A: \0"], 400),
        (["GET / HTTP/1.1", "A: b\nC: d"], 400),
        (["GET / HTTP/1.1", *["A: b"] * 65], 431),
        (["PUT / HTTP/1.1"], 405),
        (["GET / HTTP/1.1", "Content-Length: 1"], 413),
        (["GET / HTTP/1.1", "Content-Length: +1"], 400),
        (["GET / HTTP/1.1", "Content-Length: 0", "Content-Length: 0"], 400),
        (["GET / HTTP/1.1", f"Content-Length: {'9' * 5000}"], 400),
        (["GET / HTTP/1.1", "Transfer-Encoding: identity"], 411),
        (["POST / HTTP/1.1", "Transfer-Encoding: chunked", "Content-Length: 5"], 411),
        (["POST / HTTP/1.1"], 411),
        (["POST / HTTP/1.1", "Content-Length: 5", "Content-Encoding: br"], 415),
        (["POST / HTTP/1.1", "Content-Length: 5", "Expect: 100-continue"], 417),
    ],
)
def test_what_is_refused(lines: list[str], status: int) -> None:
    with pytest.raises(tcp.RefusedError) as found:
        read(*lines, methods=BOTH)
    assert found.value.status is HTTPStatus(status)


@pytest.mark.parametrize("piece", ["A: b\r\n", "A:" + " " * 8000, "http://" * 1000, "GET /?" + "%" * 8000, " ", "\t"])
def test_no_head_takes_long(piece: str) -> None:
    data = (f"GET /{piece * tcp.HEAD_MAX}".encode())[: tcp.HEAD_MAX - 4] + tcp.HEAD_END
    begun = time.thread_time()
    with pytest.raises(tcp.RefusedError):
        tcp.read_head(data, GET)
    assert time.thread_time() - begun < 0.05
