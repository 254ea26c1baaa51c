"""Install the shim on a node, and remove everything of Multus: `multus-daemon install` and `uninstall`.

Both run in a container with the node's folders mounted, or on the node itself. They can be repeated at any time, even
while the runtime executes the shim: files are only replaced, never written to.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from multus_daemon import deadlines
from multus_daemon.cluster import conf_files
from multus_daemon.pod.engine import LOCKS
from multus_daemon.pod.store import FileStore
from multus_daemon.runtime import elf, fs
from multus_daemon.spec import netconf
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.ports import CorruptRecordError

log = logging.getLogger(__name__)

SHIM: Final = "multus-shim"
"""File name of the shim in the plugin directory, and its type in the generated configuration."""
PASSTHRU: Final = "passthru"
"""File name with which the shim's program acts as the plugin `passthru`."""
THIN: Final = "multus"
"""File name of upstream's thin plugin, and its type; the shim takes its place on a node that has it."""
SOCKET: Final = "multus.sock"
_DIRECTORY: Final = "multus"
"""Name of the directories of Multus: /run/multus, /var/lib/cni/multus, /etc/cni/multus."""


class InstallError(Exception):
    """The command failed; the message says why and what to do."""


def install_shim(source: Path, directory: Path, *, name: str = SHIM, machine: str = "") -> bool:
    """Copy the shim at `source` to `directory` as `name`; return False if an equal file is there already.

    A trial run comes first, so that a working shim is never replaced by one that can't run. `machine`: as in `uname
    -m`, by default this machine's. If it raises InstallError, it has changed nothing.
    """
    try:
        data = fs.read_limited(source)
        machine = machine or os.uname().machine
        if foreign := elf.foreign_machine(data, machine):
            raise InstallError(
                f"{source} is for {foreign}, and this node is {machine}; use the image of the node's architecture"
            )
        target = directory / name
        with contextlib.suppress(OSError):
            if target.stat().st_mode & 0o777 == 0o755 and fs.read_limited(target, follow=False) == data:
                return False
        fs.sweep(directory)
        # Under another name, because the runtime may execute the shim at any moment.
        trial = directory / f".{name}.new"
        fs.write_atomic(trial, data, mode=0o755)
        try:
            _try(trial)
            trial.rename(target)
        finally:
            fs.remove(trial)
        fs.fsync_directory(directory)
    except elf.NoProgramError as error:
        raise InstallError(f"{source} {error}; this image is broken") from error
    except OSError as error:
        raise InstallError(
            f"the shim can't be copied to {directory}: {error}; mount the node's plugin directory there"
        ) from error
    return True


def _try(program: Path) -> None:
    """Ask the shim for its CNI versions. Raises InstallError if that fails."""
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


@dataclass(frozen=True, slots=True)
class Node:
    """The node's directories, as the caller sees them."""

    bin_dir: Path
    conf_dir: Path
    """The runtime's network configurations."""
    socket_dir: Path
    cni_dir: Path
    networks_dir: Path
    """The operator's network configurations (`confDir`)."""


def uninstall(
    node: Node, store: FileStore, free: Callable[[], Mapping[str, str]] = dict, *, force: bool, purge: bool
) -> list[str]:
    """Remove everything of Multus from the node; return what was done, in order, as texts.

    `free` detaches deleted pods, whose DELs are in the spool, and returns the errors by container. If pods still have
    additional networks, which would leak, nothing is removed unless `force`. Nothing is removed while the daemon runs,
    as it would restore the configuration. The configuration is removed first, so that the runtime stops calling the
    shim. A shim that still runs may write its DEL to the spool, so the uninstaller waits for its end. Records are
    removed, as no other program reads them. `purge`: also remove upstream's files and DELs in the spool. Raises
    InstallError.
    """
    if fs.is_listening(node.socket_dir / SOCKET):
        raise InstallError(
            f"the daemon of this node still runs and answers on {node.socket_dir / SOCKET}; nothing was changed: "
            "delete its DaemonSet, or stop it, and repeat"
        )
    spool, attachments = node.cni_dir / "spool", node.cni_dir / "attachments"
    failed = free() if any(attachments.glob("*")) or _waiting(spool) else {}
    if not force and (problems := _problems(store, spool, failed)):
        raise InstallError(problems)
    done: list[str] = []
    try:
        shim = _file_id(node.bin_dir / SHIM)
        # Upstream's plugins have the same names.
        copies = [name for name in (PASSTHRU, THIN) if _is_shim(node.bin_dir, name)]
        # A configuration of the thin plugin calls the shim too, once the shim has its name.
        ours = our_configurations(node.conf_dir, {SHIM, *copies} - {PASSTHRU})
        paths = [*ours, node.socket_dir / SOCKET, *(node.bin_dir / name for name in copies)]
        for path in (*paths, node.bin_dir / SHIM):
            if fs.remove(path):
                done.append(f"removed {path}")
        if shim and _await_end(shim) and _waiting(spool):
            free()
        fs.remove(node.socket_dir / LOCKS)
        fs.sweep(node.bin_dir)
        if waiting := _waiting(spool):
            done.append(f"DELs in {spool} that were not done: {waiting}; what their pods had stays taken")
        if aside := [item.container_id for item in store.aside()]:
            done.append(f"containers that were set aside keep what they had: {_shown(aside, ', ', 20)}")
        records = node.cni_dir if purge else attachments
        if records.is_dir() and (purge or any(records.iterdir())):
            _remove_tree(records)
            done.append(f"removed {records}")
        parent = node.networks_dir.parent
        networks_dir = parent if parent.name == _DIRECTORY else node.networks_dir
        done += [f"removed {each}" for each in (node.socket_dir, node.cni_dir, networks_dir) if _remove_empty(each)]
    except OSError as error:
        raise InstallError(f"{error}; done before that: {'; '.join(done) or 'nothing'}") from error
    return done


