"""Copies the pages of the documentation to where the site is built from.

    python -m website.stage

Pages are written for readers of the repository: they link to files of the repository and show
pictures as images. On the site a link to a file that is no page becomes plain text, and a picture
becomes a part of the page, so that it follows the reader's choice of light or dark. Nothing but
Python is needed here.
"""

import posixpath
import re
import shutil
import sys
from pathlib import Path

from website.reference import undocumented

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STAGED = ROOT / "build" / "website" / "pages"
ROOT_PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
}
"""Pages at the root of the repository, by what they are called on the site."""
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
PICTURE = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+\.svg)\)$", re.MULTILINE)
CODE = re.compile(r"(^```.*?^```$|(?:^ {4}[^\n]*\n)+|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
HEADED_TABLE = re.compile(r"^([^\s|].*)\n(\|)", re.MULTILINE)


class StageError(Exception):
    """A page that cannot be a part of the site, with the reason."""


def pages() -> dict[str, Path]:
    """Every page by its path on the site."""
    found = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}
    for name, staged in ROOT_PAGES.items():
        found.setdefault(staged, ROOT / name)
    return found


def in_repository(page: Path, link: str) -> Path:
    """The file that a link of a page means."""
    return Path(posixpath.normpath(posixpath.join(str(page.parent), link)))


def site_link(words: str, link: str, page: Path, staged: str) -> str:
    """A link as the site needs it: to a page, to elsewhere, or only its words."""
    if re.match(r"[a-z]+:|#", link):
        return f"[{words}]({link})"
    target, mark, part = link.partition("#")
    meant = in_repository(page, target)
    by_file = {path: name for name, path in pages().items()}
    by_file |= {ROOT / name: there for name, there in ROOT_PAGES.items()}
    if meant in by_file:
        there = posixpath.relpath(by_file[meant], posixpath.dirname(staged) or ".")
        return f"[{words}]({there}{mark}{part})"
    if not meant.exists():
        raise StageError(f"{page.relative_to(ROOT)} links to {link}, which does not exist.")
    return words


def inline_picture(alt: str, link: str, page: Path) -> str:
    """An SVG picture as a part of the page, without the colours that it has as a file."""
    svg = in_repository(page, link).read_text()
    svg = re.sub(r"<style>.*?</style>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<\?xml.*?\?>\s*|\n\s*\n", "", svg).strip()
    return f'<figure class="picture" tabindex="0">\n{svg}\n<figcaption>{alt}</figcaption></figure>'


def nested_lists(text: str) -> str:
    """Lists inside lists, and code in them, indented as Python's Markdown wants them: by four."""
    return re.sub(r"^( {2})(?=[-*] )", "    ", text, flags=re.MULTILINE)


def staged_text(text: str, page: Path, staged: str) -> str:
    """A page as the site's builder is to read it."""
    text = PICTURE.sub(lambda match: inline_picture(match[1], match[2], page), text)
    parts = CODE.split(text)
    for number in range(0, len(parts), 2):
        prose = nested_lists(parts[number])
        parts[number] = LINK.sub(lambda match: site_link(match[1], match[2], page, staged), prose)
    return HEADED_TABLE.sub(r"\1\n\n\2", "".join(parts)) if "\n|" in text else "".join(parts)


def unlisted(listing: str) -> list[str]:
    """Pages that the navigation does not lead to."""
    return [name for name in pages() if not re.search(rf"[ :]{re.escape(name)}$", listing, re.M)]


def stage() -> None:
    """Copy everything, and stop at what a reader could not reach or understand."""
    lost = unlisted((ROOT / "mkdocs.yml").read_text())
    if lost:
        raise StageError(
            f"the site does not lead to {', '.join(lost)}: add to 'nav' in mkdocs.yml."
        )
    silent = undocumented()
    if silent:
        raise StageError("public names without a docstring: " + ", ".join(silent))
    shutil.rmtree(STAGED, ignore_errors=True)
    for name, path in pages().items():
        target = STAGED / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(staged_text(path.read_text(), path, name))
    (STAGED / "pictures").mkdir(exist_ok=True)
    shutil.copy(ROOT / "website" / "site.css", STAGED / "pictures" / "site.css")


def main() -> None:
    """Stage the pages; an error is one line."""
    try:
        stage()
    except StageError as error:
        sys.exit(f"docs: {error}")


if __name__ == "__main__":
    main()
