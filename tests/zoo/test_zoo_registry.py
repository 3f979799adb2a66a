import subprocess
import sys
from pathlib import Path

import pytest
import torch

from heterog.errors import HeterogError, InputFileError, UnknownNameError
from heterog.graph.capture import capture
from heterog.zoo import registry

DEFAULT_BATCH_SIZES = {
    "vgg19": 192,
    "resnet50": 192,
    "resnet200": 192,
    "inception_v3": 192,
    "mobilenet_v2": 192,
    "nasnet_large": 192,
    "vit_base": 64,
    "cosmoflow_128": 8,
    "cosmoflow_512": 1,
    "unet3d": 1,
    "transformer_6l": 720,
    "transformer_24l": 120,
    "bert_base": 64,
    "bert_large_24l": 48,
    "bert_large_48l": 24,
    "xlnet_large_24l": 48,
    "xlnet_large_48l": 24,
    "gpt2": 32,
    "llama_1b": 16,
    "gcn_2l": 1,
    "sage_2l": 1,
    "bert_moe": 64,
}

GOOD_FILE = """
from dataclasses import dataclass

import torch
from torch import nn
from heterog.graph.workload import Workload
{extra}

def workload(batch_size=8):
    return Workload(
        model=lambda: nn.Linear(3, 2),
        example_batch=lambda: (torch.zeros(batch_size, 3), torch.zeros(batch_size, 2)),
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        optimizer_options=dict(lr=0.1),
    )


def fixed():
    return workload(4)


def needs_batch_size(batch_size):
    return workload(batch_size)


def needs_more(width, batch_size=8):
    return workload(batch_size)


def takes_any(**options):
    return workload(**options)


def fails():
    raise ValueError("three\\nis a crowd")


def wrong():
    return 3
"""


def write(tmp_path: Path, text: str, name: str = "mine.py") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def batch_size_of(source: str, batch_size: int | None = None, *, must_take: bool = True) -> int:
    batch = registry.load_workload(source, batch_size, must_take=must_take).make_batch()
    assert isinstance(batch, tuple)
    return batch[0].shape[0]


def test_names_and_default_batch_sizes() -> None:
    batch_sizes = {name: registry.entry(name).default_batch_size for name in registry.names()}
    assert batch_sizes == DEFAULT_BATCH_SIZES


def test_listing_the_zoo_does_not_import_torch() -> None:
    code = (
        "import sys; from heterog.zoo import entry, names; [entry(n) for n in names()]; "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_build_names_the_workload() -> None:
    workload = registry.build("mobilenet_v2", 3)
    assert (workload.name, workload.source) == ("mobilenet_v2", "mobilenet_v2")
    assert workload.optimizer is torch.optim.Adam
    batch = workload.make_batch()
    assert isinstance(batch, tuple)
    assert [tuple(tensor.shape) for tensor in batch] == [(3, 3, 224, 224), (3,)]


def test_build_uses_the_default_batch_size() -> None:
    batch = registry.build("transformer_24l").make_batch()
    assert isinstance(batch, dict)
    assert {key: tuple(tensor.shape) for key, tensor in batch.items()} == {
        "input_ids": (120, 32),
        "decoder_input_ids": (120, 32),
        "labels": (120, 32),
    }


def test_unknown_name() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown model 'vgg'; did you mean 'vgg19'\?"):
        registry.build("vgg")
    with pytest.raises(UnknownNameError, match="did you mean 'resnet50'"):
        registry.load_workload("resnet5", None)


@pytest.mark.parametrize("source", ["vgg19", "mine.py:workload"])
def test_batch_size_below_one(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, GOOD_FILE.format(extra=""))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HeterogError, match="batch size must be at least 1 sample, got 0"):
        registry.load_workload(source, 0)


def test_load_workload_accepts_a_zoo_name() -> None:
    assert registry.load_workload("vgg19", 2).source == "vgg19"


def test_user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, GOOD_FILE.format(extra=""))
    monkeypatch.chdir(tmp_path)
    workload = registry.load_workload("mine.py:workload", None)
    assert workload.name == "workload"
    assert workload.source == f"{path.resolve()}:workload"
    assert registry.load_workload("mine.py:fixed", None).name == "fixed"
    assert registry.load_workload(workload.source, None).source == workload.source
    assert batch_size_of("mine.py:workload") == 8
    assert batch_size_of("mine.py:workload", 2) == 2
    assert batch_size_of("mine.py:needs_batch_size", 2) == 2
    assert batch_size_of("mine.py:takes_any", 2) == 2
    assert batch_size_of("mine.py:fixed") == 4
    assert batch_size_of("mine.py:fixed", 2, must_take=False) == 4  # who asked compares them
    assert batch_size_of("mine.py:workload", 2, must_take=False) == 2


def test_user_file_may_import_its_neighbour_and_define_dataclasses(tmp_path: Path) -> None:
    write(tmp_path, "SIZE = 5\n", "neighbour_of_mine.py")
    extra = "from neighbour_of_mine import SIZE\n@dataclass\nclass C:\n    x: 'int' = SIZE\n"
    path = write(tmp_path, GOOD_FILE.format(extra=extra))
    before = sys.path.copy()
    assert batch_size_of(f"{path}:workload") == 8
    assert sys.path[-1] == str(tmp_path)
    assert [each for each in before if each not in sys.path] in ([], [before[-1]])


