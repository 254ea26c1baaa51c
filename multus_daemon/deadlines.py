"""Every deadline and time budget of the daemon and the shim, in the order in which a request meets them.

All values are seconds, which each name says; a pair is the first and the longest pause of a back-off, or a range. Where
one value has to stay below another, a docstring says so, and `tests/unit/test_deadlines.py` asserts it.

A user sets two of them: `DELEGATE_SECONDS` and `RECONCILE_SECONDS` are defaults of `settings`. The relations hold for
the defaults.

What is not here: the pause between two looks of a loop that nobody waits for, and the age up to which something is
kept. They stand in the module that has the loop.

The shim's build loads this file by its path, with no package installed, and `multus-probe` starts every few seconds:
import nothing but what every interpreter has loaded anyway.
"""

from __future__ import annotations

from types import MappingProxyType

# --- the kubelet: not ours, the outermost bounds ---------------------------------------------------------------------

KUBELET_RUN_SANDBOX_SECONDS = 240.0
"""How long the kubelet waits for the start of a sandbox: twice its `runtimeRequestTimeout`, which is 2 minutes."""

KUBELET_STOP_SANDBOX_SECONDS = 120.0
"""How long the kubelet waits for the stop of a sandbox: its `runtimeRequestTimeout`."""

# --- the shim: `SHIM_<NAME>_SECONDS` is `deadlines.<name>_ms` in its sources (`multus_shim/build.py`) ----------------

SHIM_STDIN_SECONDS = 30.0
"""For the runtime to write the network configuration."""

SHIM_STDOUT_SECONDS = 30.0
"""For the runtime to read the result."""

SHIM_DAEMON_WAIT_SECONDS = 60.0
"""For ADD, CHECK and GC to find a daemon that listens."""

SHIM_REPLY_SECONDS = 180.0
"""For the reply to ADD, CHECK and GC. Above VERB_SECONDS."""

SHIM_DEL_WAIT_SECONDS = 10.0
"""As SHIM_DAEMON_WAIT_SECONDS, for DEL: a restart of the daemon takes less, and the spool is there."""

SHIM_DEL_REPLY_SECONDS = 30.0
"""As SHIM_REPLY_SECONDS, for DEL: then it goes to the spool, and the daemon goes on.

With SHIM_DEL_WAIT_SECONDS below KUBELET_STOP_SANDBOX_SECONDS, so that the runtime has its success in time.
"""

SHIM_STATUS_REPLY_SECONDS = 10.0
"""For the reply to STATUS, which waits for no daemon to come. Above VERB_SECONDS["STATUS"]."""

# --- those who stand beside the shim ---------------------------------------------------------------------------------

PROBE_SECONDS = 5.0
"""For the daemon's answer to `multus-probe`. Below the `timeoutSeconds` of the manifests' probes."""

INSTALL_TRY_SECONDS = 10.0
"""For a shim that was just installed to name its versions, and for a daemon's socket to accept."""

CTL_DAEMON_SECONDS = 2.0
"""For `multusctl` to find a daemon that listens; then it says how to start one. A person waits."""

CTL_SHIM_SECONDS = 300.0
"""For one call of the shim by `multusctl`. Above all that the shim waits for, so that its error is read."""

CTL_SECONDS = 2.0
"""For the daemon's answer to a question of `multusctl` that only looks. Then it says that there is none."""

KUBECTL_NODE_SECONDS = 15.0
"""For the answer of one node to `kubectl multus`, from its turn; the default of `--timeout`. Then it is named."""

# --- the socket: `server` --------------------------------------------------------------------------------------------

HEAD_SECONDS = 30.0
"""For the head of a request on the unix socket to arrive; then the connection is closed."""

BODY_SECONDS = 30.0
"""For the body of a request to arrive; then code 5."""

ADMIN_SECONDS = 60.0
"""For one answer to `multusctl`, the wait for its turn included."""

METRICS_SECONDS = 10.0
"""For one connection to the port of the metrics, from its beginning to its end; Prometheus waits as long by default."""

