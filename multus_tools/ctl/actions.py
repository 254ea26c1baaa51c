"""The commands of `multusctl`: each function runs one and returns its exit status. `commands` has the help texts.

All raise CniError and CommandError.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from multus_daemon.deadlines import ADMIN_SECONDS
from multus_tools import command_line, deadlines
from multus_tools.command_line import DONE, FAILED, NO_DAEMON, Answer, CommandError, explained, present
from multus_tools.ctl.socket_client import Client, NoDaemonError

if TYPE_CHECKING:
    from multus_daemon.settings import Settings

FORGET: Final = "forget"
_MOUNTED: Final = Path("/host")
"""Mount point of the host's directories in the daemon's pod (manifests)."""


def status(arguments: argparse.Namespace) -> int:
    """Show how the daemon of this node is; exit status 1 if it is not ready."""
    try:
        answer = _client(arguments).ask("status")
    except NoDaemonError as error:
        from multus_tools.ctl import offline

        sys.stderr.write(f"multusctl: {error}\n")
        answer = offline.status(Path(_settings(arguments).paths.cni_dir), str(error))
    _print(arguments, answer, "status")
    if answer["source"] != "daemon":
        return NO_DAEMON
    return DONE if answer["ready"] else FAILED


def attachments(arguments: argparse.Namespace) -> int:
    """Show what is attached to the pods of this node."""
    if arguments.pod == ("", FORGET):
        return _forget(arguments)
    if arguments.container:
        raise CommandError(f"unexpected argument {arguments.container!r}; see multusctl attachments --help")
    pod = _pod(arguments)

    def look() -> Answer:
        answer = _ask_attachments(arguments, pod, arguments.check, arguments.leaks)
        if pod and not (arguments.leaks or arguments.watch or answer["containers"]) and answer["source"] == "daemon":
            _explain(arguments, pod)
        return answer

    # A leftover is forgotten by its container.
    view, *keys = ("leaks", "container") if arguments.leaks else ("attachments", "pod", "container")
    answer = present(arguments, look, functools.partial(_show, view), ("containers", *keys))
    return FAILED if any(item["check"] for item in answer["containers"]) else DONE


def _ask_attachments(arguments: argparse.Namespace, pod: str = "", check: bool = False, leaks: bool = False) -> Answer:
    """Ask the daemon; without a daemon, read the records of this node, unless `--check` or `--watch` is given."""
    query = {"pod": pod, "check": "true" if check else "", "leaks": "true" if leaks else ""}
    try:
        seconds = ADMIN_SECONDS if check else deadlines.CTL_SECONDS
        answer = _client(arguments).ask("attachments", query, timeout=seconds)
    except NoDaemonError as error:
        if check or arguments.watch:
            raise
        from multus_tools.ctl import offline

        sys.stderr.write(f"multusctl: {error}; what follows is from the records on this node\n")
        answer = offline.attachments(Path(_settings(arguments).paths.cni_dir), pod=pod, leaks=leaks)
    answer["containers"] = _of_namespace(arguments, pod, answer["containers"])
    return answer


def _of_namespace(arguments: argparse.Namespace, pod: str, items: list[Answer]) -> list[Answer]:
    """Return the items; if no `pod` is given, only those of the namespace of `-n`."""
    if pod or arguments.all_namespaces or not arguments.namespace:
        return items
    return [item for item in items if item["pod"].startswith(f"{arguments.namespace}/")]


def _explain(arguments: argparse.Namespace, pod: str) -> Answer:
    """Ask what would be attached to the pod. Raises NotThereError if there is no such pod."""
    # The daemon waits for a pod that its watch does not know yet.
    answer = _client(arguments).ask("explain", {"pod": pod}, timeout=ADMIN_SECONDS)
    # A container of a deleted pod may still be attached.
    if not answer.get("exists", True) and not answer["attached"]:
        raise command_line.NotThereError(next(step["problem"] for step in answer["steps"] if step["what"] == "pod"))
    return answer


def drift(arguments: argparse.Namespace) -> int:
    """Show how the pods' attachments differ from their records; exit status 1 if anything differs."""
    pod = _pod(arguments)

    def look() -> Answer:
        answer = _ask_on_record(arguments, "drift", {"pod": pod})
        for key in ("differences", "passedOver"):
            answer[key] = _of_namespace(arguments, pod, answer[key])
        return answer

    keys = ("differences", "pod", "interface", "difference")
    answer = present(arguments, look, functools.partial(_show, "drift"), keys)
    return FAILED if answer["differences"] else DONE


def repair(arguments: argparse.Namespace) -> int:
    """Repair the attachments of a pod; exit status 1 if anything still differs."""
    query = {"pod": _pod(arguments), "dryRun": "true" if arguments.dry_run else ""}
    answer = _ask_on_record(arguments, "repair", query, method="POST")
    _print(arguments, answer, "repair")
    return FAILED if answer["left"] else DONE


