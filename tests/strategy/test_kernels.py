"""Compiled kernels: kept on disk, stale when they must be, and told about while they compile."""

import ast
import errno
import importlib.util
import pickle
import sys
from pathlib import Path
from random import Random
from types import ModuleType

import numba
import numpy as np
import pytest
from numba.core.caching import CompileResultCacheImpl, IndexDataCacheFile

from heterog.lowering import Choice, kernels
from heterog.lowering.tables import GraphTables
from heterog.lowering.tape import Tape
from heterog.pricing.cost_model import Prices
from heterog.simulator.engine import Order
from heterog.simulator.timings import Timings
from tests.simulator.builders import random_case

PACKAGE = Path(kernels.__file__).parents[1]
SOURCE = """
from heterog.lowering.kernels import {decorator}

@{decorator}
def doubled(number):
    return 2 * number
"""


def decorated(tree: ast.Module) -> list[ast.FunctionDef]:
    return [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and {ast.unparse(each) for each in node.decorator_list} & {"kernel", "helper"}
    ]


def load(path: Path) -> ModuleType:
    """A module of its own each time, as a new process would load it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # numba pickles by name
    spec.loader.exec_module(module)
    return module


def compiled_names(module: ModuleType) -> list[str]:
    """Kernels that a call compiles."""
    found: list[str] = []
    with kernels.compilation_told(lambda name, part: found.append(name)):
        assert module.doubled(21) == 42
    return found


def package_trees() -> dict[str, ast.Module]:
    """Every file of the package, by its path in it."""
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
        for path in PACKAGE.rglob("*.py")
    }


def tuples_of_kernels(trees: dict[str, ast.Module]) -> list[tuple[str, ast.ClassDef]]:
    """File and definition of each named tuple that a kernel or a helper takes."""
    annotations = {
        ast.unparse(argument.annotation).strip("'\"")
        for tree in trees.values()
        for function in decorated(tree)
        for argument in function.args.args
        if argument.annotation is not None
    }
    return [
        (file, node)
        for file, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        if node.name in annotations and "NamedTuple" in {ast.unparse(base) for base in node.bases}
    ]


def test_all_that_is_compiled_into_kernels_makes_them_stale() -> None:
    trees = package_trees()
    needed = {name for name, tree in trees.items() if decorated(tree)}
    needed |= {file for file, _ in tuples_of_kernels(trees)}
    assert needed
    sources = {source: set(PACKAGE.glob(source)) for source in kernels.SOURCES}
    assert all(sources.values())
    assert {PACKAGE / name for name in needed} <= set().union(*sources.values())


@pytest.mark.parametrize("decorator", ["kernel"])
def test_a_kernel_is_kept_until_any_source_changes(
    decorator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"kept_{decorator}.py"
    path.write_text(SOURCE.format(decorator=decorator))
    assert compiled_names(load(path)) == ["doubled"]
    assert compiled_names(load(path)) == []
    monkeypatch.setattr(kernels, "_sources_stamp", lambda: "another file has changed")
    assert compiled_names(load(path)) == ["doubled"]


@pytest.mark.parametrize("damage", ["an older class", "cut short", "no kernel"])
def test_files_that_cannot_be_read_are_compiled_again(damage: str, tmp_path: Path) -> None:
    path = tmp_path / f"damaged_{damage.replace(' ', '_')}.py"
    path.write_text(SOURCE.format(decorator="kernel"))
    assert compiled_names(load(path)) == ["doubled"]
    (index,) = (tmp_path / "__pycache__").glob(f"{path.stem}*.nbi")
    (data,) = (tmp_path / "__pycache__").glob(f"{path.stem}*.nbc")
    if damage == "an older class":  # protocol 0: the class that an object is of, by name
        index.write_bytes(pickle.dumps(numba.__version__) + b"cheterog.errors\nGone\n.")
    elif damage == "cut short":
        data.write_bytes(data.read_bytes()[:100])
    else:
        data.write_bytes(b"no kernel")
    assert compiled_names(load(path)) == ["doubled"]
    assert compiled_names(load(path)) == []


def test_kernels_run_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(IndexDataCacheFile, "_save_data", is_full)
    path = tmp_path / "no_room.py"
    path.write_text(SOURCE.format(decorator="kernel"))
    assert compiled_names(load(path)) == ["doubled"]
    assert compiled_names(load(path)) == ["doubled"]


def test_kernels_run_where_no_folder_is_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "unkept.py"
    path.write_text(SOURCE.format(decorator="kernel"))
    monkeypatch.setattr(CompileResultCacheImpl, "_locator_classes", [])
    assert compiled_names(load(path)) == ["doubled"]
    assert compiled_names(load(path)) == ["doubled"]


def test_kernels_are_kept_in_the_users_folder_where_the_package_is_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locators = [
        each
        for each in CompileResultCacheImpl._locator_classes
        if "InTree" not in each.__name__  # what a read-only package comes down to
    ]
    monkeypatch.setattr(CompileResultCacheImpl, "_locator_classes", locators)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    path = tmp_path / "elsewhere.py"
    path.write_text(SOURCE.format(decorator="kernel"))
    assert compiled_names(load(path)) == ["doubled"]
    assert list((tmp_path / "home").rglob("*.nbc"))
    assert compiled_names(load(path)) == []


CHAIN = """
from heterog.lowering.kernels import helper, kernel

