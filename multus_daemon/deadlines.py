"""Deadlines and time budgets of the daemon and the shim, in the order in which a request meets them.

All values are seconds. A pair is the first and the longest pause of a back-off, or a range. Docstrings name the values
that must stay larger or smaller; `tests/unit/test_deadlines.py` asserts these relations. `DELEGATE_SECONDS` and
`RECONCILE_SECONDS` are the defaults of settings; the relations hold for the defaults.

Polling intervals that no caller waits for, and retention times, are in the modules that use them.

NB: the shim's build loads this file by its path, with no package installed, and `multus-probe` starts every few
seconds. Import only modules that every interpreter has loaded anyway.
"""

from __future__ import annotations

from types import MappingProxyType

# --- the kubelet: the outermost bounds, not ours ---------------------------------------------------------------------
KUBELET_RUN_SANDBOX_SECONDS = 240.0
"""The kubelet's limit for starting a sandbox: twice its `runtimeRequestTimeout` of 2 minutes."""
KUBELET_STOP_SANDBOX_SECONDS = 120.0
"""The kubelet's limit for stopping a sandbox: its `runtimeRequestTimeout`."""

# --- the shim: `SHIM_<NAME>_SECONDS` is `deadlines.<name>_ms` in its sources (`multus_shim/build.py`) ----------------
SHIM_STDIN_SECONDS = 30.0
"""The runtime must write the network configuration within this time."""
SHIM_STDOUT_SECONDS = 30.0
"""The runtime must read the result within this time."""
SHIM_DAEMON_WAIT_SECONDS = 60.0
"""ADD, CHECK and GC wait this long for a listening daemon."""
SHIM_REPLY_SECONDS = 180.0
"""ADD, CHECK and GC wait this long for the reply. Above VERB_SECONDS."""
SHIM_DEL_WAIT_SECONDS = 10.0
"""DEL waits this long for a listening daemon. A restart takes less, and the spool is the fallback."""
SHIM_DEL_REPLY_SECONDS = 30.0
"""DEL waits this long for the reply, then goes to the spool while the daemon continues.

The sum with SHIM_DEL_WAIT_SECONDS is below KUBELET_STOP_SANDBOX_SECONDS: the runtime gets a success in time.
"""
SHIM_STATUS_REPLY_SECONDS = 10.0
"""STATUS waits this long for the reply; it does not wait for a daemon to listen. Above VERB_SECONDS["STATUS"]."""

# --- programs beside the shim ----------------------------------------------------------------------------------------
PROBE_SECONDS = 5.0
"""`multus-probe` waits this long for the daemon. Below the `timeoutSeconds` of the manifests' probes."""
INSTALL_TRY_SECONDS = 10.0
"""Limit for a newly installed shim to print its versions, and for a daemon's socket to accept."""

