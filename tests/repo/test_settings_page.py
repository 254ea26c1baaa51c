"""The tables of docs/configuration.md are those of the settings."""

from __future__ import annotations

import pytest

from multus_daemon import logs
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


def test_the_options_of_the_log_have_the_defaults_of_the_log() -> None:
    # Neither module knows the other.
    defaults = {key: default for key, _, default in settings_page._fields(keys.LogOptions)}
    assert defaults | logs.DEFAULT_OPTIONS == defaults
