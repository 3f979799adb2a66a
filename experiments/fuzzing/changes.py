"""Changes that a case makes to a valid file: to its values or its bytes."""

import contextlib
import csv
import gzip
import io
import json
import math
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import yaml

from fuzzing.outputs import make_case
from fuzzing.valid import Kind
from heterog.graph.sharding_rules import RULES

TEXTS = (
    "", " ", "\n", "\0", "x\ny", '"', "'''", '"""; import os; os._exit(3)', "$(id)", "`id`",
    "</script><script>alert(1)</script>", "[/red]", "[bold]x[/nope]", "../../etc/passwd",
    "/etc/shadow:workload", "m.py:f", "\u202eabc", "\ud800", "a" * 5000, "nan", "-1", "1e999",
    "R", "P", "L", "S(0)", "S(9,9)", "S(0,0)", "ok", "nonsense", "view.default", "update",
    "mm.default", "expand.default", "fifo", "zero3", "hierarchical", "{{x}}", "%s", "%%{model}",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 3, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**63, -(2**63) - 1,
    10**30, 10**400, 0.0, -0.0, 0.5, -0.5, 1e-300, 5e-324, 1e18, 1e30, 1e300, -1e300, math.inf,
    -math.inf, math.nan, 1.0000001,
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [0], {"t": 0}, {"f": "nan"}, [None])


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document."""
    found = [path]
    if isinstance(value, dict):
        for key in value:
            found += places(value[key], (*path, key))
    elif isinstance(value, list):
        # All of a short list, some of a long one.
        step = max(len(value) // 40, 1)
        for index in range(0, len(value), step):
            found += places(value[index], (*path, index))
    return found


def at(value: Any, path: tuple[Any, ...]) -> Any:
    """The value at a place."""
    for step in path:
        value = value[step]
    return value


def draw_value(rng: random.Random, old: Any) -> Any:
    """Another value, usually of the same type."""
    numeric = isinstance(old, int | float) and not isinstance(old, bool)
    if numeric and rng.random() < 0.7:
        small = abs(old) < 1e300  # what was changed before may be beyond any float
        near = [old + 1, old - 1, -old, *([old * 2, old * 1e6, float(old)] if small else [])]
        return rng.choice([*NUMBERS, *near])
    if isinstance(old, str) and rng.random() < 0.7:
        return rng.choice([*TEXTS, old + rng.choice(TEXTS), old[:-1], old.upper()])
    return rng.choice([*NUMBERS, *TEXTS, *OTHERS])


def change_value(rng: random.Random, document: Any) -> Any:
    """One change somewhere in a document."""
    everywhere = places(document)
    # By depth first, so that small parts are drawn as often as the long columns.
    depth = rng.randint(1, max(len(path) for path in everywhere))
    path = rng.choice([each for each in everywhere if len(each) == depth] or everywhere)
    if not path:
        return draw_value(rng, document)
    parent, key = at(document, path[:-1]), path[-1]
    old = parent[key]
    match rng.randrange(9):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[rng.choice([*TEXTS, f"{key}x", str(key)[:-1]])] = parent.pop(key)
        case 2 if isinstance(parent, dict):
            parent[rng.choice([*TEXTS, "extra"])] = draw_value(rng, old)
        case 3 if isinstance(old, list) and old:
            _change_list(rng, old)
        case 4:
            parent[key] = json.loads(json.dumps(at(document, rng.choice(everywhere))))
        case 5:
            nested: Any = old
            for _ in range(rng.choice([1, 2, 20, 60])):
                nested = [nested] if rng.random() < 0.5 else {"a": nested}
            parent[key] = nested
        case _:
            parent[key] = draw_value(rng, old)
    return document


def change_op(rng: random.Random, document: Any) -> Any:
    """One change of an op in a graph: its kind, the names of its arguments, its tensors.

    The result has the right types, but is unlike any op that a rule of this kind has seen.
    """
    graph: Any = document.get("graph", document) if isinstance(document, dict) else None
    ops: Any = graph.get("ops") if isinstance(graph, dict) else None
    if not isinstance(ops, dict) or not ops.get("args"):
        return change_value(rng, document)
    with contextlib.suppress(
        AttributeError, KeyError, IndexError, TypeError, ValueError
    ):  # changed before
        index = rng.randrange(len(ops["args"]))
        args, inputs = ops["args"][index], ops["inputs"][index]
        match rng.randrange(6):
            case 0 if args:
                other = rng.choice([each for each in ops["args"] if each])
                args[rng.choice([*other, "selfx"])] = args.pop(rng.choice(list(args)))
            case 1 if args:
                args.pop(rng.choice(list(args)))
            case 2:
                ops["kind"][index] = rng.choice([*ops["kind"], *RULES])
            case 3:
                graph["kinds"][rng.randrange(len(graph["kinds"]))] = rng.choice([*RULES])
            case 4 if inputs:
                _change_list(rng, inputs)
            case _:
                _change_list(rng, rng.choice(graph["tensors"]["shape"]))
    return document


def _change_list(rng: random.Random, values: list[Any]) -> None:
    index = rng.randrange(len(values))
    match rng.randrange(6):
        case 0:
            values.pop(index)
        case 1:
            values.insert(index, values[rng.randrange(len(values))])
        case 2:
            values.reverse()
        case 3:
            rng.shuffle(values)
        case 4:
            other = rng.randrange(len(values))
            values[index], values[other] = values[other], values[index]
        case _:
            values += values[:1] * rng.choice([1, 100, 5000])


def to_json(rng: random.Random, document: Any) -> bytes:
    """A document as JSON, sometimes in a form that only Python writes."""
    text = json.dumps(document)
    if rng.random() < 0.05 and isinstance(document, dict) and document:
        key = rng.choice(list(document))
        text = f"{{{json.dumps(key)}: {json.dumps(draw_value(rng, 0))}, {text[1:]}"
    return text.encode("utf-8", "surrogatepass")


def change_bytes(rng: random.Random, content: bytes) -> bytes:
    """Bytes cut off, garbled, doubled, packed or exchanged."""
    size = max(len(content), 1)
    match rng.randrange(12):
        case 0:
            return content[: rng.randrange(size)]
        case 1 | 2 | 3:
            changed = bytearray(content)
            for _ in range(rng.choice([1, 1, 1, 2, 20])):
                changed[rng.randrange(size)] = rng.randrange(256)
            return bytes(changed)
        case 4:
            return content + content
        case 5:
            return b""
        case 6:
            return gzip.compress(content)[: rng.choice([10**9, 20, size // 3])]
        case 7:
            return packed_spaces(rng.choice([10**6, 200 * 2**20]))
        case 8:
            return rng.choice([b"[", b'{"a":']) * rng.choice([50, 1000, 200_000])
        case 9:
            return b"\xff\xfe" + content
        case 10:
            return b"[" + b"[]," * rng.choice([100, 3_000_000]) + b"1]"
        case _:
            cut = rng.randrange(size)
            return content[:cut] + bytes(rng.randrange(256) for _ in range(8)) + content[cut:]


@lru_cache
def packed_spaces(count: int) -> bytes:
    """A list of one number and many spaces, as gzip packs it."""
    return gzip.compress(b"[" + b" " * count + b"1]", 9)


@lru_cache
def packed_policy(count: int) -> bytes:
    """A zip file of zeros, packed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * count)
    return buffer.getvalue()