METRICS_PAUSE_SECONDS = 1.0
"""Until the next connection to it is accepted, where descriptors are scarce."""

WEBHOOK_REVIEW_SECONDS = 4.0
"""For one review of the admission webhook, its body and its wait for a turn included. Below the `timeoutSeconds` of the
manifests, so that the API server reads the answer.
"""

WEBHOOK_SECONDS = 8.0
"""For one connection to the webhook, from its beginning to its end. Above WEBHOOK_REVIEW_SECONDS."""

LINGER_SECONDS = 2.0
"""For reading what a client still sends after it was answered, so that it gets to reading the answer."""

VERB_SECONDS = MappingProxyType({"ADD": 170.0, "DEL": 110.0, "CHECK": 170.0, "STATUS": 9.0, "GC": 170.0})
"""For one verb, by CNI_COMMAND: its wait for a slot, its work. Then it is stopped, undoes its part, and is code 11.

Each is below what the shim waits, so that the caller reads the reason. Except DEL, which the shim leaves in its spool:
its bound is KUBELET_STOP_SANDBOX_SECONDS.
"""

SLOT_WAIT_SECONDS = MappingProxyType({"DEL": 20.0, "STATUS": 5.0, "GC": 20.0, "ADD": 40.0, "CHECK": 40.0})
"""For a slot of `maxDelegateProcesses` for each plugin, by CNI_COMMAND.

With the time of one plugin it is below VERB_SECONDS: a node that is busy answers `node is busy`, no deadline.
"""

REQUEST_WAIT_SECONDS = MappingProxyType({"DEL": 60.0, "STATUS": 5.0, "GC": 20.0, "ADD": 100.0, "CHECK": 100.0})
"""For the request's own turn, before all that, by CNI_COMMAND: see `connectionLimit`.

A hundred pods at once, of which 0.1 of a core attaches two in a second, are not sent away; that of DEL is above
SHIM_DEL_REPLY_SECONDS, after which it is in the spool and nobody waits for it. With SLOT_WAIT_SECONDS below
VERB_SECONDS: there is time left for a plugin.
"""

# --- the verbs: `engine` ---------------------------------------------------------------------------------------------

UNDO_SECONDS = 60.0
"""For undoing one attachment, whatever became of its request.

With VERB_SECONDS["ADD"] below KUBELET_RUN_SANDBOX_SECONDS: it is done before the kubelet tries again.
"""

SETTLE_SECONDS = 30.0
"""Once a network has failed: for those under way beside it to come to their end by themselves.

A plugin that is ended half-way leaves what its DEL need not find, so there is time for every usual ADD, a DHCP server's
answer included. One that hangs does not keep the runtime from reading the error. Below DELEGATE_SECONDS.
"""

NETWORK_STATUS_SECONDS = 5.0
"""For an ADD's network-status at most. Above NETWORK_STATUS_PATIENCE_SECONDS: a store gives up by itself."""

DETACH_SECONDS = 100.0
"""For all networks of a container together. Below VERB_SECONDS["DEL"]."""

RECORD_READ_SECONDS = 20.0
"""For reading the record of one container. Below SHIM_DEL_REPLY_SECONDS, so that the runtime is told of the disk."""

STATUS_PLUGINS_SECONDS = 8.0
"""For STATUS of the cluster network's plugins. Below VERB_SECONDS["STATUS"], so that the runtime reads code 50."""

GC_SWEEP_SECONDS = 100.0
"""From the arrival of a GC: containers are deleted until then. Below GC_TOTAL_SECONDS, so that networks have theirs."""

GC_TOTAL_SECONDS = 150.0
"""From the arrival of a GC: networks are asked until then. Below VERB_SECONDS["GC"]: it must tell what it has left."""

GC_CONTAINER_SECONDS = 30.0
"""For one container's networks in a GC."""

GC_NETWORK_SECONDS = 30.0
"""For the plugins of one network in a GC, while which the ADDs of that network wait. Below SHIM_REPLY_SECONDS."""

