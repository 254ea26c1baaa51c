"""Hook of mkdocs: a link that leaves docs/ (`../CHANGELOG.md`) leads to that file in the repository.

On a forge such a link works as it stands; a site of docs/ alone does not have the file.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
_OUTSIDE: Final = re.compile(r"\]\(\.\./([^)#]+)")


def on_config(config: Any) -> Any:
    """Set the address of the repository: pyproject.toml is the one place that has it.

    NB: not as `repo_url`, with which the theme has each reader's browser ask the forge for its figures.
    """
    config.extra["repository"] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    return config


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Rewrite the links of a page. Raises FileNotFoundError for a file that does not exist, which ends the build."""

    def rewrite(link: re.Match[str]) -> str:
        target = ROOT / link[1]
        if not target.exists():
            raise FileNotFoundError(f"a page has a link to {target}")
        return f"]({config.extra['repository']}/{'tree' if target.is_dir() else 'blob'}/main/{link[1]}"

    return _OUTSIDE.sub(rewrite, markdown)
