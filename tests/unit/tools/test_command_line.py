"""The declaration of commands, and names of arguments."""

import pytest

from multus_daemon.tools.command_line import CommandError, explained, split_name
from multus_daemon.tools.ctl import commands as ctl
from multus_daemon.tools.kubectl import commands as kubectl


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


def test_common_options_stand_before_the_command_or_after_it():
    for words in (["-n", "a", "pods"], ["pods", "-n", "a"], ["-n", "b", "pods", "-n", "a"]):
        assert kubectl.parser().parse_args(words).namespace == "a"
    assert kubectl.parser().parse_args(["pods", "--timeout", "1m"]).timeout == 60.0


def test_the_verbs_of_a_sandbox():
    arguments = ctl.parser().parse_args(["sandbox", "up", "web"])
    assert (arguments.verb, arguments.pod, arguments.ifname) == ("up", "default/web", "eth0")


@pytest.mark.parametrize(("text", "expected"), [("web", ("", "web")), ("a/web", ("a", "web"))])
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
