"""Results of methods that are found once for each object and arguments."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

_S = TypeVar("_S")
_P = ParamSpec("_P")
_T = TypeVar("_T")


def kept(method: Callable[Concatenate[_S, _P], _T]) -> Callable[Concatenate[_S, _P], _T]:
    """A method that keeps what it has returned for as long as its object lives.

    Its arguments are hashable. The results lie with the object: it can be sent to workers, and
    is freed as before.

    >>> class Squares:
    ...     @kept
    ...     def of(self, number: int) -> list[int]:
    ...         return [number**2]
    >>> squares = Squares()
    >>> squares.of(3), squares.of(3) is squares.of(3)
    ([9], True)
    """
    name = f"_kept_{method.__name__}"

    @wraps(method)
    def found(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        known: dict[Any, _T] = self.__dict__.setdefault(name, {})
        key = (*args, *kwargs.items())
        if key not in known:
            known[key] = method(self, *args, **kwargs)
        return known[key]

    return found
