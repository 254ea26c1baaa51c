"""Who may read the metrics: the API server reviews a bearer token (TokenReview) and its user (SubjectAccessReview)."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import time
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec

from multus_daemon import deadlines
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import KubeError
from multus_daemon.cluster.kube.objects import DECODE_ERRORS
from multus_daemon.runtime.aio import SharedCalls
from multus_daemon.runtime.recent import Recent

PATH: Final = "/metrics"
VERB: Final = "get"
YES_SECONDS: Final = 60.0
NO_SECONDS: Final = 10.0
"""How long a refusal is kept: the token's user may be granted the right at any time."""
KEPT_MAX: Final = 256
"""Maximum number of answers of each kind that are kept."""
AT_ONCE: Final = 2
"""Maximum number of concurrent reviews, so that unknown tokens do not take the client's connections from pods."""
PAUSE_SECONDS: Final = 0.2
"""After a review, its place stays taken this long, so that unknown clients cannot cause reviews all the time."""

Verdict = Literal["allowed", "unauthenticated", "forbidden", "unavailable"]
"""Whether a token may read the metrics; `unavailable`: the API server did not review it."""

log = logging.getLogger(__name__)


class _User(msgspec.Struct):
    username: str = ""
    uid: str = ""
    groups: list[str] | None = None
    extra: dict[str, list[str]] | None = None


class _Status(msgspec.Struct):
    """The parts of a TokenReview's and a SubjectAccessReview's status that are used here."""

    authenticated: bool = False
    user: _User | None = None
    allowed: bool = False


class _Review(msgspec.Struct):
    """authentication.k8s.io/v1 TokenReview, or authorization.k8s.io/v1 SubjectAccessReview."""

    status: _Status


_decode: Final = msgspec.json.Decoder(_Review).decode


class TokenAccess:
    """Decides whether a scraper's bearer token may read the metrics. Keeps digests of tokens, never a token."""

    def __init__(self, client: ApiClient, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: returns seconds, for tests."""
        self._client = client
        # A flood of unknown tokens must not push the good ones out.
        self._yes: Recent[bytes, Verdict] = Recent(KEPT_MAX, YES_SECONDS, clock=clock)
        self._no: Recent[bytes, Verdict] = Recent(KEPT_MAX, NO_SECONDS, clock=clock)
        self._asking = SharedCalls()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._problem = ""

    async def __call__(self, token: str) -> Verdict:
        """Return the verdict about `token`, which is ASCII. Takes METRICS_REVIEW_SECONDS at most."""
        digest = hashlib.sha256(token.encode()).digest()
        if kept := self._yes.get(digest) or self._no.get(digest):
            return kept
        try:
            async with asyncio.timeout(deadlines.METRICS_REVIEW_SECONDS):
                verdict: Verdict = await self._asking.of(digest, functools.partial(self._review, token))
        except TimeoutError:
            self._say(f"no answer within {deadlines.METRICS_REVIEW_SECONDS:g} s")
            return "unavailable"
        except KubeError as error:
            remedy = "; grant the rights of manifests/metrics-authorization" if error.status == 403 else ""
            self._say(f"{error}{remedy}")
            return "unavailable"
        except DECODE_ERRORS as error:
            self._say(f"the answer is not a review: {error}")
            return "unavailable"
        self._say("")
        (self._yes if verdict == "allowed" else self._no)[digest] = verdict
        return verdict

    async def _review(self, token: str) -> Verdict:
        await self._turns.acquire()
        try:
            group = "authentication.k8s.io/v1"
            found = await self._post(group, "TokenReview", {"token": token})
            if not found.authenticated or found.user is None:
                return "unauthenticated"
            user = found.user
            spec = {
                "user": user.username,
                "uid": user.uid,
                "groups": user.groups or [],
                "extra": user.extra or {},
                "nonResourceAttributes": {"path": PATH, "verb": VERB},
            }
            found = await self._post("authorization.k8s.io/v1", "SubjectAccessReview", spec)
            return "allowed" if found.allowed else "forbidden"
        finally:
            asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._turns.release)

    async def _post(self, group: str, kind: str, spec: dict[str, Any]) -> _Status:
        review = msgspec.json.encode({"apiVersion": group, "kind": kind, "spec": spec})
        return _decode(await self._client.request("POST", f"/apis/{group}/{kind.lower()}s", body=review)).status

    def _say(self, problem: str) -> None:
        """Log if the reason why tokens can't be reviewed has changed; empty: they can."""
        if problem and problem != self._problem:
            log.error("metrics: a token can't be reviewed: %s", problem)
        elif self._problem and not problem:
            log.info("metrics: tokens can be reviewed again")
        self._problem = problem
