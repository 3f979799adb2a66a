"""The layers hold: imports go downwards only, and heavy libraries stay in their rooms."""

import ast
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from heterog import cli
from heterog.graph.placement import kinds
from heterog.graph.sharding_rules import RULES
from heterog.modes.built_in import built_in_modes
from heterog.modes.mode import Mode
from heterog.strategy.sync import Sync
from tests.runtime.ranks import FORKS

PACKAGE = Path(__file__).parents[1] / "heterog"
# Bottom up; a module may import from its own layer and from those before it.
LAYERS = (
    {
        "errors",
        "names",
        "units",
        "files",
        "memo",
        "garbage",
        "grouped",
        "records",
        "yaml_files",
        "user_code",
        "workers",
        "local_losses",
    },
    {"graph", "cluster"},
    {"zoo"},
    {"strategy"},
    {"lowering"},
    {"pricing"},
    {"simulator"},
    {"fidelity", "methods"},
    {"search"},
    {"explain"},
    {"envs", "runtime", "report", "export", "balance"},
    {"agents"},
    {"healing"},
    {"api", "cli", "run", "heal", "__main__"},
)
MODES = {
    "strategy": ("__init__", "mode", "built_in"),
    "lowering": ("islands", "value", "messages"),
    "simulator": ("paces",),
    "search": ("search", "method"),
    "runtime": ("on_ranks", "ranks", "weight_server", "tensors"),
}
"""Layer of each file of ``modes``: a room has one for each part of what a mode does."""
RUN_BY_RANKS = sorted(
    str(path.relative_to(PACKAGE / "modes"))
    for path in (PACKAGE / "modes").rglob("*.py")
    if path.stem in MODES["runtime"]
)
ROOMS = {
    "torch": (
        *(
            "graph/capture/",
            "graph/optimizer_probe.py",
            "graph/python_state.py",
            "graph/repeated_calls.py",
            "graph/step.py",
            "graph/value_numbers.py",
            "graph/sample_ops.py",
            "graph/static_shapes.py",
            "graph/traced_constants.py",
            "graph/value_checks.py",
        ),
        *("graph/sparse_product.py", "graph/grouped_rows.py"),
        "local_losses.py",
        *(f"modes/{name}" for name in RUN_BY_RANKS),
        *("zoo/", "runtime/", "balance/", "agents/", "healing/"),
    ),
    "transformers": ("zoo/", "balance/for_trainer"),
    "accelerate": ("balance/for_accelerate.py",),
    "lightning": ("balance/for_lightning.py",),
    "torch_geometric": ("agents/",),
    "numba": ("lowering/kernels.py",),
    "gymnasium": ("envs/", "agents/"),
    "stable_baselines3": ("agents/",),
    "tensorboard": ("agents/",),
    "ray": ("workers.py",),
    "typer": ("cli/",),
    "pydantic": (
        "records.py",
        "cluster/",
        "graph/graph_records.py",
        "strategy/serialize.py",
        "pricing/op_fits.py",
        "pricing/calibration.py",
        "fidelity/comparison.py",
        *("search/plan_file.py", "search/history.py"),
        "agents/checkpoint.py",
        "runtime/checkpoint/contents.py",
    ),
}
# Words of code that only one kind of accelerator, or its backend, has.
VENDOR_WORDS = re.compile(r"cuda|nccl|xccl|rocm|\bhip|\bxpu\b", re.IGNORECASE)
VENDOR_ROOMS = {
    "runtime/accelerators.py": "the table of accelerators itself",
    "export/folder.py": "the torch device that exported scripts of other launchers read",
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def layer(name: str, *inside: str) -> int:
    if name == "modes":
        stem = inside[-1].removesuffix(".py") if inside else "__init__"
        stem = stem if any(stem in files for files in MODES.values()) else "__init__"
        name = next(layer for layer, files in MODES.items() if stem in files)
    return next(number for number, members in enumerate(LAYERS) if name in members)


class Source(NamedTuple):
    """What the tests below want to know of a file, which is parsed once."""

    imports: set[str]
    """Modules imported when it is loaded (not inside functions or type checks)."""
    classes: list[str]
    long_functions: list[str]
    with_two_docstrings: list[str]


@cache
def source(path: Path) -> Source:
    module = ast.parse(path.read_text())
    found = Source(imported(module), [], [], [])
    if has_two_docstrings(module):
        found.with_two_docstrings.append("the file")
    for node in ast.walk(module):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        if has_two_docstrings(node):
            found.with_two_docstrings.append(node.name)
        if isinstance(node, ast.ClassDef):
            found.classes.append(node.name)
        elif (node.end_lineno or 0) - node.lineno >= 60:
            found.long_functions.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}")
    return found


def has_two_docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> bool:
    return len(node.body) > 1 and is_text(node.body[0]) and is_text(node.body[1])


