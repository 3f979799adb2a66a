"""What the documentation claims, read against the code: commands, names, numbers, tables."""

import ast
import builtins
import importlib
import json
import keyword
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch.distributed.run
import typer.main

import heterog.agents.planners
from heterog import __version__
from heterog.agents.benchmark.rivals import known_rows
from heterog.agents.checkpoint import load_checkpoint, shipped_policies
from heterog.agents.config import Algorithm, PolicyConfig, TrainingConfig
from heterog.agents.encoder import ENCODERS
from heterog.agents.planners import default_methods
from heterog.agents.proposals import NUM_SAMPLES
from heterog.agents.sources import PIPELINED_PART
from heterog.cli import app
from heterog.cluster.schema import ClusterSpec
from heterog.cluster.spec import parse_cluster, preset_names
from heterog.envs.candidates import MAX_CANDIDATES
from heterog.envs.clusters import ClusterRange
from heterog.envs.observation import OBSERVATION_VERSION
from heterog.envs.pair import CUT_WEIGHTS, PIPELINED
from heterog.envs.registration import ONE_SHOT, STEP_BY_STEP
from heterog.envs.reward import MISFIT
from heterog.envs.spaces import Padding, pair_space
from heterog.envs.strategy_env import StrategyEnv, StrategyOneShotEnv
from heterog.errors import ExperimentalWarning, experimental
from heterog.explain.explanation import SUFFICES
from heterog.export import TARGETS
from heterog.graph import serialize
from heterog.graph.grouping import MAX_BLOCKS
from heterog.lowering import UNROLLED_STEPS
from heterog.modes.averaging.value import Averaging, passes_after, passes_before, times_moved
from heterog.pricing.intervals import SPREAD
from heterog.runtime.launch import ALONE_STEPS
from heterog.runtime.measure.profiler import SHARES
from heterog.runtime.ranks.testbed import shipped_testbeds
from heterog.search.judging import EQUALLY_GOOD, NUM_COMPARED, NUM_DRAWS
from heterog.simulator.evaluator import MEMORY_MARGIN
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES
from heterog.units import GIB, MIB
from heterog.zoo import names as zoo_names
from tests.test_architecture import LAYERS, ROOMS

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
] + sorted((ROOT / "docs").rglob("*.md"))
CODE = [
    path for folder in ("heterog", "experiments", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]  # fmt: skip


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def flat(name: str) -> str:
    """A page without line breaks, for sentences that go over them."""
    return " ".join(text_of(name).split())


def module_docstring(path: Path) -> str:
    """What a file begins with. All files are read whenever tests are collected: parse no more."""
    head, quotes, rest = path.read_text().partition('"""')
    if head.strip("r"):
        return ""
    return ast.get_docstring(ast.parse(head + quotes + rest.partition(quotes)[0] + quotes)) or ""


class Source(NamedTuple):
    """What tests want to know of a file of code, which is parsed once."""

    words: set[str]
    """Everything that it calls something: names, attributes, keywords, short strings."""
    docstrings: list[str]
    """All of them, those below constants and fields included."""
    wrong: list[str]
    """Arguments and attributes that docstrings leave out or make up."""


@cache
def source(path: Path) -> Source:
    words = set(path.relative_to(ROOT).with_suffix("").parts)
    found = Source(words, [], [])
    for node in ast.walk(ast.parse(path.read_text())):
        words.update(words_of(node))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Module):
            text = ast.get_docstring(node)
            if text:
                found.docstrings.append(text)
                if not isinstance(node, ast.Module):
                    where = f"{path.relative_to(ROOT)}: {node.name}"
                    found.wrong.extend(f"{where} {fault}" for fault in faults(node, text))
        elif (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            found.docstrings.append(node.value.value)
    return found


def words_of(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return (node.attr,)
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return (node.name,)
    if isinstance(node, ast.arg):
        return (node.arg,)
    if isinstance(node, ast.keyword) and node.arg:
        return (node.arg,)
    if isinstance(node, ast.alias):
        return node.name.split(".")
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 60:
        return re.findall(r"\w+", node.value)
    return ()


# --- commands ------------------------------------------------------------------------------------


def command_lines(text: str) -> Iterator[str]:
    """Whole commands of a text: indented lines, continued ones joined, remarks cut off."""
    joined = re.sub(r"\\\n\s*", "", text)
    for line in joined.splitlines():
        match = re.match(r"(?: {4,}|)((?:heterog|python|make|torchrun) [a-z\-].*)", line)
        if match and (line.startswith("    ") or re.match(r"python (-m )?[\w/.]+", line)):
            yield re.split(r"\s+#|\s{3,}#", match[1])[0].strip()


WHOLE = sorted(
    {(path.name, line) for path in PAGES for line in command_lines(path.read_text())}
    | {
        (str(path.relative_to(ROOT)), line)
        for path in CODE
        for line in command_lines(module_docstring(path))
    }
)
MENTIONED = sorted(
    {
        (path.name, " ".join(line.split()))
        for path in PAGES
        for line in re.findall(
            r"(?<!`)`((?:heterog|python|make|torchrun) [^`]+)`(?!`)", path.read_text()
        )
    }
)


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that words begin with, and the rest of them."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"there is no command '{words[0]}'"
        command, words = command.commands[words[0]], words[1:]
    return command, words


def options_of(command: Any) -> set[str]:
    return {option for param in command.params for option in param.opts} | {"--help"}


def named_values(words: list[str]) -> Iterator[tuple[str, str]]:
    """(option, value) of every option that names something; lists taken apart."""
    for option, value in pairwise(words):
        if option.startswith("--") and not value.startswith("-"):
            yield from ((option, each) for each in value.split(","))


@cache
def known_values() -> dict[str, set[str]]:
    clusters = {*preset_names(), *shipped_testbeds(), "generated", "ray"}
    methods = {"auto", *(planner.name for planner in known_rows())}
    return {
        "--cluster": clusters, "--clusters": clusters, "--testbed": set(shipped_testbeds()),
        "--method": methods, "--methods": methods, "--models": set(zoo_names()),
        "--background": set(zoo_names()), "--policy": set(shipped_policies()),
        "--algorithm": {*Algorithm, "sb3:PPO", "sb3_contrib:MaskablePPO"},
        "--encoder": set(ENCODERS),
        "--to": set(TARGETS),
    }  # fmt: skip


def check_values(words: list[str]) -> None:
    for option, value in named_values(words):
        known = known_values().get(option)
        is_own = "." in value or value.isupper() or not value
        if known is not None and not is_own:
            assert value in known, f"{option} {value} does not exist"


def check_script(words: list[str]) -> None:
    """A Python file or module with its options; those are looked up in its text."""
    if words[0] == "-m":
        path, rest = ROOT / f"{words[1].replace('.', '/')}.py", words[2:]
        if path.with_suffix("").is_dir():
            path = path.with_suffix("") / "__main__.py"
        if words[1] in ("pytest", "pip") or words[1] == "heterog.cli":
            return
    else:
        path, rest = ROOT / words[0], words[1:]
    assert path.is_file(), f"there is no {path.name}"
    source = path.read_text()
    modules = re.findall(r"^ *from ([\w.]+) import", source, re.M)
    source += "".join(
        file.read_text()
        for folder in (ROOT, path.parent)
        for file in (folder / f"{module.replace('.', '/')}.py" for module in modules)
        if file.is_file()
    )
    if f"from {torch.distributed.run.__name__} import" in source:
        if rest:
            torch.distributed.run.parse_args(rest)  # type: ignore[no-untyped-call]
        return
    for option in (word for word in rest if word.startswith("-")):
        assert f'"{option}"' in source, f"{path.name} has no option {option}"


def check_other(words: list[str]) -> bool:
    """Whether a command is not ours to parse; it is checked as far as it goes."""
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", text_of("Makefile"), re.M), f"no target {words[1]}"
    elif words[0] == "python":
        check_script(words[1:])
    elif words[0] == "torchrun":
        module = words[words.index("-m") + 1]
        importlib.import_module(module)
    else:
        return False
    return True


@pytest.mark.parametrize(("place", "line"), WHOLE, ids=[f"{p}: {w}" for p, w in WHOLE])
def test_a_command_that_is_printed_can_be_run(place: str, line: str) -> None:
    words = [word.strip("[]") for word in shlex.split(line)]
    if check_other(words):
        return
    command, rest = find_command(words[1:])
    assert not hasattr(command, "commands"), f"'{line}' is a list of commands"
    command.make_context(command.name, list(rest))  # a wrong option or type raises
    check_values(rest)


@pytest.mark.parametrize(("place", "line"), MENTIONED, ids=[f"{p}: {w}" for p, w in MENTIONED])
def test_a_command_that_is_mentioned_exists(place: str, line: str) -> None:
    words = [word.strip("[]") for word in shlex.split(line)]
    if check_other(words):
        return
    command, rest = find_command(words[1:])
    known = options_of(command) | {"--install-completion", "--show-completion"}
    for option in (word for word in rest if word.startswith("-")):
        assert option in known, f"'{command.name}' has no option {option}"
    check_values(rest)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_plan_is_run_on_the_testbed_it_was_made_for(path: Path) -> None:
    cluster = ""
    for line in command_lines(path.read_text()):
        options = dict(pairwise(shlex.split(line)))
        if line.startswith("heterog plan"):
            cluster = options.get("--cluster", "")
        elif line.startswith("heterog run") and "--testbed" in options:
            assert options["--testbed"] == cluster, f"'{line}' would be refused"


def test_the_documented_commands_are_many() -> None:
    """The patterns above still find them."""
    assert len(WHOLE) > 60
    assert len(MENTIONED) > 40


# --- names ---------------------------------------------------------------------------------------


@cache
def known_words() -> set[str]:
    """Everything that code calls something."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    found = {*dir(builtins), *keyword.kwlist}.union(
        *(source(path).words for path in [*CODE, *tests])
    )
    for path in sorted((ROOT / "heterog").rglob("data/*.yaml")):
        found |= set(re.findall(r"\w+", path.read_text()))
    return found


def unknown(words: str) -> list[str]:
    """Lower-case identifiers with an underscore that stand nowhere in the code."""
    return [
        word
        for word in re.findall(r"(?<![\w.])[a-z][a-z0-9]*(?:_[a-z0-9]+)+\b", words)
        if word not in known_words()
    ]


FOREIGN = {
    "mutations_and_views",  # an argument of torch's functionalize
    "w_r",  # a symbol of a formula
    "paper_reward",  # defined on the page itself
    "even_steps0",  # a name with a number behind it
    "pytorch_optimizer",  # a package
    "gradient_as_bucket_view",  # an argument of torch's DistributedDataParallel
    # Lightning's arguments, and names of a user's own loop in examples.
    *("train_dataloader", "val_dataloaders", "val_dataset", "val_loader", "number_of_labels"),
}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_names_in_backticks_exist(path: Path) -> None:
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", path.read_text())
    wrong = {name for span in spans for name in unknown(span)} - FOREIGN
    assert not wrong, f"{path.name} names {sorted(wrong)}"


def test_names_in_docstrings_exist() -> None:
    wrong = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in CODE
        for doc in source(path).docstrings
        for span in re.findall(r"``([^`\n]+)``", doc)
        for name in unknown(span)
        if name not in FOREIGN
    }
    assert not wrong, sorted(wrong)


def test_code_in_docstrings_has_double_backticks() -> None:
    wrong = {
        f"{path.relative_to(ROOT)}: `{span}`"
        for path in CODE
        for doc in source(path).docstrings
        for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", doc)
    }
    assert not wrong, sorted(wrong)


def resolve(dotted: str) -> object:
    """The module, or what is in it, that a dotted name means."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    raise AttributeError(dotted)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_dotted_names_resolve(path: Path) -> None:
    for name in set(re.findall(r"\b(heterog(?:\.[A-Za-z_]\w*)+)", path.read_text())):
        if not name.endswith((".errors.HeterogWarning",)):
            resolve(name)


def test_dotted_names_in_docstrings_resolve() -> None:
    found = {
        name
        for path in CODE
        for doc in source(path).docstrings
        for name in re.findall(r"\b(heterog(?:\.[A-Za-z_]\w*)+)", doc)
    }
    for name in found:
        if not name.endswith("_"):  # ``HELD_OUT_*``
            resolve(name)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_rows_of_tables_are_whole(path: Path) -> None:
    """A wrapped row ends a table: what follows is shown as text with bars."""
    width = 0
    for number, line in enumerate(map(str.strip, path.read_text().splitlines()), 1):
        num_bars = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line)))
        if re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", line):
            width = num_bars
        elif not line:
            width = 0
        elif width:
            assert (line[0], line[-1], num_bars) == ("|", "|", width), f"{path.name}:{number}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_files_that_are_named_exist(path: Path) -> None:
    text = path.read_text()
    folders = "heterog|experiments|benchmarks|tests|docs"
    for name in re.findall(rf"`((?:{folders})/[\w/.]+)`", text):
        assert (ROOT / name).exists(), f"{path.name} names {name}"
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (path.parent / link).exists(), f"{path.name} links to {link}"


