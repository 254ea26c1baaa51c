"""Puts the shim on a node, and takes everything off it again: `multus-daemon install` and `uninstall`.

Both are run in a container that has the node's folders mounted, or on the node itself. They can be repeated at any
time, while the runtime executes the shim too: a file is never written to, only replaced.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from multus_daemon import deadlines
from multus_daemon.pod.engine import LOCKS
from multus_daemon.runtime import elf, fs
from multus_daemon.spec.attachment import ContainerRecord
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.netconf import generate
from multus_daemon.spec.ports import CorruptRecordError, DelegateStore

log = logging.getLogger(__name__)

SHIM: Final = "multus-shim"
"""File name of the shim in the plugin directory, and its type in the generated configuration."""

PASSTHRU: Final = "passthru"
"""The plugin that the same program is under this name."""

SOCKET: Final = "multus.sock"
_DIRECTORY: Final = "multus"
"""Of the node's directories that are ours: /run/multus, /var/lib/cni/multus, /etc/cni/multus."""
_CONF_MAX_BYTES: Final = 1024 * 1024


class InstallError(Exception):
    """The node could not be changed as asked; the message says why and what to do."""


# --- install ---------------------------------------------------------------------------------------------------------


def install_shim(source: Path, directory: Path, *, name: str = SHIM, machine: str = "") -> bool:
    """Put the shim at `source` into the plugin directory; False where the very same is there already.

    It is tried where it will be executed before it takes the place of its predecessor, so that a node never has one
    that can't run. `name`: SHIM or PASSTHRU. `machine`: what `uname -m` says; empty: this one. Raises InstallError,
    nothing is changed then.
    """
    try:
        data = fs.read_limited(source)
        _check_elf(data, source, machine or os.uname().machine)
        target = directory / name
        if _is_same(target, data):
            return False
        fs.sweep(directory)
        # Under a name of its own first: the trial must not be of what the runtime may execute at this moment.
        trial = directory / f".{name}.new"
        fs.write_atomic(trial, data, mode=0o755)
        try:
            _try(trial)
            trial.rename(target)
        finally:
            fs.remove(trial)
        fs.fsync_directory(directory)
    except OSError as error:
        raise InstallError(
            f"the shim can't be put into {directory}: {error}; is the node's directory mounted there?"
        ) from error
    return True


def _check_elf(data: bytes, source: Path, machine: str) -> None:
    """Raises InstallError where the program is none, or one of another architecture."""
    try:
        found = elf.foreign_machine(data, machine)
    except elf.NoProgramError as error:
        raise InstallError(f"{source} {error}; this image is broken") from error
    if found:
        raise InstallError(
            f"{source} is for {found}, and this node is {machine}; use the image of the node's architecture"
        )


def _is_same(target: Path, data: bytes) -> bool:
    try:
        return target.stat().st_mode & 0o777 == 0o755 and fs.read_limited(target, follow=False) == data
    except OSError:
        return False


