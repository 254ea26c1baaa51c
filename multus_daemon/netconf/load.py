"""Reading our own CNI network configuration: the runtime's bytes, the daemon's keys laid over them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from multus_daemon.cni import conf, gojson
from multus_daemon.cni.errors import DecodingFailureError, InvalidNetworkConfigError
from multus_daemon.netconf.model import NetConf

_VALID_ATTACHMENTS: Final = ("cni.dev/valid-attachments", "cni.dev/attachments")


def load(stdin: bytes, overlay: Mapping[str, Any]) -> NetConf:
    """The configuration of one request; the keys of `overlay` win, key by key, as upstream merges them.

    Raises DecodingFailureError (6) and InvalidNetworkConfigError (7).
    """
    try:
        fields = gojson.loads_object(stdin)
        return _read(gojson.with_keys(fields, overlay))
    except gojson.JsonError as error:
        raise DecodingFailureError(f"Multus CNI configuration: {error}") from error


def _read(fields: Mapping[str, Any]) -> NetConf:
    cluster_network = gojson.get_str(fields, "clusterNetwork") or ""
    delegates: tuple[conf.NetworkConfig, ...] = ()
    if not cluster_network:
        delegates = tuple(
            _delegate(index, item) for index, item in enumerate(gojson.get_list(fields, "delegates") or ())
        )
    namespaces = gojson.get_str(fields, "globalNamespaces") or "default"
    defaults = NetConf(name="", cni_version="")
    system_namespaces = gojson.get_strings(fields, "systemNamespaces")
    isolation = gojson.get_bool(fields, "namespaceIsolation") or False
    return NetConf(
        name=gojson.get_str(fields, "name") or "",
        cni_version=gojson.get_str(fields, "cniVersion") or "",
        cluster_network=cluster_network,
        delegates=delegates,
        default_networks=tuple(gojson.get_strings(fields, "defaultNetworks") or ()),
        system_namespaces=defaults.system_namespaces if system_namespaces is None else tuple(system_namespaces),
        multus_namespace=gojson.get_str(fields, "multusNamespace") or defaults.multus_namespace,
        namespace_isolation=isolation,
        global_namespaces=frozenset(name.strip() for name in namespaces.split(",") if name.strip()),
        conf_dir=gojson.get_str(fields, "confDir") or defaults.conf_dir,
        auxiliary_chain=gojson.get_str(fields, "auxiliaryCNIChainName") or "",
        force_cni_version=gojson.get_bool(fields, "forceCNIVersion") or False,
        strict_requests=gojson.get_bool(fields, "strictRequests") or False,
        runtime_config=gojson.get_object(fields, "runtimeConfig") or {},
        valid_attachments=_valid_attachments(fields),
    )


def _delegate(index: int, value: Any) -> conf.NetworkConfig:
    if not isinstance(value, dict):
        raise gojson.JsonError(f"delegates[{index}]: an object is needed, not {gojson.kind_of(value)}")
    try:
        return conf.parse(gojson.dumps(value))
    except (DecodingFailureError, InvalidNetworkConfigError) as error:
        raise error.with_context(f"delegates[{index}] of the Multus CNI configuration") from error


def _valid_attachments(fields: Mapping[str, Any]) -> tuple[tuple[str, str], ...] | None:
    """Both spellings of the key (CNI SPEC 1.1.0 before and after the tag), the newer one first.

    None only where neither is there. A null is an empty list: so libcni spells one (`GCNetworkList` with a nil slice).
    """
    for key in _VALID_ATTACHMENTS:
        items = gojson.get_list(fields, key)
        if items is None:
            continue
        pairs = []
        for index, item in enumerate(items):
            if not isinstance(item, dict):
                raise gojson.JsonError(f"{key}[{index}]: an object is needed, not {gojson.kind_of(item)}")
            pairs.append((gojson.get_str(item, "containerID") or "", gojson.get_str(item, "ifname") or ""))
        return tuple(pairs)
    return () if any(key.lower() in _VALID_ATTACHMENTS for key in fields) else None
