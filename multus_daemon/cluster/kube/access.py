"""Who may read the metrics: the API server reviews a bearer token (TokenReview) and its user (SubjectAccessReview)."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
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

PATH: Final = "/metrics"
VERB: Final = "get"
YES_SECONDS: Final = 60.0
NO_SECONDS: Final = 10.0
"""How long an answer is kept. A token that is refused now may be granted the right in a moment."""
KEPT_MAX: Final = 256
"""Maximum number of answers of each kind that are kept."""
AT_ONCE: Final = 2
"""Maximum number of concurrent reviews, so that unknown tokens do not take the client's connections from pods."""
PAUSE_SECONDS: Final = 0.2
"""A review keeps its place this long after its end, so that strangers cannot have the API server asked all the time."""

Verdict = Literal["allowed", "unauthenticated", "forbidden", "unavailable"]
"""`unavailable`: the API server did not review it."""

log = logging.getLogger(__name__)


class _User(msgspec.Struct):
    username: str = ""
    uid: str = ""
    groups: list[str] | None = None
    extra: dict[str, list[str]] | None = None


class _Authentication(msgspec.Struct):
    authenticated: bool = False
    user: _User | None = None


class _TokenReview(msgspec.Struct):
    """authentication.k8s.io/v1 TokenReview."""

    status: _Authentication


class _Authorization(msgspec.Struct):
    allowed: bool = False


class _AccessReview(msgspec.Struct):
    """authorization.k8s.io/v1 SubjectAccessReview."""

    status: _Authorization


_decode_token_review: Final = msgspec.json.Decoder(_TokenReview).decode
_decode_access_review: Final = msgspec.json.Decoder(_AccessReview).decode


class TokenAccess:
    """Judges bearer tokens of scrapers. It keeps digests of tokens, never a token."""

    def __init__(self, client: ApiClient, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._client = client
        # A flood of unknown tokens must not push the good ones out.
        self._yes, self._no = _Kept(YES_SECONDS, clock), _Kept(NO_SECONDS, clock)
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
        (self._yes if verdict == "allowed" else self._no).keep(digest, verdict)
        return verdict

    async def _review(self, token: str) -> Verdict:
        await self._turns.acquire()
        try:
            group = "authentication.k8s.io/v1"
            body = await self._post(group, "TokenReview", {"token": token})
            found = _decode_token_review(body).status
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
            body = await self._post("authorization.k8s.io/v1", "SubjectAccessReview", spec)
            return "allowed" if _decode_access_review(body).status.allowed else "forbidden"
        finally:
            asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._turns.release)

    async def _post(self, group: str, kind: str, spec: dict[str, Any]) -> bytes:
        review = json.dumps({"apiVersion": group, "kind": kind, "spec": spec})
        return await self._client.request("POST", f"/apis/{group}/{kind.lower()}s", body=review.encode())

    def _say(self, problem: str) -> None:
        """Log a change of the problem why tokens are not reviewed; empty: none."""
        if problem == self._problem:
            return
        self._problem = problem
        if problem:
            log.error("metrics: a token can't be reviewed: %s", problem)
        else:
            log.info("metrics: tokens are reviewed again")


class _Kept:
    """Verdicts by digest, for a limited time and in limited number; the oldest leaves first."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self._verdicts: dict[bytes, tuple[float, Verdict]] = {}

    def get(self, digest: bytes) -> Verdict | None:
        until, verdict = self._verdicts.get(digest, (0.0, None))
        return verdict if self._clock() < until else None

    def keep(self, digest: bytes, verdict: Verdict) -> None:
        # The place of an entry is that of its last verdict.
        self._verdicts.pop(digest, None)
        if len(self._verdicts) >= KEPT_MAX:
            del self._verdicts[next(iter(self._verdicts))]
        self._verdicts[digest] = (self._clock() + self._seconds, verdict)