# --- the socket: `api` -----------------------------------------------------------------------------------------------
SOCKET_LOOK_SECONDS = 5.0
"""Interval at which the daemon checks whose the socket is: its own, or that of another living daemon."""
SOCKET_CONNECT_SECONDS = 1.0
"""Limit for connecting to a daemon's socket. A daemon that does not accept in time is busy, not dead."""
HEAD_SECONDS = 30.0
"""The head of a request must arrive within this time; then the connection is closed."""
BODY_SECONDS = 30.0
"""The body of a request must arrive within this time; then the error has code 5."""
ADMIN_SECONDS = 60.0
"""Limit for one answer to `multusctl`, including the wait for its turn."""
METRICS_SECONDS = 10.0
"""Lifetime of one connection to the metrics port. Prometheus waits as long by default."""
METRICS_HANDSHAKE_SECONDS = 5.0
"""Limit for the TLS handshake on the metrics port, in addition to METRICS_SECONDS: no scrape of a busy node is lost."""
METRICS_REVIEW_SECONDS = 4.0
"""Limit for the API server's review of a scraper's token. Below METRICS_SECONDS."""
TRAFFIC_SECONDS = 0.5
"""Limit for reading the counters of pods' interfaces in a scrape. Far below METRICS_SECONDS."""
TRAFFIC_FRESH_SECONDS = 1.0
"""Counters that are younger than this are not read again: each read takes the kernel's lock of links (RTNL)."""
ROOM_LOOK_SECONDS = 0.02
"""At the maximum number of connections, interval for checking whether one has ended."""
ACCEPT_PAUSE_SECONDS = 1.0
"""Pause before the socket or a port accepts again, when descriptors are scarce."""
LINGER_SECONDS = 2.0
"""After an answer, the server reads this long what the client still sends, so that the client can read the answer."""
VERB_SECONDS = MappingProxyType({"ADD": 170.0, "DEL": 110.0, "CHECK": 170.0, "STATUS": 9.0, "GC": 170.0})
"""Limit for one verb, by CNI_COMMAND, with its wait for a slot. Then it is undone, and the error has code 11.

Below the time that the shim waits for the reply, so that the runtime reads the reason. DEL, which the shim spools, is
below KUBELET_STOP_SANDBOX_SECONDS instead.
"""
SLOT_WAIT_SECONDS = MappingProxyType({"DEL": 20.0, "STATUS": 5.0, "GC": 20.0, "ADD": 40.0, "CHECK": 40.0})
"""Each plugin waits this long for a slot of `maxDelegateProcesses`, by CNI_COMMAND.

With the time of one plugin it is below VERB_SECONDS: a busy node answers `node is busy`, not with a deadline.
"""
REQUEST_WAIT_SECONDS = MappingProxyType({"DEL": 60.0, "STATUS": 5.0, "GC": 20.0, "ADD": 100.0, "CHECK": 100.0})
"""Each request waits this long for its turn (`connectionLimit`), before all other waits, by CNI_COMMAND.

Enough for a hundred pods at once at two pods a second. DEL is above SHIM_DEL_REPLY_SECONDS: it is in the spool before
it fails. The sum with SLOT_WAIT_SECONDS is below VERB_SECONDS, to leave time for a plugin.
"""

# --- the verbs: `pod`, `node` ----------------------------------------------------------------------------------------
UNDO_SECONDS = 60.0
"""Limit for undoing one attachment, independent of its request.

The sum with VERB_SECONDS["ADD"] is below KUBELET_RUN_SANDBOX_SECONDS: the undo ends before the kubelet retries.
"""
SETTLE_SECONDS = 30.0
"""After a network of a pod failed, the ADDs of its others have this long to end by themselves. Below DELEGATE_SECONDS.

A plugin that is killed half-way leaves state that its DEL may not find. Every usual ADD, including DHCP, takes less.
"""
NETWORK_STATUS_SECONDS = 5.0
"""Limit for an ADD's network-status. Above NETWORK_STATUS_PATIENCE_SECONDS, after which a store gives up."""
DETACH_SECONDS = 100.0
"""Limit for all networks of a container together. Below VERB_SECONDS["DEL"]."""
RECORD_READ_SECONDS = 20.0
"""Limit for reading one container's record. Below SHIM_DEL_REPLY_SECONDS, so that the runtime reads the error."""
STATUS_PLUGINS_SECONDS = 8.0
"""Limit for the cluster network's STATUS. Below VERB_SECONDS["STATUS"], so that the runtime reads code 50."""
GC_SWEEP_SECONDS = 100.0
"""A GC deletes containers until this long after its arrival. Below GC_TOTAL_SECONDS, to leave time for networks."""
GC_TOTAL_SECONDS = 150.0
"""A GC calls plugins until this long after its arrival. Below VERB_SECONDS["GC"], to leave time for the answer."""
GC_CONTAINER_SECONDS = 30.0
"""Limit for one container's networks in a GC."""
GC_NETWORK_SECONDS = 30.0
"""Limit for one network's plugins in a GC; the ADDs of that network wait meanwhile. Below SHIM_REPLY_SECONDS."""