# --- docstrings' sections ------------------------------------------------------------------------


def sections(doc: str) -> dict[str, list[str]]:
    """Names that each section of a Google-style docstring documents."""
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in doc.splitlines():
        header = re.match(r"(Args|Attributes|Raises):\s*$", line)
        if header:
            current = found.setdefault(header[1], [])
        elif line and not line.startswith(" "):
            current = None
        elif current is not None:
            entry = re.match(r" {4}(\*{0,2}\w+(?:, \w+)*)(?: \(.*\))?:", line)
            if entry:
                current += [name.strip().lstrip("*") for name in entry[1].split(",")]
    return found


def assigned(node: ast.ClassDef) -> set[str]:
    """Names that a class body, its methods' ``self`` included, gives a value or a type."""
    names = {child.name for child in ast.walk(node) if isinstance(child, ast.FunctionDef)}
    for child in ast.walk(node):
        targets: list[ast.expr] = []
        if isinstance(child, ast.Assign):
            targets = child.targets
        elif isinstance(child, ast.AnnAssign):
            targets = [child.target]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Name):
                    names.add(part.id)
                elif isinstance(part, ast.Attribute):
                    names.add(part.attr)
    return names


def arguments(node: ast.FunctionDef) -> list[str]:
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    every += [each for each in (given.vararg, given.kwarg) if each is not None]
    return [each.arg for each in every if each.arg not in ("self", "cls")]