def _is_shim(directory: Path, name: str) -> bool:
    """Return True if the plugin `name` is a copy of the shim beside it."""
    with contextlib.suppress(OSError):
        return fs.read_limited(directory / name) == fs.read_limited(directory / SHIM)
    return False


def _file_id(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file; None if it does not exist, or is in /proc of a process that has ended."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _await_end(program: tuple[int, int]) -> bool:
    """Wait until no process runs `program`, a shim, which may write its DEL to the spool; return True if one ran.

    A shim with an ADD may run longer: the ADD fails, and leaves nothing.
    """
    end = time.monotonic() + deadlines.SHIM_DEL_WAIT_SECONDS + deadlines.SHIM_DEL_REPLY_SECONDS
    has_run = False
    while time.monotonic() < end and any(_file_id(path) == program for path in Path("/proc").glob("[0-9]*/exe")):
        has_run = True
        time.sleep(0.1)
    return has_run


def _remove_tree(directory: Path) -> None:
    """Remove a directory with its content; a mount point is only emptied. Raises OSError."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        if error.errno != errno.EBUSY or any(directory.iterdir()):
            raise


def _remove_empty(directory: Path) -> bool:
    """Remove a directory named `multus` that contains only directories; False if it stays. Raises OSError.

    Directories with other names may be shared. A mount point stays.
    """
    if directory.name != _DIRECTORY or not directory.is_dir():
        return False
    if any(path.is_symlink() or not path.is_dir() for path in directory.rglob("*")):
        return False
    _remove_tree(directory)
    return not directory.exists()


def our_configurations(directory: Path, names: Collection[str]) -> list[Path]:
    """Return the configurations in `directory` that call the shim, or are placeholders, sorted. Raises OSError.

    They are recognized by their content, because operators may rename them. `names`: the shim's.
    """
    return [path for name in conf_files.names(directory) if _is_ours(path := directory / name, names)]


def _is_ours(path: Path, names: Collection[str]) -> bool:
    with contextlib.suppress(OSError, gojson.JsonError):
        data = fs.read_limited(path, limit=conf_files.CONF_MAX_BYTES)
        if data == netconf.PLACEHOLDER:
            return True
        fields = gojson.loads_object(data)
        plugins = gojson.get_list(fields, "plugins") or [fields]
        found = {gojson.get_str(plugin, "type") for plugin in plugins if isinstance(plugin, dict)}
        return bool(found) and found <= set(names)
    return False


def _problems(store: FileStore, spool: Path, failed: Mapping[str, str]) -> str:
    """Return why nothing may be removed, and what to do; empty if it may. Raises InstallError."""
    problems, advice = [], []
    if failed:
        causes = _shown(failed.values(), "; ", 5)
        problems.append(f"networks of deleted pods are not freed ({len(failed)}): {causes}")
        advice.append("correct these errors")
    elif waiting := _waiting(spool):
        problems.append(f"DELs in {spool} that are not served: {waiting}")
    if pods := _with_additional_networks(store, failed):
        problems.append(f"{len(pods)} pods have additional networks: {_shown(pods, ', ', 20)}")
        advice.append("drain the node")
    if not problems:
        return ""
    return (
        f"{'; '.join(problems)}; nothing was removed: {', '.join([*advice, 'repeat'])}; with --force their networks "
        "stay taken, and the pods that live need a restart"
    )


def _waiting(spool: Path) -> int:
    """Return the number of DELs in the spool."""
    return sum(1 for _ in spool.glob("[!.]*.json"))


def _shown(texts: Collection[str], between: str, most: int) -> str:
    return between.join([*itertools.islice(texts, most), *(["..."] if len(texts) > most else [])])


def _with_additional_networks(store: FileStore, failed: Collection[str]) -> list[str]:
    """Return the pods with additional networks as texts with their number, except containers in `failed`."""
    pods = []
    try:
        for container_id in store.containers():
            try:
                record = store.load(container_id)
            except CorruptRecordError as error:
                log.warning("container %s: %s", container_id, error)
                continue
            # A deleted pod may be left with an additional network alone.
            number = sum(not item.cluster_network for item in record.attachments) if record else 0
            if record and number and container_id not in failed:
                pods.append(f"{record.pod} ({number})")
    except OSError as error:
        raise InstallError(f"the records of attached pods can't be read: {error}") from error
    return pods