# --- one call of a plugin: `plugins` ---------------------------------------------------------------------------------
DELEGATE_SECONDS = 120.0
"""Limit for one call of one plugin, built-in or not; the default of `delegateTimeoutSeconds`."""
SLOW_ADD_SECONDS = 10.0
"""An ADD that runs longer causes a Warning Event about its pod. Below DELEGATE_SECONDS, after which a plugin is ended.
"""
DELEGATE_DEL_SECONDS = 60.0
"""Limit for a DEL by a process: when one plugin hangs, the other networks still have time."""
PLUGIN_LOOKUP_SECONDS = 5.0
"""Limit for finding or checking a plugin's file in `binDir`. Below STATUS_PLUGINS_SECONDS.

Four of them fit into SHIM_DEL_REPLY_SECONDS, so that the runtime reads the reason.
"""
KILL_GRACE_SECONDS = 2.0
"""Time between SIGTERM and SIGKILL for a child process."""
KILLED_SECONDS = 5.0
"""Limit for a child to end after SIGKILL (state D delays it), and for a cancelled start to have a process to kill."""
PIPES_AFTER_EXIT_SECONDS = 1.0
"""Limit for the end of a child's output after its exit. The plugin's own output is in the pipe when it exits; a
grandchild may hold the pipe open for ever.
"""
TOOL_SECONDS = 30.0
"""Limit for one run of a program such as iptables or nft. Below DELEGATE_DEL_SECONDS, as a built-in waits for its end.
"""

# --- inside a built-in plugin, and `kernel`; each below DELEGATE_DEL_SECONDS -----------------------------------------
BUILTIN_UNDO_SECONDS = 30.0
"""Limit for one undo step of a failed built-in."""
HOST_LOCAL_LOCK_SECONDS = 10.0
"""Limit for taking the lock of a host-local network."""
IPTABLES_LOCK_SECONDS = 20
"""Limit for taking the lock of iptables, whole seconds. Below TOOL_SECONDS, so that iptables reports the reason."""
ADDRESSES_SECONDS = 5.0
"""Limit for new IPv6 addresses to stop being tentative; as the reference plugins wait."""
BRIDGE_PORT_UP_SECONDS = 2.55
"""Limit for the carrier of a bridge's new port, usually a millisecond. The reference polls five times in this time."""
DHCP_OFFER_SECONDS = 30.0
"""Limit for a DHCP server to give a lease. At most SETTLE_SECONDS, which other networks of the pod have."""
DHCP_RELEASE_SECONDS = 10.0
"""Limit for giving one back: one message, without an answer."""
RETURN_SECONDS = 1.0
"""A DEL without its namespace waits this long for the kernel to return the device of `host-device`."""
NETLINK_SECONDS = 10
"""Limit for one answer of the kernel, whole seconds."""

# --- devices: `cluster.kubelet` --------------------------------------------------------------------------------------
KUBELET_DEVICES_SECONDS = 10.0
"""Limit for the kubelet's podresources API, all calls together; as upstream."""

