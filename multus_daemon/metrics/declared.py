"""Every metric as a value: its name, labels, meaning, and the question of an operator that it answers.

`docs/metrics.md` is made from this (`make metrics`). Durations are in seconds. A metric that no page uses fails a test.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

from multus_daemon.metrics.registry import PROCESS, Declared, Label
from multus_daemon.runtime.timeline import Stage

Outcome: TypeAlias = Literal["success", "refused", "error", "timeout", "cancelled", "skipped", "warned"]
"""How anything that is counted ends. `refused`: bad input, nothing was changed; `timeout`: a deadline ended it;
`cancelled`: a DEL or the stop of the daemon ended it; `skipped`: left on purpose; `warned`: allowed with warnings."""

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
_READ: Final = Label("resource", frozenset({"pods", "networks", "slices"}))
_METHODS: Final = frozenset({"get", "put", "head", "post", "delete", "connect", "options", "trace", "patch"})
_CODES: Final = frozenset(map(str, range(100, 600)))

REQUEST: Final = (
    Declared(
        "multus_server_request_total",
        "counter",
        # Name, labels and help are upstream's, so that dashboards keep working.
        "Counter of HTTP requests",
        "Do requests reach the daemon, and how many does it answer with an error?",
        (
            Label("handler", frozenset({"/cni", "/delegate", "/healthz", "/readyz", "/admin", "NotFound"})),
            Label("code", _CODES),
            Label("method", _METHODS),
        ),
    ),
    Declared(
        "multus_cni_request_duration_seconds",
        "histogram",
        "Time from a decoded CNI request to its answer",
        "How many pods get their networks, and how fast?",
        (_VERB, _OUTCOME),
        (0.005, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30, 120),
    ),
    Declared(
        "multus_cni_stage_duration_seconds",
        "histogram",
        "Time of a request by stage: queue (slot, other work on the container), gather (pod, networks, devices), plan, "
        "record (write ahead), plugin (all together), keep (routes, results), publish (network-status, Events)",
        "Where does the time of a slow ADD or DEL go: the queue, the API server, the disk, or plugins?",
        (Label("verb", frozenset({"ADD", "DEL", "CHECK"})), Label("stage", STAGES)),
        (0.001, 0.005, 0.025, 0.1, 0.5, 5),
    ),
    Declared(
        "multus_cni_requests_in_flight",
        "gauge",
        "CNI requests in progress",
        "Is the daemon busy, or does a request hang?",
        (_VERB,),
        from_start=True,
    ),
    Declared(
        "multus_cni_requests_waiting",
        "gauge",
        "CNI requests that wait because of connectionLimit",
        "Do pods wait because the daemon may serve too few requests at once?",
        (_VERB,),
        from_start=True,
    ),
    Declared(
        "multus_refused_peers_total",
        "counter",
        "Requests on the socket from users without access",
        "Does a process without access try to use the daemon's socket?",
        from_start=True,
    ),
    Declared(
        "multus_log_lines_dropped_total",
        "counter",
        "Log lines that could not be written: no reader, or the disk failed",
        "Is the log complete?",
        (Label("to", frozenset({"stderr", "file"})),),
    ),
)
NETWORK: Final = (
    Declared(
        "multus_network_add_duration_seconds",
        "histogram",
        "Time of the ADD of one network of a pod, all of its plugins; only successes have buckets",
        "Which network is slow, and which one fails?",
        (_NETWORK, _OUTCOME),
        (0.05, 0.25, 1, 5),
        only_successes=True,
    ),
    Declared(
        "multus_attachments",
        "gauge",
        "Attachments on record",
        "How many attachments does a network have on this node?",
        (_NETWORK,),
    ),
    Declared(
        "multus_attachments_broken",
        "gauge",
        "Attachments that differ from their record, as last compared",
        "Does a network of a running pod not work, because something on the node has changed it?",
        (_NETWORK,),
    ),
    Declared(
        "multus_repairs_total",
        "counter",
        "Repairs of attachments, each of one thing that differed",
        "Does something on the node change the pods' networks again and again?",
        (_outcome("success", "error"),),
    ),
    Declared(
        "multus_hotplug_total",
        "counter",
        "Networks attached to (ADD) or detached from (DEL) running pods by their annotation",
        "Do running pods get the networks of their changed annotation?",
        (Label("verb", frozenset({"ADD", "DEL"})), _outcome("success", "error")),
    ),
    Declared(
        "multus_ipam_used_ratio",
        "gauge",
        "Share of a network's fullest range set that is given (built-in host-local), 0 to 1, if used since the start",
        "Will a network run out of addresses on this node?",
        (_NETWORK,),
    ),
    Declared(
        "multus_requests_unmet_total",
        "counter",
        "Requests of pods (ips, mac, ...) that no plugin supports or that the result does not show",
        "Do pods run without the address or the bandwidth that they asked for?",
        (Label("request", REQUESTS),),
        from_start=True,
    ),
    Declared(
        "multus_check_failures_total",
        "counter",
        "CHECKs of plugins that failed although the kernel has what the ADD made; the pod's CHECK succeeded",
        "Does a plugin miss something that the daemon cannot see, such as packet filter rules?",
        from_start=True,
    ),
    Declared(
        "multus_pods_lacking_networks",
        "gauge",
        "Pods that run without networks that they asked for",
        "Do pods run without their networks?",
        from_start=True,
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
    Declared(f"multus_network_{name}_total", "counter", f"{what} on secondary interfaces", question, (_NETWORK,))
    for name, (what, question) in TRAFFIC.items()
)
PLUGIN: Final = (
    Declared(
        "multus_plugin_duration_seconds",
        "histogram",
        "Time of one call of one plugin, built in or a binary; only successes have buckets",
        "Which plugin is slow, hangs or fails?",
        (Label("plugin", most=PLUGINS_MAX), _VERB, _OUTCOME),
        (0.0025, 0.01, 0.05, 0.25, 1, 5, 30),
        only_successes=True,
    ),
    Declared(
        "multus_plugin_processes_limit",
        "gauge",
        "Maximum number of concurrent plugin processes",
        "How much may run at once with the memory limit of the daemon's pod?",
        from_start=True,
    ),
    Declared(
        "multus_plugin_processes_running",
        "gauge",
        "Plugin processes that run",
        "Are all processes in use?",
        (_VERB,),
        from_start=True,
    ),
    Declared(
        "multus_plugin_processes_waiting",
        "gauge",
        "Calls of plugins that wait for a process",
        "Do pods start faster than the memory limit allows?",
        (_VERB,),
        from_start=True,
    ),
    Declared(
        "multus_plugin_process_wait_seconds",
        "histogram",
        "Time that a call of a plugin waited until it ran or was given up",
        "How much of an ADD is the wait for a process?",
        (_VERB,),
        (0.01, 0.1, 1, 5, 30),
    ),
    Declared(
        "multus_plugin_process_waits_given_up_total",
        "counter",
        "Calls of plugins that failed because the node was busy",
        "Do ADDs fail because the daemon's pod has too little memory?",
        (_VERB,),
        from_start=True,
    ),
)
NODE: Final = (
    Declared(
        "multus_ready",
        "gauge",
        "1 for a condition of readiness that holds, 0 for one that does not",
        "Can the node take pods, and if not, what is missing?",
        (Label("condition", most=16),),
    ),
    Declared(
        "multus_degraded",
        "gauge",
        "1 for a reason for which the daemon can't do what it promises although it is ready, 0 if it has ended",
        "Does something not work although pods start?",
        (Label("reason", most=16),),
    ),
    Declared(
        "multus_cni_config_restored_total",
        "counter",
        "CNI configurations restored after another program changed them",
        "Does another program fight over the node's CNI configuration?",
        from_start=True,
    ),
    Declared(
        "multus_spool_entries",
        "gauge",
        "DELs that wait in the spool, counted up to 10000",
        "Do DELs that came while no daemon ran wait to be served?",
        from_start=True,
    ),
    Declared(
        "multus_spool_replays_total",
        "counter",
        "Spooled DELs that were tried; an error is retried",
        "Does the spool drain, and do its entries fail?",
        (_outcome("success", "error", "refused"),),
        from_start=True,
    ),
    Declared(
        "multus_leftover_containers",
        "gauge",
        "Containers left after the last comparison with running pods: orphans, inhabited, unreadable, aside",
        "Do addresses and interfaces of deleted pods pile up?",
        (Label("kind", frozenset({"orphans", "inhabited", "unreadable", "aside"})),),
        from_start=True,
    ),
    Declared(
        "multus_orphan_attachments_total",
        "counter",
        "Attachments of orphans that the daemon tried to delete",
        "Does the daemon repair what deleted pods left behind?",
        (_outcome("success", "error"),),
        from_start=True,
    ),
    Declared(
        "multus_gc_attachments_total",
        "counter",
        "Stale attachments that a GC handled; skipped: processes run there",
        "Does the runtime's GC find leftovers, and are they deleted?",
        (_outcome("success", "skipped", "error"),),
        from_start=True,
    ),
    Declared(
        "multus_containers_set_aside_total",
        "counter",
        "Containers with networks that could not be detached for a day",
        "Is there something that a person has to free?",
        from_start=True,
    ),
    Declared(
        "multus_deletes_given_up_total",
        "counter",
        "Containers whose failed DEL was answered with success (deleteTries)",
        "Were pods deleted although a plugin did not free their networks?",
        from_start=True,
    ),
    Declared(
        "multus_networks_never_attached_total",
        "counter",
        "Networks whose failed DEL is treated as success: their ADD was refused, and nothing of them exists",
        "Does a network refuse both ADD and DEL?",
        from_start=True,
    ),
    Declared(
        "multus_replaced_namespaces_total",
        "counter",
        "Containers detached whose path no longer led to their network namespace",
        "Does the runtime or a plugin put something else where a namespace was?",
        from_start=True,
    ),
)
CLUSTER: Final = (
    Declared(
        "multus_informer_stale_seconds",
        "gauge",
        "Age of what is known, which may be outdated: 0 while a watch runs, +Inf before the first answer",
        "Does the daemon see new pods and networks?",
        (_RESOURCE,),
    ),
    Declared(
        "multus_informer_errors_total",
        "counter",
        "Lists and watches that ended with an error",
        "Is the way to the API server unreliable?",
        (_READ,),
        from_start=True,
    ),
    Declared(
        "multus_api_requests_total",
        "counter",
        "Requests to the API server, by HTTP status or `error` without an answer",
        "Does the API server refuse or fail requests, and how much does the daemon ask of it?",
        (Label("verb", frozenset({"get", "list", "watch", "patch", "put", "post"})), Label("code", _CODES | {"error"})),
    ),
    Declared(
        "multus_network_statuses_pending",
        "gauge",
        "network-status writes not yet done",
        "Do pods lack their network-status because the API server cannot be written to?",
    ),
    Declared(
        "multus_events_dropped_total",
        "counter",
        "Messages that became no Event",
        "Is something missing in `kubectl describe pod`?",
        from_start=True,
    ),
    Declared(
        "multus_client_certificate_expiration_timestamp_seconds",
        "gauge",
        "Unix time at which the node's own client certificate ends; no sample without one",
        "Is the node's certificate (`perNodeCertificate`) renewed in time?",
    ),
    Declared(
        "multus_webhook_reviews_total",
        "counter",
        "Objects that the admission webhook reviewed; error: not answered, or not a review. Only the webhook has it",
        "Does the webhook refuse objects, or fail?",
        (Label("kind", REVIEWED), _outcome("success", "warned", "refused", "error")),
    ),
)
BUILD: Final = Declared(
    "multus_build_info",
    "gauge",
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
"""All metrics, by heading of the page."""