@helper
def halved(number):
    if number % 2:
        raise ValueError("odd")
    return number // 2

@helper
def quartered(number):
    return halved(halved(number))

@kernel
def doubled(number):
    return 8 * quartered(number) + halved(0)
"""


def test_helpers_are_machine_code_in_kernels_only(tmp_path: Path) -> None:
    path = tmp_path / "chain.py"
    path.write_text(CHAIN)
    module = load(path)
    assert module.doubled(84) == 168
    with pytest.raises(ValueError, match="odd"):
        module.doubled(21)
    for name, has_address in (("halved", False), ("quartered", False), ("doubled", True)):
        function = getattr(module, name)
        (compiled,) = getattr(function, "dispatcher", function).overloads.values()
        found = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
        assert bool(found) == has_address
    again = load(path)  # from the cache
    assert again.doubled(84) == 168
    with pytest.raises(ValueError, match="odd"):
        again.doubled(21)


PACKED = """
from typing import NamedTuple
import numpy as np
from heterog.lowering.kernels import by_reference
from heterog.lowering.kernels import helper, kernel

@by_reference
class Inner(NamedTuple):
    weight: np.ndarray
    pair: tuple

@by_reference
class Outer(NamedTuple):
    values: np.ndarray
    factor: int
    is_negative: bool
    inner: Inner

@helper
def product(outer, number):
    sign = -1.0 if outer.is_negative else 1.0
    return sign * outer.factor * outer.values[number] * outer.inner.weight[number, 0]

@kernel
def total(outer, sums):
    for number in range(len(outer.values)):
        sums[0] += product(outer, number) + outer.inner.pair[1]
        outer.values[number] = 0.0
    return sums[0]
"""


def test_kernels_get_named_tuples_by_reference(tmp_path: Path) -> None:
    path = tmp_path / "packed.py"
    path.write_text(PACKED)
    for _ in range(2):  # compiled, then from the cache
        module = load(path)
        for is_negative in (False, True):
            values, weight = np.array([1.0, 2.0, 3.0]), np.array([[4.0], [5.0], [6.0]])
            inner = module.Inner(weight, (0, 7))
            outer = module.Outer(values, 2, is_negative, inner)
            expected = (-1 if is_negative else 1) * 2 * (4 + 10 + 18) + 3 * 7
            assert module.total(outer, np.zeros(1)) == expected
            assert not values.any()
        with pytest.raises(ValueError, match="two"):  # a field that is no number
            module.total(module.Outer(values, "two", False, inner), np.zeros(1))


def test_kernels_leave_no_references_behind(tmp_path: Path) -> None:
    path = tmp_path / "counted.py"
    path.write_text(PACKED)
    module = load(path)
    values = np.ones(3)
    outer = module.Outer(values, 2, False, module.Inner(np.ones((3, 1)), (0, 0)))
    module.total(outer, np.zeros(1))
    before = sys.getrefcount(values), sys.getrefcount(outer)
    for _ in range(10):
        module.total(outer, np.zeros(1))
    assert (sys.getrefcount(values), sys.getrefcount(outer)) == before


def test_every_named_tuple_of_a_kernel_is_passed_by_reference() -> None:
    tuples = {
        node.name: {ast.unparse(each) for each in node.decorator_list}
        for _, node in tuples_of_kernels(package_trees())
    }
    assert {"GraphTables", "Tape", "Prices"} <= set(tuples)
    # What lowering hands on is made inside a kernel, of four tuples that are passed by reference.
    tuples.pop("Lowering")
    assert all("by_reference" in decorators for decorators in tuples.values()), tuples


def test_tuples_of_a_class_have_fields_of_the_same_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels know their version by the classes of tuples alone."""
    seen: dict[object, object] = {}
    kind_of = kernels._kind

    def checked(argument: object) -> object:
        kind, found = kind_of(argument), numba.typeof(argument)  # type: ignore[no-untyped-call]
        assert seen.setdefault(kind, found) == found
        return kind

    monkeypatch.setattr(kernels, "_kind", checked)
    for seed in range(20):
        rng = Random(seed)
        evaluator, choice = random_case(rng)
        order = rng.choice(list(Order))
        evaluator.evaluate(choice, order)
        evaluator.referee(choice, order)
        evaluator.facts()
    assert {GraphTables, Choice, Tape, Timings, Prices} <= set(seen)
