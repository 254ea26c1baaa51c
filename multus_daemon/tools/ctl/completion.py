"""Shell completion of `multusctl`, derived from its argument parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

SHELLS: Final = ("bash", "zsh", "fish")


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script for one of SHELLS."""
    words = dict(_words(parser))
    return _fish(words) if shell == "fish" else _bash(words, zsh=shell == "zsh")


def _words(parser: argparse.ArgumentParser, before: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each command (empty: none yet) and the words that may follow it, with their help."""
    following: dict[str, str] = dict(parser.get_default("words") or {})
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, child in action.choices.items():
                following[name] = helps.get(name, "")
                yield from _words(child, f"{before} {name}".strip())
        elif action.choices:
            following |= dict.fromkeys(map(str, action.choices), "")
        elif action.option_strings:
            following[action.option_strings[-1]] = action.help or ""
    yield before, following


def _bash(words: dict[str, dict[str, str]], *, zsh: bool) -> str:
    cases = "\n".join(
        f'        "{before}") words="{" ".join(sorted(following))}" ;;' for before, following in sorted(words.items())
    )
    head = "autoload -U +X bashcompinit && bashcompinit\n" if zsh else ""
    return f"""{head}_multusctl() {{
    local before="" word words
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$word" in -*|*/*) ;; *) before="${{before:+$before }}$word" ;; esac
    done
    case "$before" in
{cases}
        *) words="" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _multusctl multusctl
"""


def _fish(words: dict[str, dict[str, str]]) -> str:
    lines = []
    for before, following in sorted(words.items()):
        conditions = [f"__fish_seen_subcommand_from {word}" for word in before.split()]
        if children := [name for name in following if not name.startswith("-")]:
            conditions.append(f"not __fish_seen_subcommand_from {' '.join(children)}")
        for name, meaning in sorted(following.items()):
            word = f"-l {name[2:]}" if name.startswith("--") else f"-a {name} -f"
            text = meaning.replace("'", "\\'").replace("%(default)s", "").replace("()", "")
            lines.append(f"complete -c multusctl -n '{' && '.join(conditions)}' {word} -d '{text}'")
    return "\n".join(lines) + "\n"
