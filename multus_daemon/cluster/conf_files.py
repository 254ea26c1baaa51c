"""CNI configurations in directories of the node, by network name or by path (libcni's `conf.go`).

The files `<directory>/<network name>/*.conf` may add plugins to a list (CNI SPEC 1.1.0, side-loaded plugins).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from multus_daemon.runtime import fs
from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError, IoFailureError
from multus_daemon.spec.cni.names import network_name_problem, path_problem

CONF_MAX_BYTES = conf.CONFIG_MAX_BYTES
PLUGINS_MAX = conf.PLUGINS_MAX
SUFFIXES = (".conf", ".json", ".conflist")
MISSING: Final = (
    "is missing on the node; delete the daemon's pod: the kubelet makes the directory for the new one; then restart "
    "containerd, which still watches the old one"
)
"""Text for people about a directory that `is_missing`; the manifests mount it as `DirectoryOrCreate`."""


class NodeConfFiles:
    """Reads CNI configurations on the node, for networks whose NetworkAttachmentDefinition has none.

    Each call reads the files again: they are few and small, and may change.
    """

    def by_name(self, directory: str, name: str) -> NetworkConfig | None:
        """Return the configuration of the network `name`, None if there is none. Raises CniError."""
        # Lists before single configurations: NPWG multi-network SPEC 3.4.1, and libcni's LoadNetworkConf.
        for path in sorted(_candidates(_path(directory)), key=lambda item: item.suffix != ".conflist"):
            raw = _read(path)
            try:
                present = gojson.get_str(gojson.loads_object(raw), "name")
            except gojson.JsonError as error:
                # The broken file may be the one of this network; a later file would be the wrong one.
                raise InvalidNetworkConfigError(
                    f"{path}: {error}", f"this file was read to find the network {name!r}"
                ) from error
            if present == name:
                return _load(path, raw)
        return None

    def at_path(self, path: str) -> NetworkConfig:
        """Return the configuration in the file, or in the first file of the directory. Raises CniError."""
        file = _path(path)
        if file.is_dir():
            candidates = _candidates(file)
            if not candidates:
                raise InvalidNetworkConfigError(
                    f"no net configurations found in {file}", f"a file ending in one of {', '.join(SUFFIXES)} is needed"
                )
            file = candidates[0]
        return _load(file, _read(file))

    def plugins_beside(self, path: str, name: str) -> tuple[bytes, ...]:
        """Return the side-loaded plugins of the network, in lexical order. Raises CniError."""
        # A checked name is a single path component and can't lead out of the directory.
        if problem := network_name_problem(name):
            raise InvalidNetworkConfigError(problem, repr(name))
        file = _path(path)
        return _plugins_in((file if file.is_dir() else file.parent) / name)


def names(directory: Path) -> list[str]:
    """Return the names of CNI configuration files, sorted as the runtime does, with dot files. Raises OSError."""
    try:
        with os.scandir(directory) as entries:
            found = [item.name for item in entries if not item.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    return sorted(name for name in found if name.endswith(SUFFIXES))


def is_missing(directory: Path) -> bool:
    """Return True if the directory was removed from the node, also if it is still mounted here. Raises OSError."""
    return not directory.exists() or not directory.stat().st_nlink


def before(ours: Path, plugin_type: str) -> tuple[str, dict[str, str]]:
    """Return the file that the runtime uses instead of `ours`, empty if it uses ours, and problems of earlier files.

    The runtime reads the first file by name. If that is not a configuration, containerd has no network, and CRI-O takes
    the next file. A file whose plugin is the shim (`plugin_type`) counts as ours. Raises OSError.
    """
    unusable: dict[str, str] = {}
    for name in names(ours.parent):
        if name >= ours.name:
            break
        path = ours.parent / name
        try:
            plugins = conf.parse(_read(path), default_name="unnamed", allow_no_plugins=True).plugins
        except CniError as error:
            # It may have been removed meanwhile.
            if os.path.lexists(path):
                unusable[name] = error.msg
            continue
        if any(plugin.type == plugin_type for plugin in plugins):
            break
        if plugins:
            return name, unusable
        unusable[name] = "it has no plugins"
    return "", unusable


def _path(text: str) -> Path:
    """Return `text` as a path. Raises InvalidNetworkConfigError if it can't be one."""
    if problem := path_problem(text):
        raise InvalidNetworkConfigError(f"{text!r} is not a path: {problem}")
    return Path(text)


def _candidates(directory: Path) -> list[Path]:
    try:
        return sorted(entry for entry in directory.iterdir() if entry.suffix in SUFFIXES and entry.is_file())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise IoFailureError(f"{directory}: can't be listed: {error.strerror}") from error


def _read(path: Path) -> bytes:
    try:
        return fs.read_limited(path, limit=CONF_MAX_BYTES)
    except OSError as error:
        raise IoFailureError(f"{path}: can't be read: {error.strerror or error}") from error


def _plugins_in(folder: Path) -> tuple[bytes, ...]:
    """Return the plugin objects in `<folder>/*.conf`; none without a folder. Raises CniError."""
    paths = [path for path in _candidates(folder) if path.suffix == ".conf"]
    if len(paths) > PLUGINS_MAX:
        raise InvalidNetworkConfigError(
            f"{folder} has {len(paths)} plugins, and a chain may have at most {PLUGINS_MAX}"
        )
    plugins = []
    for path in paths:
        raw = _read(path)
        try:
            conf.require_plugin(raw)
        except CniError as error:
            raise error.with_context(str(path)) from error
        plugins.append(raw)
    return tuple(plugins)


def _load(path: Path, raw: bytes) -> NetworkConfig:
    try:
        config = conf.parse(raw, allow_no_plugins=True)
        if not config.is_list:
            return config
        if not config.load_only_inlined_plugins:
            config = conf.with_plugins(config, _plugins_in(path.parent / config.name))
        if not config.plugins:
            raise InvalidNetworkConfigError("no plugin configs found", f"network {config.name!r}")
        return config
    except CniError as error:
        raise error.with_context(str(path)) from error