# --- one call of a plugin: `delegates` -------------------------------------------------------------------------------

DELEGATE_SECONDS = 120.0
"""For one call of one plugin, built-in or not; the default of `delegateTimeoutSeconds`."""

DELEGATE_DEL_SECONDS = 60.0
"""As DELEGATE_SECONDS, for DEL by a process, at most: where one hangs, time is left for those of the other networks."""

PLUGIN_LOOKUP_SECONDS = 5.0
"""For one look at a plugin's file, such as its search in `binDir`. Below STATUS_PLUGINS_SECONDS.

Four of them fit into SHIM_DEL_REPLY_SECONDS, so that the runtime reads the reason.
"""

KILL_GRACE_SECONDS = 2.0
"""Between SIGTERM and SIGKILL for a child process."""

KILLED_SECONDS = 5.0
"""For a child process to be gone after SIGKILL, which works at once, except in the kernel (state D); and for one whose
start was cancelled to be there, so that it can be ended.
"""

PIPES_AFTER_EXIT_SECONDS = 1.0
"""For the end of a child's output after its exit. A grandchild may hold it open for ever; what the plugin itself wrote
is in the pipe when it exits.
"""

TOOL_SECONDS = 30.0
"""For one run of iptables, nft and the like. Below DELEGATE_DEL_SECONDS, as a built-in waits for it."""

# --- inside a built-in plugin: `builtin`, `netlink`; each below DELEGATE_DEL_SECONDS ---------------------------------

BUILTIN_UNDO_SECONDS = 30.0
"""For one step of what a failed built-in undoes."""

HOST_LOCAL_LOCK_SECONDS = 10.0
"""For the lock of a host-local network."""

IPTABLES_LOCK_SECONDS = 20
"""For the lock of iptables, whole seconds. Below TOOL_SECONDS, so that iptables tells why it failed."""

ADDRESSES_SECONDS = 5.0
"""For new IPv6 addresses to be no longer tentative; as the reference plugins wait."""

BRIDGE_PORT_UP_SECONDS = 2.55
"""For the carrier of a bridge's new port. The reference looks five times in this time; a millisecond as a rule."""

NETLINK_SECONDS = 10
"""For one answer of the kernel, whole seconds."""

# --- devices: `kubelet` ----------------------------------------------------------------------------------------------

KUBELET_DEVICES_SECONDS = 10.0
"""For the kubelet's podresources, all of it; upstream's."""

# --- the API server: `kube` ------------------------------------------------------------------------------------------

API_REQUEST_SECONDS = 10.0
"""For one request, unless it says otherwise, and for the head of a watch."""

POD_EVENT_SECONDS = 2.5
"""For the watch's event of a pod: how much earlier its ADD may come."""

UNSYNCED_SECONDS = 1.0
"""As POD_EVENT_SECONDS, where no events come now, and for networks. At most POD_EVENT_SECONDS."""

API_READ_SECONDS = 5.0
"""For the one read of a pod or a network that the informer does not have. Below API_REQUEST_SECONDS."""

NETWORK_STATUS_PATIENCE_SECONDS = 2.0
"""For all attempts at a network-status while its ADD waits. Below NETWORK_STATUS_SECONDS."""

NETWORK_STATUS_ATTEMPT_SECONDS = 3.0
"""For one attempt at a network-status."""

NETWORK_STATUS_RETRY_SECONDS = (0.25, 4.0)
"""Between attempts in the background. An attempt, a pause and the next attempt have to fit into 10 s."""

EVENT_ATTEMPT_SECONDS = 5.0
"""For one attempt at an Event. Below EVENT_KEEP_TRYING_SECONDS."""

EVENT_KEEP_TRYING_SECONDS = 60.0
"""For all attempts at an Event. Then it is dropped, and the next one has its turn."""

NODE_READ_SECONDS = 10.0
"""For the look at the node's name, at start."""

INFORMER_LIST_SECONDS = 30.0
"""For one page of a list."""

