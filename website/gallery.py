"""Writes the gallery of examples from the scripts themselves.

python -m website.gallery
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "examples" / "gallery"
PAGE = ROOT / "docs" / "examples.md"
HEAD = """# Examples

<!-- Made by website/gallery.py from examples/gallery: change those scripts instead. -->

The tests run every script of this page. Start one from the folder of the repository. None of them
needs a GPU.
"""
TAIL = """## Unequal batches in frameworks

`examples/balance` has one script each for DistributedDataParallel, `fully_shard`, Accelerate, the
Hugging Face Trainer and Lightning, and beside it the same script without a balancer. At most five
lines differ, and a test compares what both train. [Unequal GPUs in your loop](balance.md) explains
them.

    torchrun --nproc-per-node 3 -m examples.balance.plain_ddp
"""


def scripts() -> list[Path]:
    """Every script of the gallery."""
    return sorted(path for path in SCRIPTS.glob("*.py") if path.name != "__init__.py")


def section(path: Path) -> str:
    """A script with its first sentence as the heading."""
    source = path.read_text()
    about = (ast.get_docstring(ast.parse(source)) or path.stem).strip().rstrip(".")
    command = f"    python -m examples.gallery.{path.stem}"
    code = source.partition('"""\n')[2].strip()
    return f"## {about}\n\n{command}\n\n```python\n{code}\n```\n"


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(section(path) for path in scripts()), TAIL])


if __name__ == "__main__":
    PAGE.write_text(page())