def _try(program: Path) -> None:
    """Ask the shim for its CNI versions. Raises InstallError where that fails."""
    try:
        done = subprocess.run(  # noqa: S603 - our own program, at a path of ours
            [program],
            env={"CNI_COMMAND": "VERSION"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=deadlines.INSTALL_TRY_SECONDS,
            check=False,
        )
        versions = json.loads(done.stdout)["supportedVersions"] if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
        raise InstallError(f"{program} does not run on this node: {error}") from error
    if not versions:
        raise InstallError(f"{program} does not run on this node: exit status {done.returncode}: {done.stderr[:200]!r}")


# --- uninstall -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Node:
    """The places on a node that hold something of ours, as the caller sees them."""

    bin_dir: Path
    conf_dir: Path
    """Where the runtime looks for its network configuration."""
    socket_dir: Path
    cni_dir: Path
    networks_dir: Path
    """Where operators put configurations of networks (`confDir`)."""


def uninstall(node: Node, store: DelegateStore, *, force: bool, purge: bool) -> list[str]:
    """Take everything of ours off the node, so that the runtime goes on with the cluster's own network.

    The configuration goes first: from then on the runtime does not start the shim for new pods. Pods that have
    additional networks would keep them for ever, since nobody is left that knows them: where there are such pods
    nothing is changed, unless `force` says so; where the daemon still runs neither, since it would put the
    configuration back. Directories of ours go where nothing is left in them. `purge`: the record of what is attached
    goes too. What was done, in order, each as a line for people. Raises InstallError.
    """
    if _is_served(node.socket_dir / SOCKET):
        raise InstallError(
            f"the daemon of this node still runs and answers on {node.socket_dir / SOCKET}; nothing was changed: "
            "delete its DaemonSet, or stop it, and repeat"
        )
    waiting = _with_additional_networks(store)
    if waiting and not force:
        shown = ", ".join(f"{record.pod} ({len(record.attachments) - 1})" for record in waiting[:20])
        raise InstallError(
            f"{len(waiting)} pods have additional networks: {shown}{', ...' if len(waiting) > 20 else ''}; nothing was "
            "changed: drain the node first, or repeat with --force and restart these pods"
        )
    done: list[str] = []
    try:
        for path in our_configurations(node.conf_dir):
            fs.remove(path)
            done.append(f"removed {path}")
        if fs.remove(node.socket_dir / SOCKET):
            done.append(f"removed {node.socket_dir / SOCKET}")
        fs.remove(node.socket_dir / LOCKS)
        # Upstream's stays: this one is ours only if it is the same program as the shim beside it.
        if _is_same_program(node.bin_dir / PASSTHRU, node.bin_dir / SHIM):
            fs.remove(node.bin_dir / PASSTHRU)
            done.append(f"removed {node.bin_dir / PASSTHRU}")
        if fs.remove(node.bin_dir / SHIM):
            done.append(f"removed {node.bin_dir / SHIM}")
        fs.sweep(node.bin_dir)
        spool = node.cni_dir / "spool"
        if waiting_dels := len(list(spool.glob("[!.]*.json"))):
            done.append(f"{waiting_dels} DELs in {spool} were not done: what their pods had stays taken")
        if purge and node.cni_dir.is_dir():
            _remove_tree(node.cni_dir)
            done.append(f"removed {node.cni_dir}")
        parent = node.networks_dir.parent
        networks_dir = parent if parent.name == _DIRECTORY else node.networks_dir
        done += [f"removed {each}" for each in (node.socket_dir, node.cni_dir, networks_dir) if _remove_empty(each)]
    except OSError as error:
        raise InstallError(f"{error}; done before that: {'; '.join(done) or 'nothing'}") from error
    return done


def _remove_tree(directory: Path) -> None:
    """Remove a directory with all that is in it; one that is mounted by itself is emptied. Raises OSError."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        if error.errno != errno.EBUSY or any(directory.iterdir()):
            raise


def _remove_empty(directory: Path) -> bool:
    """Remove a directory of our name that has nothing but directories in it; whether it is gone. Raises OSError.

    One of another name may be somebody else's too. One that is mounted by itself, as into a container, stays.
    """
    if directory.name != _DIRECTORY or not directory.is_dir():
        return False
    if any(path.is_symlink() or not path.is_dir() for path in directory.rglob("*")):
        return False
    _remove_tree(directory)
    return not directory.exists()


def _is_same_program(one: Path, other: Path) -> bool:
    try:
        return fs.read_limited(one) == fs.read_limited(other)
    except OSError:
        return False


def _is_served(path: Path) -> bool:
    """Whether a process accepts connections there; the socket of one that was killed stays behind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(deadlines.INSTALL_TRY_SECONDS)
        try:
            client.connect(str(path))
        except TimeoutError:
            return True
        except OSError:
            return False
    return True


def our_configurations(directory: Path) -> list[Path]:
    """The network configurations in `directory` that start the shim or keep our place, sorted. Raises OSError.

    By their content: a file that an operator has named otherwise counts as well.
    """
    try:
        paths = sorted(path for path in directory.iterdir() if path.suffix in (".conf", ".conflist", ".json"))
    except FileNotFoundError:
        return []
    return [path for path in paths if _is_ours(path)]


def _is_ours(path: Path) -> bool:
    try:
        data = fs.read_limited(path, limit=_CONF_MAX_BYTES)
    except OSError:
        return False
    types = _types(data)
    return data == generate.PLACEHOLDER or (bool(types) and set(types) <= {SHIM})


def _types(data: bytes) -> Sequence[str]:
    """The plugin types that a configuration names; none where it is no configuration."""
    try:
        fields = gojson.loads_object(data)
        plugins = gojson.get_list(fields, "plugins") or [fields]
        return [gojson.get_str(plugin, "type") or "" for plugin in plugins if isinstance(plugin, dict)]
    except gojson.JsonError:
        return []


def _with_additional_networks(store: DelegateStore) -> list[ContainerRecord]:
    found = []
    try:
        for container_id in store.containers():
            try:
                record = store.load(container_id)
            except CorruptRecordError as error:
                log.warning("container %s: %s", container_id, error)
                continue
            if record is not None and len(record.attachments) > 1:
                found.append(record)
    except OSError as error:
        raise InstallError(f"what is attached can't be read: {error}") from error
    return found