# --- the API server: `cluster.kube` ----------------------------------------------------------------------------------
API_REQUEST_SECONDS = 10.0
"""Default limit for one request, and for the head of a watch."""
POD_EVENT_SECONDS = 2.5
"""An ADD waits this long for the watch's event of its pod."""
UNSYNCED_SECONDS = 1.0
"""Instead of POD_EVENT_SECONDS while the watch is down, and always for a network. At most POD_EVENT_SECONDS."""
API_READ_SECONDS = 5.0
"""Limit for the one GET of an object that the informer does not have. Below API_REQUEST_SECONDS."""
NETWORK_STATUS_PATIENCE_SECONDS = 2.0
"""Limit for all attempts at a network-status while its ADD waits. Below NETWORK_STATUS_SECONDS."""
NETWORK_STATUS_ATTEMPT_SECONDS = 3.0
"""Limit for one attempt at a network-status."""
NETWORK_STATUS_RETRY_SECONDS = (0.25, 4.0)
"""Pauses between background attempts. An attempt, a pause and the next attempt fit into 10 s."""
EVENT_ATTEMPT_SECONDS = 5.0
"""Limit for one attempt at an Event. Below EVENT_KEEP_TRYING_SECONDS."""
EVENT_KEEP_TRYING_SECONDS = 60.0
"""Limit for all attempts at an Event. Then it is dropped, and the next Event is sent."""
NAMESPACE_LABELS_SECONDS = 60.0
"""The labels of a namespace are read again after this time."""
ADDRESSES_LISTED_SECONDS = 5.0
"""The first ADD with an address of the cluster waits this long for the list of those that are held."""
ADDRESSES_LOOK_SECONDS = 2.0
"""While the watch of the cluster's addresses is cut, or they are not known yet, the API server is asked so often."""
ADDRESSES_COMPARED_SECONDS = 600.0
"""Interval between two comparisons of this node's addresses with the cluster's."""
ADDRESSES_REFUSED_SECONDS = 60.0
"""While the API server refuses this node's addresses, it is asked so often."""
ADDRESSES_OWN_SECONDS = 3.0
"""Limit for the list of this node's addresses: an API server that starts answers the next attempt sooner."""
ADDRESS_COOLS_SECONDS = 60.0
"""An address that this node has freed is not given again for this time while another one is free."""
ADDRESS_ENTRY_SECONDS = 0.5
"""The entry in the pool of whereabouts' binary is written this long after the reservation: after the ADD's answer."""
ADDRESS_REPORTED_SECONDS = 5.0
"""The watch reports a new reservation within this time."""
ADDRESS_RETRY_SECONDS = (0.5, 30.0)
"""Pauses between attempts to free or assert addresses while the API server is away."""
ADDRESS_TAKEN_SECONDS = 5.0
"""An address that another pod has, too, is looked at again after this time; only then it is reported."""
ADDRESS_UNRECORDED_SECONDS = 10.0
"""An address that a namespace has without a record is looked at again after this time: no DEL will come."""
ADDRESS_WAITS_SECONDS = 5.0
"""An address whose DEL has not ended is looked at again after this time, if the record does not change before."""
NODES_GONE_SECONDS = 2.0
"""Limit for asking which nodes of a full range are gone; the next ADD asks for others."""
NODE_PRESENT_SECONDS = 15.0
"""A node that is present is not asked for again within this time."""
CLAIMS_KEPT_SECONDS = 600.0
"""Devices of a pod's ResourceClaims are kept in memory for this time: its ADD comes after it, or again."""
CONDITION_RETRY_SECONDS = (1.0, 60.0)
"""Pauses between attempts at pod conditions while the API server is away."""
FORBIDDEN_SECONDS = 3600.0
"""After a refusal by RBAC no device status is written for this time."""
NODE_READ_SECONDS = 10.0
"""Limit for reading the Node object at start."""
INFORMER_LIST_SECONDS = 30.0
"""Limit for one page of a list."""
INFORMER_WATCH_SECONDS = (300, 600)
"""Range of the random timeout that each watch asks the server for, so that the nodes' watches do not end together."""
INFORMER_INACTIVITY_SECONDS = 180.0
"""A watch that is silent this long is treated as dead. The API server sends a bookmark about every minute."""
CERTIFICATE_REQUEST_SECONDS = 30.0
"""Limit for one request of a node for its certificate."""
CERTIFICATE_SECONDS = 120.0
"""Limit for one attempt at a node's certificate; the next one continues with the same request."""