def test_a_user_file_is_run_as_a_script_without_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["heterog", "plan", "mine.py:workload", "--budget", "1s"])
    extra = (
        "import argparse\nargparse.ArgumentParser().parse_args()\nimport sys\nSEEN = sys.argv\n"
    )
    path = write(tmp_path, GOOD_FILE.format(extra=extra))
    assert batch_size_of(f"{path}:workload") == 8
    (module,) = [each for each in list(sys.modules.values()) if "SEEN" in vars(each)]
    assert module.SEEN == [str(path)]
    assert sys.argv[1:3] == ["plan", "mine.py:workload"]


def test_what_a_model_imports_when_it_is_made_is_found_beside_its_file(tmp_path: Path) -> None:
    write(tmp_path, "WIDTH = 5\n", "made_later.py")
    extra = (
        "from dataclasses import replace\n"
        "def late():\n"
        "    def model():\n"
        "        from made_later import WIDTH\n"
        "        return nn.Linear(WIDTH, 1)\n"
        "    return replace(workload(), model=model)\n"
    )
    path = write(tmp_path, GOOD_FILE.format(extra=extra))
    made = registry.load_workload(f"{path}:late").make_model()
    assert next(made.parameters()).shape == (1, 5)


def test_files_of_two_folders_import_their_own_neighbours(tmp_path: Path) -> None:
    """Modules of one name, which Python would keep from the first of them."""
    extra = "from namesake.inner import SIZE\ndef of_neighbour():\n    return workload(SIZE)\n"
    for size in (5, 6):
        folder = tmp_path / str(size)
        (folder / "namesake").mkdir(parents=True)
        write(folder / "namesake", f"SIZE = {size}\n", "inner.py")
        path = write(folder, GOOD_FILE.format(extra=extra))
        assert batch_size_of(f"{path}:of_neighbour") == size


def test_a_module_of_a_folder_below_the_file_stays_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file adds a folder to the path of imports; the second has a module beside it."""
    made = "from below import SIZE\ndef made():\n    return workload(SIZE)\n"
    adds = "import sys, os\nsys.path.insert(0, os.path.dirname(__file__) + '/src')\n"
    monkeypatch.setattr(sys, "path", sys.path.copy())
    sources = {}
    for size, inner, extra in ((5, "src", adds + made), (6, ".", made)):
        (folder := tmp_path / str(size) / inner).mkdir(parents=True)
        write(folder, f"SIZE = {size}\n", "below.py")
        path = write(tmp_path / str(size), GOOD_FILE.format(extra=extra))
        sources[size] = f"{path}:made"
    kept: dict[int, object] = {}
    for size in (5, 6, 5, 6):
        assert batch_size_of(sources[size]) == size
        assert kept.setdefault(size, sys.modules["below"]) is sys.modules["below"]


def test_installed_packages_below_a_file_are_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home folder has virtual environments below it; another has such a name."""
    packages = tmp_path / "env" / "lib" / "site-packages"
    packages.mkdir(parents=True)
    write(packages, "SIZE = 7\n", "installed_one.py")
    monkeypatch.syspath_prepend(packages)
    made = "import installed_one\ndef made():\n    return workload(installed_one.SIZE)\n"
    home = write(tmp_path, GOOD_FILE.format(extra=made))
    assert batch_size_of(f"{home}:made") == 7
    kept = sys.modules["installed_one"]
    (tmp_path / "other" / "installed_one").mkdir(parents=True)
    other = write(tmp_path / "other", GOOD_FILE.format(extra=made))
    assert batch_size_of(f"{other}:made") == 7
    assert sys.modules["installed_one"] is kept


def test_nested_namespace_packages_of_two_folders(tmp_path: Path) -> None:
    """Folders without __init__.py; the inner one asks the outer one where it is."""
    extra = "from outer_part.inner_part.mod import SIZE\ndef made():\n    return workload(SIZE)\n"
    for size in (5, 6, 5):
        (folder := tmp_path / str(size) / "outer_part" / "inner_part").mkdir(
            parents=True, exist_ok=True
        )
        write(folder, f"SIZE = {size}\n", "mod.py")
        path = write(tmp_path / str(size), GOOD_FILE.format(extra=extra))
        assert batch_size_of(f"{path}:made") == size


def test_a_module_that_cannot_say_where_it_is_belongs_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Strange:
        @property
        def __path__(self) -> list[str]:
            raise RuntimeError("not now")

    monkeypatch.setitem(sys.modules, "strange_one", Strange())
    path = write(tmp_path, GOOD_FILE.format(extra=""))
    assert batch_size_of(f"{path}:workload") == 8


def test_an_edited_user_file_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD_FILE.format(extra=""))
    assert batch_size_of(f"{path}:workload") == 8
    path.write_text(GOOD_FILE.format(extra="").replace("batch_size=8", "batch_size=16"))
    assert batch_size_of(f"{path}:workload") == 16


