"""The table of the incidents, in the order of the page."""

from __future__ import annotations

from typing import Final

from tests.record import (
    api_server_away,
    burst,
    default_route,
    duplicate_address,
    half_written_caches,
    half_written_primary,
    hanging_network,
    list_without_its_keys,
    lost_del,
    lost_interface,
    newer_shim,
    one_after_another,
    readiness_indicator,
    repeated_add,
    status_each_second,
    text_file_busy,
    vanishing_configuration,
)
from tests.record.incident import Incident

_MODULES = (
    newer_shim,
    vanishing_configuration,
    burst,
    readiness_indicator,
    half_written_primary,
    list_without_its_keys,
    lost_del,
    half_written_caches,
    duplicate_address,
    repeated_add,
    hanging_network,
    one_after_another,
    default_route,
    lost_interface,
    status_each_second,
    api_server_away,
    text_file_busy,
)
ROWS: Final[dict[str, Incident]] = {module.ROW.name: module.ROW for module in _MODULES}
