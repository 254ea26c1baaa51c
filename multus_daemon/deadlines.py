"""Every deadline and time budget of the daemon and the shim, in the order in which a request meets them."""

from __future__ import annotations
