"""The engine on fakes, as for the networks of one pod."""

from tests.unit.pod.conftest import engine

__all__ = ["engine"]