def _ask_on_record(arguments: argparse.Namespace, question: str, query: dict[str, str], method: str = "GET") -> Answer:
    """Ask the daemon about running pods. Raises NotThereError if the pod has no networks on record."""
    from multus_daemon.spec.cni.errors import UnknownContainerError

    try:
        return _client(arguments).ask(question, query, method=method, timeout=ADMIN_SECONDS)
    except UnknownContainerError as error:
        raise command_line.NotThereError(str(error)) from error


def _forget(arguments: argparse.Namespace) -> int:
    container = arguments.container
    if not container:
        raise CommandError(f"{FORGET} needs a CONTAINER: multusctl attachments --leaks -o name names them")
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise CommandError(f"{FORGET} needs a confirmation on a terminal; in a script use --yes")
        sys.stderr.write(f"The addresses and interfaces of container {container} will not be freed. Forget it? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise CommandError("not confirmed: nothing has changed")
    answer = _client(arguments).ask("forget", {"container": container}, method="POST", timeout=ADMIN_SECONDS)
    _print(arguments, answer, "forgotten")
    return DONE


def explain(arguments: argparse.Namespace) -> int:
    """Show what would be attached to a pod, and why; touches nothing; exit status 1 if an ADD would fail."""
    if arguments.file:
        import json

        body = json.dumps(_pod_in(arguments.file)).encode()
        answer = _client(arguments).ask("explain-manifest", method="POST", body=body, timeout=ADMIN_SECONDS)
    else:
        answer = _explain(arguments, _pod(arguments))
    remove_secrets(answer)
    _print(arguments, answer, "explain")
    return FAILED if answer["problem"] else DONE


def remove_secrets(answer: Answer) -> None:
    """Remove secrets from the answer of `explain`, as people copy it to chats and bug reports."""
    from multus_tools.scrub import Scrubber

    for step in answer["steps"]:
        if step["what"].startswith("annotation "):
            step["result"] = Scrubber().text(step["result"])[0]
    for network in answer["networks"]:
        scrubber = Scrubber()
        for plugin in network["plugins"]:
            plugin["config"] = scrubber.value(plugin["config"])[0]
        network["requests"] = scrubber.value(network["requests"])[0]


def _pod_in(path: Path) -> dict[str, Any]:
    """Return the only pod in the file, or the pod of its only workload's template. Raises CommandError."""
    import yaml

    try:
        documents = list(yaml.safe_load_all(path.read_bytes()))
    except (OSError, yaml.YAMLError) as error:
        raise CommandError(f"{path} can't be read: {error}") from error
    pods = [pod for item in documents if isinstance(item, dict) and (pod := _as_pod(item))]
    if len(pods) != 1:
        raise CommandError(f"{path} must have one pod, or one workload with a template, and has {len(pods)}")
    return pods[0]


def _as_pod(item: dict[str, Any]) -> dict[str, Any] | None:
    from multus_tools.validate.located import object_at

    pod = item if item.get("kind") == "Pod" else object_at(item, ("spec", "template"))
    if not pod:
        return None
    metadata = {"name": "pod", "namespace": "default"}
    # A template has annotations, but no name and namespace: those of the workload serve.
    for owner in (object_at(item, ("metadata",)), object_at(pod, ("metadata",))):
        metadata |= {key: owner[key] for key in ("name", "namespace", "uid", "annotations") if owner.get(key)}
    return {**pod, "apiVersion": "v1", "kind": "Pod", "metadata": metadata}


def trace(arguments: argparse.Namespace) -> int:
    """Show what the daemon did for a pod, with the time of each step."""
    pod = _pod(arguments)
    last = 1000 if arguments.namespace else arguments.last  # The daemon remembers no more.
    answer = _client(arguments).ask("trace", {"pod": pod, "last": str(last)})
    answer["requests"] = _of_namespace(arguments, pod, answer["requests"])[-arguments.last :]
    if pod and not answer["requests"]:
        _explain(arguments, pod)
    _print(arguments, answer, "trace")
    return DONE


def plugins(arguments: argparse.Namespace) -> int:
    """Show the plugins of this node and what serves each of them."""
    from multus_tools import inventory

    settings = _settings(arguments)
    look = explained(f"binDir {settings.paths.bin_dir} can't be listed")(lambda: inventory.plugins(settings))
    answer = present(arguments, look, functools.partial(_show, "plugins"), ("plugins", "type"))
    return FAILED if any(item["problem"] for item in answer["plugins"]) else DONE


def validate(arguments: argparse.Namespace) -> int:
    """Find problems in manifests and configurations; exit status 1 if there is an error."""
    from multus_tools import validate
    from multus_tools.ctl import validation

    files = validation.read(arguments.files)
    bin_dirs = [str(Path(name).absolute()) for name in arguments.bin_dir]
    report = validate.of(list(files.items()), settings=_settings(arguments), bin_dirs=bin_dirs)
    if arguments.output or arguments.format == "json":
        arguments.output = arguments.output or "json"
        _print(arguments, report.to_object(), "")
    elif arguments.format == "github":
        validation.github(report)
    else:
        validation.findings(report, files)
    return FAILED if report.count("error") or (arguments.strict and report.findings) else DONE


def doctor(arguments: argparse.Namespace) -> int:
    """Find what is wrong with this node; exit status 1 if there is an error."""
    from multus_tools.ctl.doctor import Node, examine, to_object

    client = _client(arguments)

    def answers() -> tuple[str, dict[str, Any]]:
        try:
            return "", client.ask("status")
        except NoDaemonError as error:
            return str(error), {}

    node = Node(_settings(arguments), answers)
    findings = examine(node)
    if arguments.fix:
        for item in findings:
            if item.fix:
                with explained(f"{item.subject}: {item.fix}"):
                    Path(item.subject).chmod(item.mode)
                sys.stderr.write(f"multusctl: {item.subject}: {item.fix}: done\n")
        findings = examine(node)
    _print(arguments, to_object(findings), "doctor")
    return FAILED if any(item.severity == "error" for item in findings) else DONE


def bundle(arguments: argparse.Namespace) -> int:
    """Write an archive for a bug report; exit status 1 if something is missing in it."""
    from multus_daemon import settings
    from multus_tools import terminal
    from multus_tools.bundle_file import NODE_MAX_BYTES, written
    from multus_tools.ctl import bundle as of_node

    problem = ""
    try:
        given = _settings(arguments)
    except CommandError as error:
        # Perhaps that is what the report is about.
        given, problem = settings.in_directory(settings.Settings(), settings.runtime_directory()), str(error)
    pods = tuple(f"{namespace or 'default'}/{name}" for namespace, name in arguments.pod)
    with written("multusctl", arguments, most=NODE_MAX_BYTES, known=of_node.secrets_of_environment()) as archive:
        sources = (given, problem, arguments.config, _client(arguments, given), pods)
        daemon_problem = of_node.Bundle(archive, *sources, terminal.progress).collect()
        terminal.progress("")
        archive.notes += filter(None, [daemon_problem])
    return NO_DAEMON if daemon_problem else FAILED if archive.missing else DONE


def sandbox(arguments: argparse.Namespace) -> int:
    """Play the container runtime for a daemon."""
    from multus_tools.ctl.sandbox import Sandbox

    pod = _pod(arguments)
    sandbox = Sandbox(_settings(arguments), pod, arguments)
    verbs = {"up": sandbox.up, "check": sandbox.check, "down": sandbox.down}
    answer = dict(verbs[arguments.verb]())
    notes = answer.pop("notes", "")
    if arguments.output:
        _print(arguments, answer, "")
    else:
        from multus_tools.ctl import show

        show.outcome(arguments.verb, pod, answer, notes)
    return DONE


def pod_name(text: str) -> tuple[str, str]:
    """Split an argument into the pod's namespace, which may be empty, and name. Raises CommandError."""
    return command_line.split_name(text, "[NAMESPACE/]POD")


def _pod(arguments: argparse.Namespace) -> str:
    """Return `namespace/name` of the pod argument, by default in the namespace of `-n`; empty if none is given."""
    namespace, name = arguments.pod or ("", "")
    return f"{namespace or arguments.namespace or 'default'}/{name}" if name else ""


def _settings(arguments: argparse.Namespace) -> Settings:
    """Read the settings of `--config`, else of the default path if the file exists. Raises CommandError."""
    from multus_daemon import settings

    usual = Path(settings.DEFAULT_CONFIG_PATH)
    path = arguments.config or (usual if usual.exists() else None)
    try:
        given = settings.load(path) if path else settings.Settings()
    except settings.SettingsError as error:
        raise CommandError(str(error)) from error
    return settings.in_directory(given, settings.runtime_directory())


def _client(arguments: argparse.Namespace, given: Settings | None = None) -> Client:
    """Return a client for the daemon of `--socket-dir`, of the `given` settings or of the configuration."""
    if arguments.socket_dir:
        return Client(arguments.socket_dir / "multus.sock")
    path = Path((given or _settings(arguments)).socket.directory) / "multus.sock"
    mounted = _MOUNTED / path.relative_to("/") if path.is_absolute() else path
    return Client(mounted if mounted.exists() and not path.exists() else path)


def _print(arguments: argparse.Namespace, answer: Answer, view: str) -> None:
    """Print the answer in the format of `-o`, or with one of `show.VIEWS`."""
    present(arguments, lambda: answer, functools.partial(_show, view))


def _show(view: str, *answer: Any) -> None:
    # rich takes as long to load as all the rest; JSON does without it.
    from multus_tools.ctl import show

    show.VIEWS[view](*answer)
