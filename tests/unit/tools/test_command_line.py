"""The declaration of commands, and names of arguments."""

import json

import pytest
import yaml

from multus_daemon import __version__
from multus_tools import command_line
from multus_tools.command_line import CommandError, explained, present, split_name
from multus_tools.ctl import commands as ctl
from multus_tools.kubectl import commands as kubectl


@pytest.mark.parametrize("module", [ctl, kubectl])
def test_every_command_has_a_help_and_an_exit_status_for_wrong_usage(module, capsys):
    for command in module.COMMANDS:
        assert command.help.endswith(".")
        with pytest.raises(SystemExit, match="2"):
            module.parser().parse_args([command.name, "--no-such-option"])
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        module.parser().parse_args(["--help"])
    shown = capsys.readouterr().out
    assert all(command.name in shown for command in module.COMMANDS)


@pytest.mark.parametrize("module", [ctl, kubectl])
def test_the_example_of_each_help_is_a_command(module, capsys):
    commands = [[command.name] for command in module.COMMANDS if not command.commands]
    commands += [[group.name, verb.name] for group in module.COMMANDS for verb in group.commands]
    for words in commands:
        with pytest.raises(SystemExit, match="0"):
            module.parser().parse_args([*words, "--help"])
        _, _, example = capsys.readouterr().out.rpartition("example: ")
        assert module.parser().parse_args(example.split()[1:]).command == words[0]


def test_common_options_stand_before_the_command_or_after_it():
    for words in (["-n", "a", "pods"], ["pods", "-n", "a"], ["-n", "b", "pods", "-n", "a"]):
        assert kubectl.parser().parse_args(words).namespace == "a"
    assert kubectl.parser().parse_args(["pods", "--timeout", "1m"]).timeout == 60.0


def test_the_verbs_of_a_sandbox():
    arguments = ctl.parser().parse_args(["sandbox", "up", "web"])
    assert (arguments.verb, arguments.pod, arguments.ifname) == ("up", ("", "web"), "eth0")


@pytest.mark.parametrize(
    ("text", "expected"), [("web", ("", "web")), ("a/web", ("a", "web")), ("pod/web", ("", "web"))]
)
def test_names(text, expected):
    assert split_name(text, "[NAMESPACE/]POD") == expected


@pytest.mark.parametrize("text", ["", "/", "a/", "/web", "a/b/c"])
def test_names_that_are_none(text):
    with pytest.raises(CommandError, match="is not of the form"):
        split_name(text, "[NAMESPACE/]POD")


def test_a_reason_is_explained():
    with (
        pytest.raises(CommandError, match="^x can't be read: No such file or directory$"),
        explained("x can't be read"),
    ):
        open("/nonexistent").close()


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("json", lambda answers: "".join(json.dumps(answer, indent=4) + "\n" for answer in answers)),
        ("yaml", lambda answers: yaml.safe_dump_all(answers, sort_keys=False, explicit_start=True)),
        ("name", lambda answers: "a\n2\na\n"),
    ],
)
def test_a_watch_prints_the_whole_answer_after_each_change(output, expected, capsys, monkeypatch):
    monkeypatch.setattr(command_line, "WATCH_SECONDS", 0)
    first = {"items": [{"pod": "a", "id": "1"}, {"pod": "", "id": "2"}, {"pod": "a", "id": "3"}]}
    second = {"items": [{"pod": "a\x1b", "id": "1"}]}
    answers = iter((first, dict(first), second))

    def look():
        if (answer := next(answers, None)) is None:
            raise KeyboardInterrupt
        return answer

    arguments = ctl.parser().parse_args(["attachments", "-w", "-o", output])
    with pytest.raises(KeyboardInterrupt):
        present(arguments, look, print, ("items", "pod", "id"))
    assert capsys.readouterr().out == expected([first, second])


def test_the_flags_of_kubectl():
    for command in ("attachments", "plugins"):
        for output in ("json", "yaml", "wide", "name"):
            assert ctl.parser().parse_args([command, "-o", output, "--no-headers", "-w"]).output == output
    assert ctl.parser().parse_args(["status", "--json"]).output == "json"
    assert kubectl.parser().parse_args(["--json", "pods"]).output == "json"
    assert kubectl.parser().parse_args(["--json", "pods", "-o", "name"]).output == "name"
    assert kubectl.parser().parse_args(["pods"]).output == ""


@pytest.mark.parametrize("module", [ctl, kubectl])
def test_version(module, capsys):
    with pytest.raises(SystemExit, match="0"):
        module.main(["--version"])
    module.main(["version"])
    assert capsys.readouterr().out == f"{module.parser().prog}: version {__version__}\n" * 2
