"""Writes the pages of results from ``docs/claims/claims.json``.

    python -m website.claims

The lab notebook, ``docs/notebook/``, keeps what was measured and is still current. A claim is one
sentence, its numbers, and how to make them again. A test finds each number and commit of a claim
in the section of the notebook that it names.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "claims"
NOTEBOOK = FOLDER.with_name("notebook")
PAGES = {
    "plans": (
        "Searched plans",
        "How much faster the plans are that heterog finds. Step times on this page come from the "
        "simulator; how far it is off is on the page [Predictions](predictions.md).",
    ),
    "predictions": (
        "Predictions",
        "How far predicted seconds and bytes are from measured ones.",
    ),
    "measured": (
        "Measured runs",
        "Plans that were executed and timed. The processes ran on CPUs with limited time and "
        "links: no GPU was at hand.",
    ),
    "exact": (
        "Exact numbers",
        "Whether an executed plan trains the same model as one device would.",
    ),
    "speed": (
        "Speed and size",
        "How long planning itself takes, and how large a cluster may be.",
    ),
}
"""Title and first sentence of each page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One statement with its numbers and its origin.

    Attributes:
        id: Short name, unique.
        page: Key of ``PAGES``.
        title: Heading on the page.
        says: What was compared, in one or two sentences.
        values: Pairs of what a number is and the number as the notebook prints it.
        commit: Commit of this repository that made the numbers.
        seed: Seed or seeds; ``"none"`` where nothing is random.
        hardware: What it ran on.
        command: Command that makes the numbers again.
        section: Heading of the notebook's section, on whichever page it is.
        limits: What the numbers do not say.
    """

    id: str
    page: str
    title: str
    says: str
    values: tuple[tuple[str, str], ...]
    commit: str
    seed: str
    hardware: str
    command: str
    section: str
    limits: str


def load_claims(path: Path = FOLDER / "claims.json") -> tuple[Claim, ...]:
    """All claims of a file, in its order."""
    return tuple(
        Claim(**{**row, "values": tuple((each["what"], each["value"]) for each in row["values"])})
        for row in json.loads(path.read_text())["claims"]
    )


def anchor(heading: str) -> str:
    """What a link to a heading says, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def notebook_page(section: str) -> Path:
    """The page of the lab notebook that has a section with this heading."""
    found = [
        path
        for path in sorted(NOTEBOOK.glob("*.md"))
        if f"## {section}" in path.read_text().splitlines()
    ]
    if len(found) != 1:
        raise LookupError(f"{len(found)} pages of docs/notebook/ have a section '{section}'")
    return found[0]


def section_of(claim: Claim) -> str:
    """One claim as a part of its page."""
    rows = [f"| {what} | **{value}** |" for what, value in claim.values]
    link = f"../notebook/{notebook_page(claim.section).name}"
    origin = (
        f"Commit {claim.commit}; seed {claim.seed}; {claim.hardware}. "
        f"Details: [{claim.section}]({link}#{anchor(claim.section)})."
    )
    return "\n".join(
        [
            *(f"## {claim.title}", "", claim.says, ""),
            *("| what | result |", "|---|---|", *rows, ""),
            *(f"**What this does not say.** {claim.limits}", ""),
            *(f"    {claim.command}", "", origin, ""),
        ]
    )


MADE = "<!-- Made by website/claims.py from claims.json: change that file instead. -->"


def page(key: str, claims: tuple[Claim, ...]) -> str:
    """The page of one subject."""
    title, about = PAGES[key]
    parts = [section_of(claim) for claim in claims if claim.page == key]
    return "\n".join([f"# {title}", "", MADE, "", about, "", *parts])


def index(claims: tuple[Claim, ...]) -> str:
    """The page that lists every claim with its first number."""
    lines = [
        *("# What is claimed", "", MADE, ""),
        "Each claim has its numbers, the commit, seed and hardware they were made with, the",
        "command that makes them again, and what they do not say.",
        "The [lab notebook](../notebook/index.md) has the details.",
    ]
    for key, (title, _) in PAGES.items():
        lines += ["", f"## {title}", "", "| claim | first number |", "|---|---|"]
        for claim in claims:
            if claim.page == key:
                what, value = claim.values[0]
                link = f"[{claim.title}]({key}.md#{anchor(claim.title)})"
                lines.append(f"| {link} | **{value}**: {what} |")
    return "\n".join([*lines, ""])


def made_pages() -> dict[str, str]:
    """Every page by its file name."""
    claims = load_claims()
    return {"index.md": index(claims)} | {f"{key}.md": page(key, claims) for key in PAGES}


def main() -> None:
    """Write every page."""
    for name, text in made_pages().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
