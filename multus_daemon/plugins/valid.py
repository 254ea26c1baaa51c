"""Refuse an attachment that no plugin could serve, by its names, its version and its list of plugins. Pure."""

from __future__ import annotations

from typing import Final

from multus_daemon.plugins.cache import name_problem
from multus_daemon.spec.attachment import Attachment, Sandbox
from multus_daemon.spec.cni import names, versions
from multus_daemon.spec.cni.errors import (
    IncompatibleVersionError,
    InvalidEnvironmentError,
    InvalidNetworkConfigError,
)
from multus_daemon.spec.cni.names import FILE_NAME_MAX_BYTES

REFERENCE: Final = frozenset(
    {
        *("bridge", "dummy", "flannel", "host-device", "ipvlan", "loopback", "macvlan", "ptp", "tap", "vlan"),
        *("bandwidth", "firewall", "passthru", "portmap", "sbr", "tuning", "vrf"),
    }
)
"""Plugins of containernetworking/plugins, except for IPAM. They call `ipam.type` with the same configuration."""
_IPAM: Final = frozenset({"dhcp", "host-local", "static", "whereabouts"})


def require(sandbox: Sandbox, attachment: Attachment) -> None:
    """Raise InvalidNetworkConfigError, InvalidEnvironmentError (interface name) or IncompatibleVersionError."""
    config = attachment.config
    if problem := names.network_name_problem(config.name):
        raise InvalidNetworkConfigError(problem, config.name)
    if problem := names.ifname_problem(attachment.ifname):
        raise InvalidEnvironmentError(problem, attachment.ifname)
    # The reference fails after every plugin has run.
    if problem := name_problem(config.name, sandbox.container_id, attachment.ifname):
        raise InvalidNetworkConfigError(
            problem,
            f"its result's file is named <network>-<container>-<interface>, {FILE_NAME_MAX_BYTES} bytes at most; "
            "shorten 'name' in the network's configuration",
        )
    if not versions.is_supported(config.cni_version):
        raise IncompatibleVersionError(
            f'unsupported CNI version "{config.cni_version}"', f"known are {', '.join(versions.SUPPORTED)}"
        )
    for plugin in config.plugins:
        # One of the reference plugins would call itself. For an IPAM plugin alone, `ipam` is its own configuration.
        calls_itself = plugin.ipam_type == plugin.type and plugin.type not in _IPAM
        if calls_itself or plugin.ipam_type in REFERENCE:
            raise InvalidNetworkConfigError(
                f'ipam.type "{plugin.ipam_type}" is no IPAM plugin',
                "it would call itself for an address; name one such as host-local",
            )
    if not config.plugins:
        raise InvalidNetworkConfigError("no plugins in list", "name one in the configuration's 'plugins'")