INFORMER_WATCH_SECONDS = (300, 600)
"""The server is asked to end each watch after a time in between, so that those of all nodes do not end at once."""

INFORMER_INACTIVITY_SECONDS = 180.0
"""A watch that is silent for so long counts as dead. The API server sends a bookmark about every minute."""

WATCH_INACTIVITY_SECONDS = 330.0
"""The same for a watch without bookmarks, the approver's. Above APPROVER_WATCH_SECONDS: quiet ones end before it."""

APPROVER_REQUEST_SECONDS = 30.0
"""For one request of the certificate approver, and of a node for its certificate."""

APPROVER_WATCH_SECONDS = 300
"""The approver's watch ends after it, and all is listed again: what was given up is tried anew."""

CERTIFICATE_SECONDS = 120.0
"""For one attempt at a node's certificate; the next one goes on with the same request."""

# --- controllers: what an operator sees of the long loops ------------------------------------------------------------

SPOOL_LOOK_SECONDS = 2.0
"""Between two looks at the spool."""
PREDECESSOR_SECONDS = 60.0
"""How long after the start of a daemon its predecessor may still serve requests: above DRAIN_SECONDS, and what a daemon
does after it.
"""

SPOOL_RETRY_SECONDS = (5.0, 300.0)
"""Between attempts at an entry of the spool."""

SPOOL_CUT_OFF_SECONDS = 3600.0
"""A shim that writes its entry for so long has ended. Above the longest life of a shim."""

RECONCILE_SECONDS = 300.0
"""Between two runs; the default of `reconcileSeconds`."""

RECONCILE_BLIND_SECONDS = 15.0
"""To the next run where it is not known which pods there are. Below RECONCILE_SECONDS."""

RECONCILE_RUN_SECONDS = 60.0
"""For one run: deletions are begun within it, the rest is for the next. Below RECONCILE_SECONDS."""

RECONCILE_CONTAINER_SECONDS = 30.0
"""For one container's networks in a run. Below RECONCILE_RUN_SECONDS."""

RECONCILE_RETRY_SECONDS = (60.0, 3600.0)
"""Between attempts at a container that can't be deleted."""

STATUSES_BLIND_SECONDS = 2.0
"""To the next look at the network-statuses, at start, while it is not known which pods there are."""

STATUSES_POD_SECONDS = 30.0
"""For bringing one pod's network-status up to date at start, its wait for the container's lock included.

Above NETWORK_STATUS_SECONDS.
"""

SET_ASIDE_SECONDS = 86400.0
"""From the first failure to detach an orphan to its being set aside: nobody tries any more. Far above
RECONCILE_RETRY_SECONDS, so that it was tried many times."""

PRIMARY_SETTLE_SECONDS = 10.0
"""So long a configuration has to be there unchanged: to take over from another, and, unreadable, to be passed over."""

PRIMARY_MISSING_SECONDS = 30.0
"""The primary network's file may be gone for so long before another takes its place."""

RESTORE_SECONDS = (1.0, 60.0)
"""Pause after putting our configuration back."""

RESTORE_CALM_SECONDS = 300.0
"""After so long without a need to put it back RESTORE_SECONDS begin anew. Above their longest."""

# --- the end of the daemon: together below `terminationGracePeriodSeconds` of the manifests --------------------------

DRAIN_SECONDS = 20.0
"""For running requests to end by themselves once the daemon stops.

What comes after it may take 20 s more (plugins that are ended, statuses that go out), so the
`terminationGracePeriodSeconds` of the daemon's pod must be larger than both together: 45 in the manifests.
"""

CANCELLED_SECONDS = 5.0
"""For requests that were cancelled after DRAIN_SECONDS to undo their part. Above KILL_GRACE_SECONDS."""

CONNECTIONS_SECONDS = 2.0
"""For connections to close, once their requests are drained."""

REPORT_SECONDS = 3.0
"""For statuses and events that still wait to go out."""

LOG_FLUSH_SECONDS = 2.0
"""For lines of the log that still wait to be written, to standard error and to the file each."""