def is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def imported(module: ast.Module) -> set[str]:
    found: set[str] = set()

    def visit(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
            elif isinstance(node, ast.ClassDef | ast.Try):
                visit(node.body)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
                visit(node.body)

    visit(module.body)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_and_heavy_libraries_stay_in_their_rooms(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    own = layer(relative.parts[0].removesuffix(".py"), *relative.parts[1:])
    for module in source(path).imports:
        parts = module.split(".")
        if parts[0] == "heterog" and len(parts) > 1:
            assert layer(*parts[1:]) <= own, f"{relative} imports {module}, which is above it"
        rooms = ROOMS.get(parts[0])
        if rooms:
            allowed = any(str(relative).startswith(room) for room in rooms)
            assert allowed, f"{relative} imports {parts[0]}, which belongs in {rooms}"


def words_of_code(path: Path) -> set[str]:
    """Names and texts in a file, without comments and docstrings."""
    docstrings = {
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    with path.open("rb") as file:
        return {
            token.string
            for token in tokenize.tokenize(file.readline)
            if token.type != tokenize.COMMENT
            and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        }


def test_one_place_knows_accelerators() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if VENDOR_WORDS.search(path.read_text())  # else not in its code either
        and any(VENDOR_WORDS.search(word) for word in words_of_code(path))
    }
    assert "runtime/accelerators.py" in found
    assert found <= set(VENDOR_ROOMS), f"ask runtime/accelerators.py: {found - set(VENDOR_ROOMS)}"
    unused = set(VENDOR_ROOMS) - found
    assert not unused, f"no exceptions any more: {unused}"


def test_one_place_opens_process_groups() -> None:
    """Which knows how long ranks wait in them: torch's own limit is half an hour."""
    assert naming(r"\bnew_group\b") == {"runtime/step/collectives.py"}


def test_importing_heterog_is_quick_and_prints_nothing() -> None:
    code = (
        "import sys, heterog; "
        "assert not {'torch', 'numba', 'numpy', 'rich'} & set(sys.modules), sorted(sys.modules); "
        "import heterog.cli; "
        "assert not {'torch', 'numba', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_public_names_exist() -> None:
    import heterog

    for name in heterog.__all__:
        assert getattr(heterog, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        heterog.nothing  # noqa: B018


MOST_TOUCHED = 8
"""Source files that a new synchronisation or a new rule of an op may have to change."""
CHOOSERS = ("methods/", "search/", "modes/search.py", "envs/candidates.py", "strategy/layouts/")
"""Files that pick a synchronisation among others: a new one is picked when they want it."""


def naming(words: str) -> set[str]:
    """Files in which a word occurs, by regular expression."""
    pattern = re.compile(words)
    return {str(path.relative_to(PACKAGE)) for path in FILES if pattern.search(path.read_text())}


@pytest.mark.parametrize("sync", list(Sync))
def test_few_files_know_a_synchronisation(sync: Sync) -> None:
    """Its row of traits, its channel and the channel's price, time and words: no more."""
    channel = f"|\\bALL_REDUCE_{sync.name}\\b"
    known = naming(rf"\bSync\.{sync.name}\b{channel}") | {"strategy/sync.py"}
    known = {name for name in known if not name.startswith(CHOOSERS)}
    assert len(known) <= MOST_TOUCHED, known


MOST_BESIDE_A_ROOM = 2
"""Source files that name a mode outside its room."""
MOST_OF_A_MODE = 6
"""Source files that a mode takes, its room with its map and those that name it outside of it."""
KNOWS_MODES = {
    "cli/plan.py": {"modes.built_in", "modes.codecs.value", "modes.codecs.method"},
    "cli/common.py": {"modes.built_in"},
    "cli/found.py": {"modes.built_in"},
    "strategy/serialize.py": {"modes.built_in", "modes.mode"},
}
"""What else than the protocol files outside of ``modes`` import of it, in functions too."""


def test_exact_training_knows_only_the_protocol_of_modes() -> None:
    for path in FILES:
        name = str(path.relative_to(PACKAGE))
        if name.startswith("modes/"):
            continue
        found = set(re.findall(r"(?:from|import) heterog\.(modes[\w.]*)", path.read_text()))
        allowed = {"modes.mode", "modes.on_ranks"} | KNOWS_MODES.get(name, set())
        assert found <= allowed, f"{name} imports {found - allowed}"


@pytest.mark.parametrize("mode", built_in_modes(), ids=lambda mode: mode.key)
def test_few_files_know_a_mode(mode: type[Mode]) -> None:
    """The list of modes, and rooms of modes that go with it."""
    room = mode.__module__.removeprefix("heterog.").rpartition(".")[0].replace(".", "/")
    outside = {name for name in naming(rf"\b{mode.__name__}\b") if not name.startswith(room)}
    assert "modes/built_in.py" in outside
    assert len(outside) <= MOST_BESIDE_A_ROOM, outside
    inside = sorted((PACKAGE / room).glob("*.py"))
    assert len(inside) + len(outside) <= MOST_OF_A_MODE, (inside, outside)


def test_few_files_know_an_op() -> None:
    """Its rule, and where it has one, its cost, its capture and how it runs on a part."""
    quoted = re.compile(r"(?=[\"'.](\w+)(?:\.\w+)?[\"'])")  # "name", 'name.default', x.name"
    lists, in_lists = re.compile(r"\bkinds\(([^)]*)\)"), re.compile(r"\"([^\"]*)\"")
    naming: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        text = path.read_text()
        listed = kinds(" ".join(in_lists.findall(" ".join(lists.findall(text)))))
        for name in (*quoted.findall(text), *(kind.partition(".")[0] for kind in listed)):
            naming[name].add(str(path.relative_to(PACKAGE)))
    for kind in RULES:
        if kind == "index.Tensor":  # "index" also names what gathers and scatters look up
            continue
        known = naming[kind.partition(".")[0]]
        assert known
        assert len(known) <= MOST_TOUCHED, (kind, known)


def test_a_definition_has_one_docstring() -> None:
    """A file that was joined of two says in one text what it holds."""
    assert not [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in FILES
        for name in source(path).with_two_docstrings
    ]


LONG_FUNCTIONS = 24
"""Functions of more than 60 lines that there are; the engine's loop is one. Only ever fewer."""


def test_long_functions_get_fewer() -> None:
    found = [name for path in FILES for name in source(path).long_functions]
    assert len(found) <= LONG_FUNCTIONS, found


PACKAGES = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_package_is_a_map_of_its_modules(folder: Path) -> None:
    names = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    if folder != PACKAGE:  # ARCHITECTURE.md is the map of the packages themselves
        names |= {path.parent.name for path in folder.glob("*/__init__.py")}
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    missing = {name for name in names if f"``{name}``" not in said}
    assert not missing, f"say in {folder.name}/__init__.py what {sorted(missing)} hold"


def test_root_links_lead_into_the_package() -> None:
    root = PACKAGE.parent
    for name in ("simulator", "envs", "agents"):
        assert (root / name).is_symlink()
        assert (root / name).resolve() == PACKAGE / name


def test_root_links_say_what_to_import() -> None:
    script = """
for name in ("simulator.evaluator", "envs", "agents.encoder"):
    try:
        __import__(name)
    except ImportError as error:
        print(error)
    __import__(f"heterog.{name.partition('.')[0]}")
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        f"'{name}' is a link to the folder of 'heterog.{name}'; import 'heterog.{name}'"
        for name in ("simulator", "envs", "agents")
    ]


GIVEN_UP = ("Asked", "Pen", "Promise", "Purse", "Told", "Whole", "_Desk")
"""Names of classes that were no word of this field; docs/glossary.md has those that are."""


def test_classes_are_named_by_words_of_the_field() -> None:
    names = {(path, name) for path in PACKAGE.rglob("*.py") for name in source(path).classes}
    assert not [each for each in names if each[1] in GIVEN_UP]


def options_of_commands() -> set[str]:
    """All options of ``heterog``, as one types them."""
    commands: list[Any] = [typer.main.get_command(cli.app)]
    found: set[str] = set()
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        found |= {option for each in command.params for option in each.opts}
    return {option for option in found if option.startswith("--")}


def test_only_the_command_line_knows_how_an_option_is_spelled() -> None:
    options, found = options_of_commands(), []
    assert "--step-timeout" in options
    for path in FILES:
        name = str(path.relative_to(PACKAGE))
        text = "" if name.startswith("cli/") else path.read_text()
        if "--" not in text:
            continue
        # What is exported has a command line of its own.
        spelled = options - {"--steps"} if name.startswith("export/") else options
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                known = spelled & set(re.findall(r"--[a-z][a-z-]*[a-z]", node.value))
                found += [f"{name}:{node.lineno} {option}" for option in sorted(known)]
    assert not found, "name the setting between backticks; see heterog/cli/outputs.py"


def test_only_the_command_line_parses_options() -> None:
    below = [path for path in FILES if "cli" not in path.relative_to(PACKAGE).parts]
    assert not [path for path in below if {"argparse", "typer"} & source(path).imports]


def import_methods() -> None:
    from heterog.methods.registry import built_in_methods

    assert "heterog.agents.planners" not in sys.modules
    before = built_in_methods().names
    for name in ("heterog.agents.planners", "heterog.api"):
        import_module(name)
    assert built_in_methods().names == before


def test_importing_a_method_adds_it_nowhere() -> None:
    """What ``auto`` runs does not depend on imports: ``Methods`` is a value."""
    process = FORKS.Process(target=import_methods)
    process.start()
    process.join()
    assert process.exitcode == 0