# --- controllers -----------------------------------------------------------------------------------------------------
SPOOL_LOOK_SECONDS = 2.0
"""Interval between scans of the spool."""
PREDECESSOR_SECONDS = 60.0
"""After a daemon's start, its predecessor may serve requests this long. Above DRAIN_SECONDS and what follows it."""
SPOOL_RETRY_SECONDS = (5.0, 300.0)
"""Pauses between attempts at an entry of the spool."""
SPOOL_CUT_OFF_SECONDS = 3600.0
"""An entry of the spool that is incomplete for this long has no living shim. Above the longest life of a shim."""
RECONCILE_SECONDS = 300.0
"""Interval of reconciling: orphans, and pods without their networks. The default of `reconcileSeconds`."""
RECONCILE_BLIND_SECONDS = 15.0
"""Interval of reconciling while the node's pods are unknown. Below RECONCILE_SECONDS."""
RECONCILE_RUN_SECONDS = 60.0
"""One reconciling begins deletions within this time; the next one does the rest. Below RECONCILE_SECONDS."""
RECONCILE_CONTAINER_SECONDS = 30.0
"""Limit for deleting one orphan's networks. Below RECONCILE_RUN_SECONDS."""
RECONCILE_RETRY_SECONDS = (5.0, 3600.0)
"""Pauses between attempts at an orphan that can't be deleted. The first are shorter than RECONCILE_SECONDS, for a
plugin that was missing for a moment.
"""
STATUSES_BLIND_SECONDS = 2.0
"""At start, interval between attempts at the network-statuses while the node's pods are unknown."""
STATUSES_POD_SECONDS = 30.0
"""Limit for updating one pod's network-status at start, with the wait for its lock. Above NETWORK_STATUS_SECONDS."""
KEEP_SECONDS = 170.0
"""Limit for adapting one running container to its annotation and repairing it. As for an ADD: plugins may run."""
COMPARE_SECONDS = 10.0
"""Limit for comparing one attachment with its record, with the CHECK of a plugin binary. Below KEEP_SECONDS."""
REPAIR_SECONDS = 30.0
"""Limit for one repair. Below KEEP_SECONDS."""
KEEP_END_SECONDS = 5.0
"""Longest wait for the end of work on a running container that was told to stop."""
KEEP_SETTLE_SECONDS = 0.01
"""Changes that the kernel reports within this time are handled together."""
KEEP_BUSY_SECONDS = 0.1
"""Instead of KEEP_SETTLE_SECONDS while a request runs, which causes more changes."""
KEEP_NOISE_SECONDS = 0.05
"""Interval for reading changes that concern no container."""
KEEP_YOUNG_SECONDS = 1.0
"""A container is first compared this long after its ADD: the kernel may report a second later that its links are up."""
KEEP_HELD_SECONDS = 0.25
"""Pause before the next attempt at a container that a request works on."""
KEEP_START_SECONDS = 60.0
"""After its start, a daemon compares the containers that it finds on record within this time."""
KEEP_INTERVAL_SECONDS = 600.0
"""Interval for comparing a container without a reported change: routes, and changes whose report was lost."""
KEEP_RETRY_SECONDS = (1.0, 300.0)
"""Pauses between attempts at a container that fails."""
KEEP_CALM_SECONDS = 600.0
"""Time in which an attachment is repaired only a few times, so that a program that undoes each repair is left alone."""
SET_ASIDE_SECONDS = 86400.0
"""An orphan is set aside, with no more attempts, this long after its first failure. Far above RECONCILE_RETRY_SECONDS,
so that there were many attempts.
"""
SET_ASIDE_LEAST_SECONDS = 3600.0
"""An orphan is set aside at the earliest this long after this daemon's first attempt: the node's clock may jump."""
PRIMARY_SETTLE_SECONDS = 10.0
"""A configuration must be unchanged this long before it replaces another one or, if unreadable, is skipped."""
PRIMARY_MISSING_SECONDS = 30.0
"""The primary network's file may be missing this long before another takes its place."""
RESTORE_SECONDS = (1.0, 60.0)
"""Pauses after the daemon restored `00-multus.conf`, which another program had changed or removed."""
RESTORE_CALM_SECONDS = 300.0
"""The pauses start again with the first after this long without a restore. Above the longest pause."""

# --- the end of the daemon: together below `terminationGracePeriodSeconds` of the manifests --------------------------
DRAIN_SECONDS = 20.0
"""Running requests have this long to end by themselves when the daemon stops.

The later steps of the stop may take 20 s more, so `terminationGracePeriodSeconds` of the daemon's pod must exceed their
sum: it is 45 in the manifests.
"""
ANNOUNCED_SECONDS = 0.5
"""Upstream's shim asks for the daemon's health, and sends its request within this time. Far below DRAIN_SECONDS."""
CANCELLED_SECONDS = 5.0
"""Requests cancelled after DRAIN_SECONDS have this long to undo their part. Above KILL_GRACE_SECONDS."""
CONNECTIONS_SECONDS = 2.0
"""Limit for connections to close, once their requests are drained."""
REPORT_SECONDS = 3.0
"""Limit for sending the statuses and events that still wait."""
LOG_FLUSH_SECONDS = 2.0
"""Limit for writing the log lines that still wait, for standard error and for the file each."""