def yaml_bomb(rng: random.Random) -> bytes:
    """Few lines that stand for many values."""
    lines = [f"a0: &a0 [{', '.join(['x'] * 10)}]"]
    for level in range(1, rng.choice([2, 5, 9])):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]")
    merged = "\n".join(["b: &b {a: 1}", *(f"c{n}: &c{n} {{<<: [*b, *b]}}" for n in range(5))])
    return rng.choice(["\n".join(lines), merged, "a: &a [*a]", "? [a]\n: 1"]).encode()


def odd_file(rng: random.Random, target: Path) -> str:
    """No file, or none that one should read."""
    match rng.randrange(4):
        case 0:
            return "missing"
        case 1:
            target.mkdir()
            return "folder"
        case 2:
            os.mkfifo(target)
            return "pipe"
        case _:
            target.symlink_to("/dev/zero")
            return "device"


def change_torch(rng: random.Random, content: bytes) -> bytes:
    """A policy with other values, or one that is packed."""
    if rng.random() < 0.1:
        return packed_policy(rng.choice([100, 100 * 2**20]))
    record = torch.load(io.BytesIO(content), weights_only=True)
    where = rng.choice(["weights", "weights", "config", "top"])
    if where == "weights":
        name = rng.choice(list(record["weights"]))
        value = record["weights"][name]
        record["weights"][name] = rng.choice(
            [
                value * math.nan,
                value.double(),
                value.reshape(-1)[:1].expand(10**9),
                torch.zeros(3),
                value.to_sparse(),
                None,
                "text",
                torch.full_like(value, math.inf),
            ]
        )
    elif where == "config":
        name = rng.choice(list(record["config"]))
        record["config"][name] = draw_value(rng, record["config"][name])
    else:
        name = rng.choice(list(record))
        record[name] = draw_value(rng, record[name])
        if rng.random() < 0.3:
            del record[name]
    buffer = io.BytesIO()
    with contextlib.suppress(Exception):
        torch.save(record, buffer)
    return buffer.getvalue()