def fields_of(node: ast.ClassDef) -> list[str]:
    return [
        child.target.id
        for child in node.body
        if isinstance(child, ast.AnnAssign)
        and isinstance(child.target, ast.Name)
        and not child.target.id.startswith("_")
    ]


def faults(node: ast.ClassDef | ast.FunctionDef, doc: str) -> Iterator[str]:
    """What a docstring makes up, or leaves out of a list of arguments or attributes."""
    documented = sections(doc)
    attributes = documented.get("Attributes", [])
    if isinstance(node, ast.ClassDef) and attributes:
        missing = set(attributes) - assigned(node)
        if missing:
            yield f"has no {sorted(missing)}"
        is_data = any("dataclass" in ast.dump(each) for each in node.decorator_list)
        left_out = set(fields_of(node)) - set(attributes)
        if is_data and left_out:
            yield f"leaves out {sorted(left_out)}"
    made = [
        child
        for child in (node.body if isinstance(node, ast.ClassDef) else [node])
        if isinstance(child, ast.FunctionDef) and child.name in ("__init__", node.name)
    ]
    if "Args" in documented:
        wanted = arguments(made[0]) if made else fields_of(node)  # type: ignore[arg-type]
        if sorted(documented["Args"]) != sorted(wanted):
            yield "documents other Args"


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_document_what_there_is(path: Path) -> None:
    """No argument or attribute that does not exist, and none left out of a list of them."""
    assert not source(path).wrong


