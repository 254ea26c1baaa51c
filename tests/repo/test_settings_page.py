"""The tables of docs/configuration.md are those of the settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest

from multus_daemon import logs, settings
from multus_daemon.settings import keys
from tests.repo import settings_page

TEXT = settings_page.PAGE.read_text()


def test_the_tables_are_made_of_the_settings() -> None:
    assert settings_page.filled(TEXT) == TEXT, "run `python -m tests.repo.settings_page`"


def test_every_table_is_on_the_page_once() -> None:
    assert [TEXT.count(f"<!-- settings: {name} -->") for name in settings_page.TABLES] == [1] * len(
        settings_page.TABLES
    )


def test_what_was_in_a_table_before_is_replaced_and_the_rest_stays() -> None:
    stale = "above\n<!-- settings: metrics -->\n| `old` |\n<!-- end of settings -->\nbelow\n"
    rows = settings_page.filled(stale).splitlines()
    assert (rows[0], rows[-1]) == ("above", "below")
    assert rows[4] == (
        "| `metricsPort` | integer, 1 to 65535 | none | TCP port of `/metrics`, `/healthz` and `/readyz`; our "
        "manifests set 9059. None: nothing listens. At most 16 connections at once to an address, 10 s each. |"
    )
    assert not [row for row in rows if "old" in row]


def test_a_table_that_does_not_exist() -> None:
    with pytest.raises(KeyError, match="nothing"):
        settings_page.filled("<!-- settings: nothing -->\n<!-- end of settings -->")


@pytest.mark.parametrize(
    ("hint", "shown"),
    [
        (str, "string"),
        (keys.Text, "string"),
        (bool, "boolean"),
        (keys.Port | None, "integer, 1 to 65535"),
        (keys.Count, "integer, from 0"),
        (keys.Seconds, "number, above 0, to 3600"),
        (Annotated[float, msgspec.Meta(ge=0, le=600)], "number, 0 to 600"),
        (Literal["a", "b", "c"], "`a`, `b` or `c`"),
        (tuple[str, ...], "list of strings"),
        (tuple[Literal["a", "b"], ...], "list of `a` or `b`"),
        (tuple[dict[str, Any], ...], "list of objects"),
        (dict[str, bool], "object of booleans"),
        (settings.PerNodeCertificate | None, "object"),
    ],
)
def test_types(hint: Any, shown: str) -> None:
    assert settings_page.type_of(hint) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (msgspec.NODEFAULT, "required"),
        (None, "none"),
        ("", "empty"),
        ((), "empty"),
        ({}, "empty"),
        (False, "`false`"),
        (0, "`0`"),
        (60.0, "`60`"),
        ("auto", "`auto`"),
        (("a", "b"), '`["a", "b"]`'),
    ],
)
def test_defaults(value: object, shown: str) -> None:
    assert settings_page.default_of(value) == shown


def test_the_options_of_the_log_have_the_defaults_of_the_log() -> None:
    # Neither module knows the other.
    defaults = {key: default for key, _, default in settings_page._fields(keys.LogOptions)}
    assert defaults | logs.DEFAULT_OPTIONS == defaults
