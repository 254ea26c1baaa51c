"""Every metric as a value: its name, labels, meaning, and the question of an operator that it answers.

`docs/metrics.md` is made from this (`make metrics`). Durations are in seconds. A metric that no page uses fails a test.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

from multus_daemon.metrics.registry import Declared, Label
from multus_daemon.runtime.timeline import Stage

Outcome: TypeAlias = Literal["success", "refused", "error", "timeout", "cancelled", "skipped", "warned"]
"""How a counted operation ends. `refused`: bad input, nothing was changed; `timeout`: at a deadline; `cancelled`: by a
DEL or the daemon's stop; `skipped`: not done on purpose; `warned`: allowed with warnings.
"""

OUTCOMES: Final[frozenset[str]] = frozenset(get_args(Outcome))
VERBS: Final = frozenset({"ADD", "DEL", "CHECK", "STATUS", "GC"})
REQUESTS: Final = frozenset({"ips", "mac", "infiniband-guid", "bandwidth", "portMappings"})
STAGES: Final[frozenset[str]] = frozenset(get_args(Stage))
REVIEWED: Final = frozenset(
    {"NetworkAttachmentDefinition", "Pod", "Deployment", "DaemonSet", "StatefulSet", "ReplicaSet", "Job", "CronJob"}
)
NETWORKS_MAX: Final = 100
PLUGINS_MAX: Final = 64


def _outcome(*outcomes: Outcome) -> Label:
    return Label("outcome", frozenset(outcomes))


_VERB: Final = Label("verb", VERBS)
_OUTCOME: Final = _outcome("success", "refused", "error", "timeout", "cancelled")
_NETWORK: Final = Label("network", most=NETWORKS_MAX)
_RESOURCE: Final = Label("resource", frozenset({"pods", "networks"}))
_READ: Final = Label("resource", frozenset({"pods", "networks"}))
_METHODS: Final = frozenset({"get", "put", "head", "post", "delete", "connect", "options", "trace", "patch"})
_CODES: Final = frozenset(map(str, range(100, 600)))

REQUEST: Final = (
    Declared(
        "multus_server_request_total",
        # Name, labels and help are upstream's, so that dashboards keep working.
        "Counter of HTTP requests",
        "Do requests reach the daemon, and how many does it answer with an error?",
        (
            Label("handler", frozenset({"/cni", "/delegate", "/healthz", "/readyz", "/admin", "NotFound"})),
            Label("code", _CODES),
            Label("method", _METHODS),
        ),
        from_start=False,
    ),
    Declared(
        "multus_cni_request_duration_seconds",
        "Time from a decoded CNI request to its answer",
        "How many pods get their networks, and how fast?",
        (_VERB, _OUTCOME),
        (0.005, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30, 120),
    ),
    Declared(
        "multus_cni_stage_duration_seconds",
        "Time of a request by stage: queue (slot, other work on the container), gather (pod, networks, devices), plan, "
        "record (write ahead), plugin (all together), keep (routes, results), publish (network-status, Events)",
        "Where does the time of a slow ADD or DEL go: the queue, the API server, the disk, or plugins?",
        (Label("verb", frozenset({"ADD", "DEL", "CHECK"})), Label("stage", STAGES)),
        (0.001, 0.005, 0.025, 0.1, 0.5, 5),
    ),
    Declared(
        "multus_cni_requests_in_flight",
        "CNI requests in progress",
        "Is the daemon busy, or does a request hang?",
        (_VERB,),
    ),
    Declared(
        "multus_cni_requests_waiting",
        "CNI requests that wait because of connectionLimit",
        "Do pods wait because the daemon may serve too few requests at once?",
        (_VERB,),
    ),
    Declared(
        "multus_refused_peers_total",
        "Requests on the socket from users without access",
        "Does a process without access try to use the daemon's socket?",
    ),
    Declared(
        "multus_log_lines_dropped_total",
        "Log lines that could not be written: no reader, or the disk failed",
        "Is the log complete?",
        (Label("to", frozenset({"stderr", "file"})),),
        from_start=False,
    ),
)
NETWORK: Final = (
    Declared(
        "multus_network_add_duration_seconds",
        "Time of the ADD of one network of a pod, all of its plugins; only successes have buckets",
        "Which network is slow, and which one fails?",
        (_NETWORK, _OUTCOME),
        (0.05, 0.25, 1, 5),
        only_successes=True,
    ),
    Declared(
        "multus_attachments",
        "Attachments on record",
        "How many attachments does a network have on this node?",
        (_NETWORK,),
    ),
    Declared(
        "multus_attachments_broken",
        "Attachments that differ from their record, as last compared",
        "Does a network of a running pod not work, because something on the node has changed it?",
        (_NETWORK,),
    ),
    Declared(
        "multus_repairs_total",
        "Repairs of attachments, each of one thing that differed",
        "Does something on the node change the pods' networks again and again?",
        (_outcome("success", "error"),),
        from_start=False,
    ),
    Declared(
        "multus_hotplug_total",
        "Networks attached to (ADD) or detached from (DEL) running pods by their annotation",
        "Do running pods get the networks of their changed annotation?",
        (Label("verb", frozenset({"ADD", "DEL"})), _outcome("success", "error")),
        from_start=False,
    ),
    Declared(
        "multus_ipam_used_ratio",
        "Share of a network's fullest range set that is given (built-in host-local), 0 to 1, if used since the start",
        "Will a network run out of addresses on this node?",
        (_NETWORK,),
    ),
    Declared(
        "multus_address_range_used_ratio",
        "Share of a network's fullest range that the whole cluster holds (whereabouts), 0 to 1, if the node uses it",
        "Will a network run out of addresses in the whole cluster?",
        (_NETWORK,),
    ),
    Declared(
        "multus_addresses_taken",
        "Addresses of this node's pods that another pod has, too (whereabouts)",
        "Has something given an address of a running pod to another one?",
    ),
    Declared(
        "multus_requests_unmet_total",
        "Requests of pods (ips, mac, ...) that no plugin supports or that the result does not show",
        "Do pods run without the address or the bandwidth that they asked for?",
        (Label("request", REQUESTS),),
    ),
    Declared(
        "multus_check_failures_total",
        "CHECKs of plugins that failed although the kernel has what the ADD made",
        "Does a plugin miss something that the daemon cannot see, such as packet filter rules?",
    ),
    Declared(
        "multus_pods_lacking_networks",
        "Pods that run without networks that they asked for",
        "Do pods run without their networks?",
    ),
)
TRAFFIC: Final = {
    "receive_packets": ("Packets that pods received", "How much do pods receive?"),
    "transmit_packets": ("Packets that pods sent", "How much do pods send?"),
    "receive_bytes": ("Bytes that pods received", "Which network is loaded by what pods receive?"),
    "transmit_bytes": ("Bytes that pods sent", "Which network is loaded by what pods send?"),
    "receive_errors": ("Packets with errors that pods received", "Is the path to the pods damaged?"),
    "transmit_errors": ("Packets that pods could not send because of errors", "Is the path from the pods damaged?"),
    "receive_drops": ("Received packets that were dropped", "Are pods too slow to take what they receive?"),
    "transmit_drops": ("Packets to send that were dropped", "Do pods send more than the path takes?"),
}
"""Meaning and question of each figure of traffic by its part of the metric's name, from the pod's point of view."""
NETWORK_TRAFFIC: Final = tuple(
    Declared(f"multus_network_{name}_total", f"{what} on secondary interfaces", question, (_NETWORK,))
    for name, (what, question) in TRAFFIC.items()
)
PLUGIN: Final = (
    Declared(
        "multus_plugin_duration_seconds",
        "Time of one call of one plugin, built in or a binary; only successes have buckets",
        "Which plugin is slow, hangs or fails?",
        (Label("plugin", most=PLUGINS_MAX), _VERB, _OUTCOME),
        (0.0025, 0.01, 0.05, 0.25, 1, 5, 30),
        only_successes=True,
    ),
    Declared(
        "multus_plugin_processes_limit",
        "Maximum number of concurrent plugin processes",
        "How much may run at once with the memory limit of the daemon's pod?",
    ),
    Declared(
        "multus_plugin_processes_running",
        "Plugin processes that run",
        "Are all processes in use?",
        (_VERB,),
    ),
    Declared(
        "multus_plugin_processes_waiting",
        "Calls of plugins that wait for a process",
        "Do pods start faster than the memory limit allows?",
        (_VERB,),
    ),
    Declared(
        "multus_plugin_process_wait_seconds",
        "Time that a call of a plugin waited until it ran or was given up",
        "How much of an ADD is the wait for a process?",
        (_VERB,),
        (0.01, 0.1, 1, 5, 30),
    ),
    Declared(
        "multus_plugin_process_waits_given_up_total",
        "Calls of plugins that failed because the node was busy",
        "Do ADDs fail because the daemon's pod has too little memory?",
        (_VERB,),
    ),
)
NODE: Final = (
    Declared(
        "multus_ready",
        "1 for a condition of readiness that holds, 0 for one that does not",
        "Can the node take pods, and if not, what is missing?",
        (Label("condition", most=16),),
    ),
    Declared(
        "multus_degraded",
        "1 for a reason for which the daemon can't do what it promises although it is ready, 0 if it has ended",
        "Does something not work although pods start?",
        (Label("reason", most=16),),
    ),
    Declared(
        "multus_cni_config_restored_total",
        "CNI configurations restored after another program changed them",
        "Does another program fight over the node's CNI configuration?",
    ),
    Declared(
        "multus_spool_entries",
        "DELs that wait in the spool, counted up to 10000",
        "Do DELs that came while no daemon ran wait to be served?",
    ),
    Declared(
        "multus_spool_replays_total",
        "Spooled DELs that were tried; an error is retried",
        "Does the spool drain, and do its entries fail?",
        (_outcome("success", "error", "refused"),),
    ),
    Declared(
        "multus_leftover_containers",
        "Containers left after the last comparison with running pods: orphans, inhabited, unreadable, aside",
        "Do addresses and interfaces of deleted pods pile up?",
        (Label("kind", frozenset({"orphans", "inhabited", "unreadable", "aside"})),),
    ),
    Declared(
        "multus_orphan_attachments_total",
        "Attachments of orphans that the daemon tried to delete",
        "Does the daemon repair what deleted pods left behind?",
        (_outcome("success", "error"),),
    ),
    Declared(
        "multus_gc_attachments_total",
        "Stale attachments that a GC handled; skipped: processes run there",
        "Does the runtime's GC find leftovers, and are they deleted?",
        (_outcome("success", "skipped", "error"),),
    ),
    Declared(
        "multus_containers_set_aside_total",
        "Containers with networks that could not be detached for a day",
        "Is there something that a person has to free?",
    ),
    Declared(
        "multus_deletes_given_up_total",
        "Containers whose failed DEL was answered with success (deleteTries)",
        "Were pods deleted although a plugin did not free their networks?",
    ),
    Declared(
        "multus_networks_never_attached_total",
        "Networks whose failed DEL is treated as success: their ADD was refused, and nothing of them exists",
        "Does a network refuse both ADD and DEL?",
    ),
    Declared(
        "multus_replaced_namespaces_total",
        "Containers detached whose path no longer led to their network namespace",
        "Does the runtime or a plugin put something else where a namespace was?",
    ),
)
CLUSTER: Final = (
    Declared(
        "multus_informer_stale_seconds",
        "Age of what is known, which may be outdated: 0 while a watch runs, +Inf before the first answer",
        "Does the daemon see new pods and networks?",
        (_RESOURCE,),
        from_start=False,
    ),
    Declared(
        "multus_informer_errors_total",
        "Lists and watches that ended with an error",
        "Is the way to the API server unreliable?",
        (_READ,),
    ),
    Declared(
        "multus_api_requests_total",
        "Requests to the API server, by HTTP status or `error` without an answer",
        "Does the API server refuse or fail requests, and how much does the daemon ask of it?",
        (Label("verb", frozenset({"get", "list", "watch", "patch", "put", "post"})), Label("code", _CODES | {"error"})),
        from_start=False,
    ),
    Declared(
        "multus_network_statuses_pending",
        "network-status writes not yet done",
        "Do pods lack their network-status because the API server cannot be written to?",
        from_start=False,
    ),
    Declared(
        "multus_events_dropped_total",
        "Messages that became no Event",
        "Is something missing in `kubectl describe pod`?",
    ),
    Declared(
        "multus_client_certificate_expiration_timestamp_seconds",
        "Unix time at which the node's own client certificate ends; no sample without one",
        "Is the node's certificate (`perNodeCertificate`) renewed in time?",
        from_start=False,
    ),
    Declared(
        "multus_webhook_reviews_total",
        "Objects that the admission webhook reviewed; error: not answered, or not a review. Only the webhook has it",
        "Does the webhook refuse objects, or fail?",
        (Label("kind", REVIEWED), _outcome("success", "warned", "refused", "error")),
        from_start=False,
    ),
)
PROCESS: Final = (
    Declared(
        "process_cpu_seconds_total",
        "Total user and system CPU time spent in seconds.",
        "How much processor time does the daemon take?",
    ),
    Declared(
        "process_resident_memory_bytes",
        "Resident memory size in bytes.",
        "Does the daemon come near its memory limit?",
    ),
    Declared(
        "process_start_time_seconds",
        "Start time of the process since unix epoch in seconds.",
        "When did the daemon start, and does it restart?",
    ),
    Declared("process_open_fds", "Number of open file descriptors.", "Are descriptors scarce?"),
    Declared(
        "process_max_fds",
        "Maximum number of open file descriptors.",
        "How many descriptors may the daemon have?",
    ),
)
"""Metrics of the process, which prometheus_client measures."""
BUILD: Final = Declared(
    "multus_build_info",
    "Always 1",
    "Which nodes run which version?",
    (Label("version", most=1), Label("python", most=1)),
)
GROUPS: Final = {
    "Requests": REQUEST,
    "Networks": NETWORK,
    "Traffic by network": NETWORK_TRAFFIC,
    "Plugins": PLUGIN,
    "Node": NODE,
    "Cluster": CLUSTER,
    "Process": (BUILD, *PROCESS),
}
"""All metrics, by their heading in `docs/metrics.md`."""