# --- numbers -------------------------------------------------------------------------------------


def default(field: str) -> float:
    """Of a field of cluster files."""
    return float(ClusterSpec.model_fields[field].default)


def averaged_bytes(outer_momentum: float = 0.0, *, has_codec: bool = False) -> int:
    """Bytes moved in an averaging for each byte of parameters."""
    averaging = Averaging(every=8, outer_momentum=outer_momentum)
    passes = passes_before(averaging, has_codec=has_codec, sends=True)
    return times_moved((*passes, *passes_after(averaging, has_codec=has_codec)))


NUMBERS: list[tuple[str, str, object]] = [
    ("docs/guide/predictions.md", r"reported has (\d+) % on top", round(100 * MEMORY_MARGIN)),
    ("docs/guide/clusters.md", r"efficiency: ([\d.]+)\s+# part of a NIC's", default("efficiency")),
    ("docs/guide/clusters.md", r"that is reached \(default ([\d.]+)\)", default("efficiency")),
    ("docs/guide/clusters.md", r"reserved_memory: ([\d.]+) GiB", default("reserved_memory") / GIB),
    ("docs/guide/plans.md", r"the same (\d+) draws", NUM_DRAWS),
    ("docs/guide/methods.md", r"under noise is taken \((\d+) draws", NUM_COMPARED),
    ("docs/guide/plans.md", r"every link by about (\d+) %", round(100 * SPREAD)),
    ("docs/guide/methods.md", r"links by (\d+) %", round(100 * SPREAD)),
    ("README.md", r"is within (\d+) %, that is what is rec", round(100 * SUFFICES)),
    ("docs/guide/plans.md", r"is within (\d+) %, that is the rec", round(100 * SUFFICES)),
    ("docs/guide/jobs.md", r"first (three) measured steps run alone", {3: "three"}[ALONE_STEPS]),
    ("docs/guide/methods.md", r"(three) measured steps run alone", {3: "three"}[ALONE_STEPS]),
    ("docs/guide/methods.md", r"within (half) a percent", {0.005: "half"}[EQUALLY_GOOD]),
    ("docs/planners.md", r"first of 1 MiB, others of (\d+)\)", DEFAULT_BUCKET_BYTES // MIB),
    ("docs/planners.md", r"one pass, at most (\d+) draws", NUM_SAMPLES),
    ("docs/guide/searching.md", r"is an eighth of (eight) unrolled", {8: "eight"}[UNROLLED_STEPS]),
    ("docs/guide/averaging.md", r"memory (\d+) bytes for each byte of param", averaged_bytes()),
    ("docs/guide/averaging.md", r"(\d+) with an outer opt", averaged_bytes(outer_momentum=0.9)),
    ("docs/guide/averaging.md", r"and (\d+) with a codec", averaged_bytes(has_codec=True)),
    ("docs/research.md", r"each of at most (\d+) \*blocks\*", MAX_BLOCKS),
    ("docs/research.md", r"Rows run plainly, or in (\d+) micro-batches", PIPELINED),
    ("docs/research.md", r"with one of (three) weights", {3: "three"}[len(CUT_WEIGHTS)]),
    ("docs/research.md", r"A (third) of the training pairs", {1 / 3: "third"}[PIPELINED_PART]),
    ("pyproject.toml", r'requires-python = ">=([\d.]+)"', "3.11"),
    ("README.md", r"Python ([\d.]+) or newer", "3.11"),
    ("Makefile", r"Python ([\d.]+) or newer", "3.11"),
    ("pyproject.toml", r'^version = "([\d.]+)"', __version__),
]  # fmt: skip


@pytest.mark.parametrize(("page", "pattern", "value"), NUMBERS, ids=[n[1][:40] for n in NUMBERS])
def test_a_number_is_that_of_the_code(page: str, pattern: str, value: object) -> None:
    match = re.search(pattern, flat(page)) or re.search(pattern, text_of(page), re.M)
    assert match, f"{page} no longer says {pattern!r}"
    said = match[1].replace(",", "")
    if isinstance(value, int | float):
        assert float(said) == pytest.approx(float(value)), f"{page}: {match[0]}"
    else:
        assert said == value


@pytest.mark.parametrize("name", shipped_policies())
def test_the_defaults_of_training_are_those_of_the_shipped_policies(name: str) -> None:
    """As ``TrainingConfig`` says; the log beside each policy tells."""
    log = json.loads(text_of(f"heterog/agents/policies/{name}.json"))
    defaults = json.loads(json.dumps(asdict(TrainingConfig())))
    assert log["training_config"] == defaults
    assert load_checkpoint(name).policy.config == PolicyConfig()


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its name, those of groups too."""
    groups = [("heterog", typer.main.get_command(app))]
    while groups:
        name, command = groups.pop()
        found: dict[str, Any] = getattr(command, "commands", {})
        groups += [(f"{name} {each}", what) for each, what in found.items()]
        if not found:
            yield name, command


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=lambda value: str(value)[:30])
def test_every_option_says_what_it_is(name: str, command: Any) -> None:
    assert command.help, f"{name} says nothing about itself"
    for param in command.params:
        assert getattr(param, "help", ""), f"{name} {param.opts[0]} has no help"


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("train", "--pairs", TrainingConfig().num_pairs),
        ("train", "--steps", TrainingConfig().num_steps),
        ("train", "--search", TrainingConfig().search_evaluations),
        ("train", "--max-devices", ClusterRange().max_devices),
        ("plan", "--slow-down", 1.1),
    ],
)
def test_a_default_in_the_help_is_that_of_the_code(
    command: str, option: str, value: object
) -> None:
    found, _ = find_command([command])
    (param,) = [param for param in found.params if option in param.opts]
    if param.default is None:
        assert param.help.endswith(f"; {value} if not given")
    else:
        assert param.default == value


# --- tables --------------------------------------------------------------------------------------


def test_the_methods_of_the_page_are_those_of_the_registry() -> None:
    rows = [
        line.split("|")[1]
        for line in text_of("docs/planners.md").splitlines()
        if line[:3] == "| `"
    ]
    described = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert sorted(described) == sorted(planner.name for planner in default_methods())


def test_the_guide_lists_targets_testbeds_and_shares() -> None:
    for target in TARGETS:
        assert f"| `{target}` |" in flat("docs/guide/exporting.md")
    testbeds = flat("docs/guide/checkpoints.md")
    said = re.search(r"((?:`skew_\w+`,? (?:and )?)+)[^.;]*come with the package", testbeds)
    assert said
    assert sorted(re.findall(r"`(\w+)`", said[1])) == sorted(shipped_testbeds())
    words = {1.0: "whole", 0.5: "half", 0.25: "quarter", 0.125: "eighth", 0.0625: "sixteenth"}
    said = re.search(r"every op inside them, at (.*?) of it", flat("docs/guide/calibration.md"))
    assert said
    assert re.findall("|".join(words.values()), said[1]) == [words[share] for share in SHARES]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "guide").glob("*.md")), ids=lambda path: path.name
)
def test_a_page_of_the_guide_is_read_in_five_minutes(path: Path) -> None:
    assert len(path.read_text().split()) <= 1200, "make it shorter, or two pages"


@pytest.mark.parametrize("env", [StrategyOneShotEnv, StrategyEnv])
def test_the_data_sheet_of_an_environment_is_its_space(env: type[Any]) -> None:
    sizes = {"G": 7, "E": 11, "D": 5, "C": 13}
    padding = Padding(blocks=7, edges=11, devices=5, candidates=13, pairs=3)
    made = env(padding=padding)
    space = {name: box.shape for name, box in made.observation_space.spaces.items()}
    doc = env.__doc__ or ""
    told: dict[str, tuple[int, ...]] = {}

    def size(text: str) -> int:
        factor = text.rstrip("GEDC")
        return int(factor or 1) * sizes.get(text[len(factor) :], 1)

    for row in re.findall(r"^ *\| ([a-z_, ]+) \| ([\w, ]+) \|", doc, re.M):
        if row[0].strip() == "key":
            continue
        names, shapes = (part.split(", ") for part in row)
        for name, shape in zip(names, shapes, strict=True):
            told[name] = tuple(map(size, shape.split(" x ")))
    inherited = set(pair_space(padding)) if env is StrategyEnv else set()
    assert set(told) == set(space) - inherited
    assert told == {name: space[name] for name in told}
    assert f"observation version {OBSERVATION_VERSION}" in doc
    name = ONE_SHOT if env is StrategyOneShotEnv else STEP_BY_STEP
    assert f"{name.rpartition('-')[2]}: observation" in doc


def test_the_data_sheet_quotes_constants() -> None:
    doc = StrategyOneShotEnv.__doc__ or ""
    assert f"at\n    most {MAX_BLOCKS} *blocks*" in doc
    assert f"below {MISFIT}, graded by the overrun" in doc
    assert np.isfinite(MAX_CANDIDATES)


def test_the_changelog_has_a_section_to_write_in() -> None:
    headings = re.findall(r"^##+ .*", text_of("CHANGELOG.md"), re.M)
    assert headings[:4] == ["## Unreleased", "### Added", "### Changed", "### Fixed"]


def test_the_layers_of_the_page_are_those_that_are_held() -> None:
    text = flat("ARCHITECTURE.md")
    claim = re.search(r"\(a test holds them\): (.*?)\. torch is", text)
    assert claim
    told = [set(re.findall(r"[a-z_]+", layer)) for layer in claim[1].split("<")]
    assert told == [set(layer) for layer in LAYERS]
    rooms = re.search(r"torch is imported only by (.*?), numba only by (.*?);", text)
    assert rooms
    named = {name.partition(".")[0] for name in re.findall(r"`([\w.]+)`", rooms[1])}
    assert named == {room.partition("/")[0].removesuffix(".py") for room in ROOMS["torch"]}
    packages = {
        path.name for path in (ROOT / "heterog").iterdir() if (path / "__init__.py").exists()
    }
    missing = {name for name in packages if f"**`{name}`**" not in text_of("ARCHITECTURE.md")}
    assert not missing, f"ARCHITECTURE.md says nothing of {sorted(missing)}"
    assert len(text.split()) <= 750, "ARCHITECTURE.md is one page; a package's docstring has more"


# --- examples ------------------------------------------------------------------------------------


def indented_blocks(text: str, first: str) -> list[str]:
    """Indented blocks of a text that begin with a line."""
    lines = text.splitlines()
    blocks = []
    for number, line in enumerate(lines):
        if line.strip() == first and line.startswith("    "):
            end = number
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            blocks.append(textwrap.dedent("\n".join(lines[number:end])))
    return blocks


CLUSTER_FILES = [
    (name, block)
    for name in ("README.md", "docs/guide/clusters.md", "heterog/cluster/spec.py")
    for block in indented_blocks(text_of(name), "schema_version: 1")
]


@pytest.mark.parametrize(
    ("place", "block"), CLUSTER_FILES, ids=[each[0] for each in CLUSTER_FILES]
)
def test_the_cluster_files_of_the_docs_can_be_read(place: str, block: str, tmp_path: Path) -> None:
    calibration = re.search(r"calibration: (\S+)", block)
    if calibration:
        block = block.replace(calibration[0], "")
    cluster = parse_cluster(block, tmp_path / "lab.yaml")
    assert cluster.num_devices >= 4, place


def test_the_cluster_files_are_found() -> None:
    assert {place for place, _ in CLUSTER_FILES} == {
        "README.md", "docs/guide/clusters.md", "heterog/cluster/spec.py"
    }  # fmt: skip


def test_the_workload_of_the_readme_can_be_planned() -> None:
    (code,) = indented_blocks(text_of("README.md"), "import torch, heterog")
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    (lab,) = indented_blocks(text_of("README.md"), "schema_version: 1")
    plan = heterog.plan(
        names["workload"](), parse_cluster(lab, Path("lab.yaml")), method="cp_ar", budget="5e"
    )
    assert plan.step_time_s is not None
    (use,) = indented_blocks(
        text_of("README.md"),
        'plan = heterog.plan(workload(), heterog.Cluster.load("lab.yaml"), budget="30s")',
    )
    for name in re.findall(r"(?<!\")\bplan\.(\w+)", use):
        assert hasattr(plan, name), f"README.md uses plan.{name}"


def test_the_graph_of_the_format_description_can_be_read() -> None:
    doc = serialize.__doc__ or ""
    (example,) = indented_blocks(doc, "{")
    graph = serialize.graph_from_dict(json.loads(example), "the example")
    assert graph.num_ops == 3


def test_the_page_of_what_is_stable_names_what_is_experimental() -> None:
    said = (
        flat("docs/reference/stability.md").split("**Experimental**")[1].split("**Not stable")[0]
    )
    marked = [
        name
        for path in sorted((ROOT / "heterog").rglob("*.py"))
        for name in re.findall(r"^@experimental\nclass (\w+)", path.read_text(), re.M)
    ]
    assert sorted(re.findall(r"heterog\.(?:\w+\.)+([A-Z]\w+)", said)) == sorted(marked)


def test_what_is_experimental_warns_and_works() -> None:
    @experimental
    class Thing:
        """A thing."""

        def __init__(self, size: int) -> None:
            self.size = size

    with pytest.warns(ExperimentalWarning, match="Thing is experimental: it may change"):
        assert Thing(3).size == 3
    assert Thing.__doc__ == "A thing."
