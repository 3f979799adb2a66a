"""Objects from a user's own Python file, named ``path/to/file.py:name`` on the command line.

A workload, a method, an encoder and a reward are all given this way. The file is run, so only
names that the person typed are accepted. A name that stands in a file (the source in a plan) goes
through ``trusted_source`` first.
"""

import importlib.util
import inspect
import itertools
import os
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType

from heterog.errors import InputFileError
from heterog.names import shown
from heterog.workers import Terminated

_module_numbers = itertools.count()
_folders: set[Path] = set()
"""Folders of the files that were run; imports look in the one of the last file."""
_aside: dict[Path, dict[str, ModuleType]] = {}
"""Modules of folders, while another folder has modules of the same names."""
_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_last: list[str] = []
"""That folder, if imports did not look there before."""


def is_from_file(source: str) -> bool:
    """Whether a name refers to an object in a Python file.

    >>> is_from_file("reward.py:by_memory"), is_from_file("hetero")
    (True, False)
    """
    return ":" in source or source.endswith(".py")


def split_source(source: str, what: str) -> tuple[Path, str]:
    """The file, as an absolute path, and the name in it.

    Args:
        source: ``path/to/file.py:name``.
        what: Kind of object that is expected, as in ``"function"``; for messages.

    Raises:
        InputFileError: the name or the file is missing.
    """
    path_text, _, name = source.rpartition(":")
    if not path_text or not name:
        given = source.rstrip(":")
        raise InputFileError(f"'{source}' names no {what}; write {given}:{what}.")
    path = Path(path_text).expanduser().resolve()
    if not path.is_file():
        raise InputFileError(f"there is no file '{path_text}' (looked for {path}).")
    return path, name


def trusted_source(source: str, named: Sequence[str], where: str) -> str:
    """The source that a file names, if it may be run and copied.

    Zoo names may, and Python files that the person names or that lie under their working folder.
    Anything else is code of somebody else, about which the person is asked.

    Args:
        source: Zoo name, or ``path/to/file.py:function``.
        named: Files that the person named, with or without a function; one with the same name as
            the source's replaces it.
        where: The file that names the source, for the message.

    Returns:
        The source, with the person's own file if they named one.

    Raises:
        InputFileError: the file is no Python file, or nobody named it; says which option answers.
    """
    if not is_from_file(source):
        return source
    path_text, _, function = source.rpartition(":")
    if not function.isidentifier() or not path_text.endswith(".py"):
        raise InputFileError(
            f"{where} says that its model is made by {shown(source)}, which is not a Python file "
            "and a function in it."
        )
    path = Path(path_text).expanduser().resolve()
    if not path.exists() and not named:
        return source  # nothing can be run or copied
    for each in named:
        own = Path(each.rpartition(":")[0] if not each.endswith(".py") else each)
        found = own.expanduser().resolve()
        if found.name == path.name and found.suffix == ".py":
            return f"{found}:{function}"
    if path.suffix == ".py" and path.is_relative_to(working_folder()):
        return f"{path}:{function}"
    raise InputFileError(
        f"{where} says that its model is made by {path_text}, which is not under the folder you "
        f"work in ({working_folder()}). To use it would run or copy that file; if you trust "
        f"it, add `sources` {shlex.quote(path_text)}."
    )


def working_folder() -> Path:
    """The folder that this process works in.

    Raises:
        InputFileError: it was removed; MKL ends programs that multiply there.
    """
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        text = "the folder that you work in was removed; change to another one."
        raise InputFileError(text) from error


def load_object(source: str, what: str) -> object:
    """The function or class that ``path/to/file.py:name`` names; the file is run now.

    Args:
        source: File and name.
        what: Kind of object that is expected, for messages: ``"reward"``.

    Raises:
        InputFileError: the file or the name is missing, or running the file fails.
    """
    path, name = split_source(source, what)
    with as_script(path):
        return callable_in(path, name)


@contextmanager
def as_script(path: Path) -> Iterator[None]:
    """What Python does for a script without arguments: its folder leads the path of imports.

    Later imports, when the model is made say, look there last; those of another file's model need
    ``script_of``. If the script changes the working folder, in which heterog reads and writes
    files, or the streams to which it prints, that is changed back.
    """
    arguments, streams, working = sys.argv, (sys.stdout, sys.stderr), working_folder()
    _change_namesakes(path.parent)
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path)]
    try:
        yield
    finally:
        sys.argv, sys.stdout, sys.stderr = arguments, *streams
        os.chdir(working)
        for folder in (str(path.parent), *_last):
            if folder in sys.path:
                sys.path.remove(folder)
        _last[:] = [str(path.parent)] if str(path.parent) not in sys.path else []
        sys.path += _last


