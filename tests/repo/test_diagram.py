"""The README's picture is what its script draws."""

from docs import diagram


def test_each_file_is_what_the_script_draws() -> None:
    drawn = {f"{name}.svg": diagram.drawn(palette) for name, palette in diagram.PALETTES.items()}
    found = {path.name: path.read_text() for path in diagram.FOLDER.iterdir()}
    assert found == drawn, "run `python docs/diagram.py`"
