"""Caches results of methods for each object and its arguments."""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

_S = TypeVar("_S")
_P = ParamSpec("_P")
_T = TypeVar("_T")


class kept(Generic[_S, _P, _T]):
    """A method that keeps what it has returned for as long as its object lives.

    Its arguments are hashable and positional. As with ``cached_property``, results lie in the
    object's ``__dict__``; from then on the object cannot be pickled, and Python's collector frees
    it, not the end of its last reference: not for objects with hooks or large tensors.

    >>> class Squares:
    ...     @kept
    ...     def of(self, number: int) -> list[int]:
    ...         return [number**2]
    >>> squares = Squares()
    >>> squares.of(3), squares.of(3) is squares.of(3)
    ([9], True)
    """

    def __init__(self, method: Callable[Concatenate[_S, _P], _T]) -> None:
        self._method = method
        update_wrapper(cast(Any, self), method)

    def __get__(self, instance: _S, owner: type[_S]) -> Callable[_P, _T]:
        """The method of an object; Python asks once, then finds it in the object."""
        method, results = self._method, dict[Any, _T]()

        # Not functools.cache: whenever there is a new one, ``graph.repeated_calls`` searches
        # memory for all of them again.
        def found(*arguments: Any) -> _T:
            try:
                return results[arguments]
            except KeyError:
                result = results[arguments] = cast(Any, method)(instance, *arguments)
                return cast(_T, result)

        instance.__dict__[method.__name__] = found
        return cast(Callable[_P, _T], found)
