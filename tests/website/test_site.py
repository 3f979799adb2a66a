"""Pages that are made from claims, commands and simulated steps, and how pages are staged."""

import re
import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import heterog
from website import board_page, command_pages, gallery, reference, stage
from website.claims import FOLDER, PAGES, Claim, anchor, load_claims, made_pages, notebook_page
from website.pictures import FOLDER as PICTURES
from website.pictures import PICTURES as DRAWN

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
CLAIMS = load_claims()


def notebook_section(heading: str) -> str:
    """Text of the lab notebook below a heading, up to the next one."""
    text = notebook_page(heading).read_text()
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found, f"the notebook has no section '{heading}'"
    return " ".join(found[1].split())


@pytest.mark.parametrize("name", sorted(made_pages()))
def test_a_page_of_claims_is_what_the_claims_make(name: str) -> None:
    written = (FOLDER / name).read_text()
    assert written == made_pages()[name], "python -m website.claims"


def test_the_tables_of_the_board_are_what_its_runs_make() -> None:
    page = board_page.PAGE.read_text()
    assert board_page.written(page) == page, "python -m website.board_page"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_is_in_the_notebook(claim: Claim) -> None:
    section = notebook_section(claim.section)
    for what, value in claim.values:
        assert re.search(rf"(?<![\d.]){re.escape(value)}(?!\d)", section), f"{what}: {value}"
    assert claim.commit in section
    assert claim.page in PAGES
    for field in ("says", "seed", "hardware", "command", "limits"):
        assert getattr(claim, field), field


def test_claims_are_told_apart() -> None:
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    assert {claim.page for claim in CLAIMS} == set(PAGES)
    assert anchor("2 V100 + 4 GTX (a)") == "2-v100--4-gtx-a"


def test_the_page_of_commands_is_their_help() -> None:
    pages = {
        command_pages.PAGE: command_pages.page(),
        command_pages.RUN_FILE_PAGE: command_pages.run_file_page(),
    }
    for path, page in pages.items():
        assert path.read_text() == page, "python -m website.command_pages"


@pytest.mark.parametrize("name", sorted(DRAWN))
def test_a_picture_is_drawn_from_the_data_and_tells_what_it_shows(name: str) -> None:
    written = (PICTURES / f"{name}.svg").read_text()
    assert written == DRAWN[name](), "python -m website.pictures"
    root = ET.fromstring(written)
    title, about = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None
    assert about is not None
    assert len(about.text or "") > 40
    labels = root.attrib["aria-labelledby"].split()
    assert labels == [title.attrib["id"], about.attrib["id"]]
    assert "prefers-color-scheme:dark" in written
    assert "http" not in written.replace("http://www.w3.org/2000/svg", "")


def test_the_gallery_shows_the_scripts() -> None:
    assert gallery.PAGE.read_text() == gallery.page(), "python -m website.gallery"


@pytest.mark.parametrize("path", gallery.scripts(), ids=lambda path: path.stem)
def test_an_example_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    found = [float(word) for line in lines for word in re.findall(r": ([\d.]+) ?(?:ms|of)", line)]
    if path.stem == "faster_network":
        assert found == sorted(found, reverse=True), "a faster network is never slower"
    elif path.stem == "plan_two_cards":
        assert sum(found) == 4096
        assert found[0] > found[1]
    else:
        assert lines


# --- the reference -------------------------------------------------------------------------------


def test_every_public_name_is_in_the_reference() -> None:
    shown = reference.shown_names()
    missing = {f"heterog.{name}" for name in heterog.__all__} - set(shown)
    assert not missing
    assert len(shown) == len(set(shown)) > 40


def test_every_name_of_the_reference_says_what_it_is() -> None:
    assert not reference.undocumented()


def test_a_silent_name_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from package.inner import Loud, Quiet\n")
    (package / "inner.py").write_text(
        '"""A module."""\n\n\nclass Loud:\n    """Speaks.\n\n    Attributes:\n        a: One.\n'
        '    """\n\n    a: int\n    b: int\n\n    def go(self) -> None: ...\n\n'
        "\nclass Quiet: ...\n"
    )
    pages = tmp_path / "docs" / "reference"
    pages.mkdir(parents=True)
    (pages / "x.md").write_text("::: package.Loud\n\n::: package.Quiet\n\n::: package.Gone\n")
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    assert reference.undocumented() == [
        "package.Loud.go", "package.Loud.b", "package.Quiet", "package.Gone (does not exist)"
    ]  # fmt: skip


# --- staging -------------------------------------------------------------------------------------


def test_every_page_is_reached() -> None:
    assert not stage.unlisted((ROOT / "mkdocs.yml").read_text())
    assert "start.md" in stage.unlisted("nav:\n  - Other start: for/other-start.md\n")


@pytest.mark.parametrize(
    ("text", "staged"),
    [
        ("[a](guide/running.md#running-a-plan)", "[a](guide/running.md#running-a-plan)"),
        ("[a](../ARCHITECTURE.md)", "[a](architecture.md)"),
        ("[a](../README.md#what-to-trust)", "[a](index.md#what-to-trust)"),
        ("[a](../heterog/api.py)", "a"),
        ("[a](https://example.org)", "[a](https://example.org)"),
        ("`[a](../heterog/api.py)`", "`[a](../heterog/api.py)`"),
        ("    code\n\n[a](../heterog/api.py)", "    code\n\na"),
        ("- a\n  - b", "- a\n    - b"),
        ("Numbers:\n| a |\n|---|\n", "Numbers:\n\n| a |\n|---|\n"),
        ("```python\nx = [a](b)\n  - y\n```\n", "```python\nx = [a](b)\n  - y\n```\n"),
    ],
)
def test_a_page_is_staged(text: str, staged: str) -> None:
    assert stage.staged_text(text, ROOT / "docs" / "planners.md", "planners.md") == staged


def test_links_of_pages_at_the_root_lead_to_the_same_pages() -> None:
    text = "[a](docs/balance.md), [b](docs/notebook/device-models.md#kernels)"
    staged = stage.staged_text(text, ROOT / "CHANGELOG.md", "changelog.md")
    assert staged == "[a](balance.md), [b](notebook/device-models.md#kernels)"


def test_a_link_to_nothing_is_named() -> None:
    with pytest.raises(stage.StageError, match=r"planners.md links to gone.md, which does not"):
        stage.staged_text("[a](gone.md)", ROOT / "docs" / "planners.md", "planners.md")


def test_a_picture_becomes_a_part_of_the_page() -> None:
    page = ROOT / "docs" / "index.md"
    staged = stage.staged_text("![Two cards.](pictures/shares.svg)", page, "index.md")
    assert staged.startswith("<figure")
    assert "<style>" not in staged
    assert "<figcaption>Two cards.</figcaption>" in staged
    assert "\n\n" not in staged, "a blank line would end the block of HTML"


def test_nothing_is_fetched_from_other_servers() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in settings
    assert not re.findall(r"https?://", settings)
    assert "url(" not in (ROOT / "website" / "site.css").read_text()