@pytest.mark.parametrize(
    ("function", "batch_size", "text"),
    [
        ("absent", None, r"mine\.py: there is no 'absent'; it has fails, fixed, needs"),
        ("fails", None, r"mine\.py:\d+: ValueError: three is a crowd$"),
        ("wrong", None, r"mine\.py: 'wrong' returned int, not a heterog Workload\."),
        ("fixed", 2, r"a batch size of 2 was asked for, but 'fixed' does not take one"),
        ("needs_batch_size", None, r"'needs_batch_size' needs a batch size; give one"),
        ("needs_more", 2, r"'needs_more' needs the argument width; a workload function takes"),
    ],
)
def test_user_function_errors(
    function: str, batch_size: int | None, text: str, tmp_path: Path
) -> None:
    path = write(tmp_path, GOOD_FILE.format(extra=""))
    with pytest.raises(InputFileError, match=text) as caught:
        registry.load_workload(f"{path}:{function}", batch_size)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("x = 1\n\n1 / 0\n", r"mine\.py:3: ZeroDivisionError: division by zero$"),
        ("x = 1\ndef f(:\n", r"mine\.py:2: SyntaxError: "),
        ("import no_such_package\n", r"mine\.py:1: ModuleNotFoundError: No module named"),
        ("raise KeyError\n", r"mine\.py:1: KeyError$"),
        ("import sys\n\nsys.exit(0)\n", r"mine\.py:3: SystemExit: 0 ends the program; heterog "),
        ("raise GeneratorExit('gone')\n", r"mine\.py:1: GeneratorExit: gone$"),
        (
            "class E(Exception):\n    def __str__(self): 1 / 0\nraise E\n",
            r"mine\.py:3: E: <exception str\(\) failed>$",
        ),
        ("def f():\n    raise GeneratorExit\n", r"mine\.py:2: GeneratorExit$"),
        ("x = 1\n", r"mine\.py: there is no 'f'; it has no function and no class\."),
    ],
)
def test_user_file_errors(content: str, text: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(InputFileError, match=text):
        registry.load_workload(f"{path}:f", None)


def test_a_user_file_may_print_elsewhere(tmp_path: Path) -> None:
    """Its own class of stdout, say, may not be able to flush."""
    path = write(tmp_path, GOOD_FILE.format(extra="import sys\nsys.stdout = sys.stderr = None"))
    streams = sys.stdout, sys.stderr
    registry.load_workload(f"{path}:workload")
    assert (sys.stdout, sys.stderr) == streams


def test_user_file_that_is_missing_or_names_no_function(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"there is no file 'absent\.py' \(looked for /"):
        registry.load_workload("absent.py:f", None)
    for source in ("mine.py", "mine.py:"):
        with pytest.raises(InputFileError, match=r"names no function; write mine\.py:function"):
            registry.load_workload(source, None)
    text = write(tmp_path, "", "mine.txt")
    with pytest.raises(InputFileError, match=r"mine\.txt: this is not a Python file"):
        registry.load_workload(f"{text}:f", None)


def test_imports_when_a_model_is_made_find_the_folder_of_its_own_file(tmp_path: Path) -> None:
    extra = (
        "from dataclasses import replace\n"
        "def late():\n"
        "    def model():\n"
        "        from late_neighbour import SIZE\n"
        "        return nn.Linear(SIZE, 1)\n"
        "    return replace(workload(), model=model)\n"
    )
    for size, name in ((3, "one"), (4, "other"), (3, "one")):
        (folder := tmp_path / name).mkdir(exist_ok=True)
        write(folder, f"SIZE = {size}\n", "late_neighbour.py")
        path = write(folder, GOOD_FILE.format(extra=extra))
        made = registry.load_workload(f"{path}:late").make_model()
        assert next(made.parameters()).shape == (1, size)


def test_two_models_import_their_own_neighbours_when_they_run(tmp_path: Path) -> None:
    """In a forward pass, in whatever order; each keeps its modules."""
    extra = (
        "import torch\n"
        "class Late(nn.Linear):\n"
        "    def forward(self, x, y):\n"
        "        import namesakes.one, twin\n"
        "        return super().forward(x).sum() * namesakes.one.SIZE * twin.SIZE\n"
        "def late():\n"
        "    batch = torch.zeros(8, 4), torch.zeros(8)\n"
        "    return Workload(lambda: Late(4, 1), batch, None, torch.optim.SGD, {'lr': 0.1})\n"
    )
    made = {}
    for size in (3, 5):
        (folder := tmp_path / str(size) / "namesakes").mkdir(parents=True)
        write(folder, f"SIZE = {size}\n", "one.py")
        write(folder.parent, f"SIZE = {size}\n", "twin.py")
        made[size] = registry.load_workload(
            f"{write(folder.parent, GOOD_FILE.format(extra=extra))}:late"
        )
    kept: dict[int, object] = {}
    for size in (3, 5, 3, 5):
        factors = [op.args.get("other") for op in capture(made[size]).ops]
        assert [each for each in factors if each is not None][:2] == [size, size]
        assert kept.setdefault(size, sys.modules["twin"]) is sys.modules["twin"]
