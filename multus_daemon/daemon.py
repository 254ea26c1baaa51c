"""The composition root: settings become objects, objects become named root tasks, a signal ends them in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multus_daemon import __version__, logs
from multus_daemon.base import fs
from multus_daemon.base.gates import Gates
from multus_daemon.builtin.runner import BuiltinRunner
from multus_daemon.delegates.cache import ResultCache
from multus_daemon.delegates.chain import Chain
from multus_daemon.delegates.conf_files import NodeConfFiles
from multus_daemon.delegates.dispatch import Dispatcher
from multus_daemon.delegates.process import ProcessRunner
from multus_daemon.delegates.store import FileStore
from multus_daemon.engine.verbs import Verbs
from multus_daemon.metrics import Metrics
from multus_daemon.netlink.ops import KernelLinks
from multus_daemon.server.app import MetricsServer, UnixServer
from multus_daemon.server.cni_api import CniApi
from multus_daemon.settings import Settings
from multus_daemon.standalone.store import StandaloneStore