def change_folder(rng: random.Random, source: Path, target: Path) -> str:
    """A checkpoint with another index or other data."""
    shutil.copytree(source, target)
    index = target / "checkpoint.json"
    data = next((target / "data-0").glob("*.distcp"))
    match rng.randrange(6):
        case 0 | 1:
            content = bytearray(data.read_bytes())
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            data.write_bytes(bytes(content))
            return "flipped bit"
        case 2:
            content = bytearray(data.read_bytes())
            data.write_bytes(rng.choice([bytes(content[:-50]), b"", bytes(len(content))]))
            return "cut data"
        case 3:
            data.unlink()
            return "no data"
        case 4:
            index.write_bytes(change_bytes(rng, index.read_bytes()))
            return "index bytes"
        case _:
            document = change_value(rng, json.loads(index.read_text()))
            index.write_bytes(to_json(rng, document))
            return "index values"


def change_file(rng: random.Random, kind: Kind, target: Path) -> str:
    """Write a changed file of a kind; says how it was changed."""
    source = rng.choice(kind.files)
    if kind.form == "call":
        return make_case(rng, source, target)
    if rng.random() < 0.02:
        return odd_file(rng, target)
    if kind.form == "folder":
        return change_folder(rng, source, target)
    content = source.read_bytes()
    if rng.random() >= 0.75:
        bomb = kind.form == "yaml" and rng.random() < 0.2
        target.write_bytes(yaml_bomb(rng) if bomb else change_bytes(rng, content))
        return "bytes"
    if kind.form == "torch":
        target.write_bytes(change_torch(rng, content))
        return "weights"
    packed = content[:2] == b"\x1f\x8b"
    text = (gzip.decompress(content) if packed else content).decode()
    changed = change_text(rng, kind, text)
    target.write_bytes(gzip.compress(changed) if packed else changed)
    return "values"


def change_text(rng: random.Random, kind: Kind, text: str) -> bytes:
    """A document with other values, in the form of its kind."""
    read, write = _FORMS[kind.form]
    document = read(text)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        changes_op = kind.name in ("graph", "plan") and rng.random() < 0.3
        document = (change_op if changes_op else change_value)(rng, document)
    return write(rng, document)


def _as_yaml(rng: random.Random, document: Any) -> bytes:
    del rng
    # JSON is YAML, too, and has no trouble with what nests deeply.
    deep = max(len(place) for place in places(document)) > 30
    dumped = json.dumps(document) if deep else yaml.dump(document, allow_unicode=True)
    return dumped.encode("utf-8", "surrogatepass")


def _as_lines(rng: random.Random, document: Any) -> bytes:
    lines = document if isinstance(document, list) else [document]
    return b"".join(to_json(rng, line) + b"\n" for line in lines)


def _as_csv(rng: random.Random, document: Any) -> bytes:
    del rng
    made = io.StringIO()
    for row in document if isinstance(document, list) else [document]:
        csv.writer(made).writerow(row if isinstance(row, list) else [row])
    return made.getvalue().encode("utf-8", "surrogatepass")


_FORMS: dict[str, tuple[Callable[[str], Any], Callable[[random.Random, Any], bytes]]] = {
    "json": (json.loads, to_json),
    "yaml": (yaml.safe_load, _as_yaml),
    "lines": (lambda text: [json.loads(line) for line in text.splitlines()], _as_lines),
    "csv": (lambda text: list(csv.reader(text.splitlines())), _as_csv),
}
"""How a form is read and written."""