def script_of(source: str) -> AbstractContextManager[None]:
    """``as_script`` for what was loaded from a file; nothing for another source.

    Files may have neighbours of the same names, which code imports as late as in a forward pass.
    """
    path = Path(source.rpartition(":")[0])
    return as_script(path) if path.is_absolute() else nullcontext()


def _change_namesakes(folder: Path) -> None:
    """Put a folder's own modules in the place of other folders' modules of the same names."""
    _folders.add(folder)
    own = _aside.pop(folder, {})
    # All are asked before one is taken away: a part of a namespace package asks the whole.
    owners = {name: _owner_of(name, module) for name, module in list(sys.modules.items())}
    for name, owner in owners.items():
        if owner is not None and owner != folder:
            beside = folder / name.partition(".")[0]
            if name in own or beside.is_dir() or beside.with_suffix(".py").is_file():
                _aside.setdefault(owner, {})[name] = sys.modules.pop(name)
    sys.modules.update(own)


def _owner_of(name: str, module: ModuleType) -> Path | None:
    """The folder, among those of files that were run, in which a module was found.

    A file may add a folder below its own to the path of imports. Installed packages below it, in
    a virtual environment say, are nobody's.
    """
    found = _place_of(module)
    stem = name.replace(".", os.sep)
    for end in (f"{os.sep}{stem}.py", f"{os.sep}{stem}{os.sep}__init__.py", f"{os.sep}{stem}"):
        if found.endswith(end) and Path(found.removesuffix(end)) in _folders:
            return Path(found.removesuffix(end))
    above = [folder for folder in map(str, _folders) if found.startswith(f"{folder}{os.sep}")]
    if not above or name == "__main__" or name.partition(".")[0] == __package__:
        return None
    if found.startswith(_STANDARD) or not _INSTALLED.isdisjoint(Path(found).parts):
        return None
    return Path(max(above, key=len))


def _place_of(module: ModuleType) -> str:
    """The file or folder of a module; "" if it has none, or cannot say."""
    try:
        found = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())))
    except Exception:  # modules of others may run code of their own here
        return ""
    return found if isinstance(found, str) else ""


def callable_in(path: Path, name: str) -> object:
    """The function or class of that name in the file, which is run now.

    Raises:
        InputFileError: there is none; the text lists the existing ones.
    """
    module = _import(path)
    found: object = getattr(module, name, None)
    if not callable(found):
        own = sorted(
            key
            for key, value in vars(module).items()
            if (inspect.isfunction(value) or inspect.isclass(value))
            and value.__module__ == module.__name__
        )
        has = f"it has {', '.join(own)}" if own else "it has no function and no class"
        raise InputFileError(f"{path}: there is no '{name}'; {has}.")
    return found


def _import(path: Path) -> ModuleType:
    # Dataclasses and pickling look the module up in sys.modules. Its name is new each time, so
    # that two files of the same name, or an edited file, do not replace each other there.
    module_name = f"heterog_user_{next(_module_numbers)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise InputFileError(f"{path}: this is not a Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with failures_told(path):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


@contextmanager
def failures_told(path: Path) -> Iterator[None]:
    """Make whatever a user's file raises an error of one line; a script may end the program, too.

    Ctrl-C and the end by a signal stay what they are.

    Raises:
        InputFileError: the body fails.
    """
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        raise
    except BaseException as error:
        raise InputFileError(where_it_failed(path, error)) from error


def words_of(error: BaseException) -> str:
    """What an error says; a user's own may fail to say it."""
    return str(traceback.TracebackException(type(error), error, None))


def where_it_failed(path: Path, error: BaseException) -> str:
    """One line: the file's own line nearest to the error, and the error."""
    reason = " ".join(words_of(error).split())
    text = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename) == path
    ]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(error.lineno)
        text = f"{type(error).__name__}: {error.msg}"
    if isinstance(error, SystemExit):
        text += " ends the program; heterog runs the file without arguments, as an import"
    line = f":{lines[-1]}" if lines else ""
    return f"{path}{line}: {text}"
