"""Jobs that tests hand to worker processes, which import this file and nothing heavy."""

import os

from heterog.errors import UnknownNameError


def who(shared: int, job: int) -> tuple[int, int]:
    return shared + job, os.getpid()


def refuse_name(name: str, known: list[str]) -> None:
    raise UnknownNameError("fruit", name, known)


def die(shared: object, job: int) -> None:
    os._exit(job)


_seen: list[int] = []


def remember(shared: int, job: int) -> tuple[int, list[int]]:
    """Jobs that this process has had, beside the shared value."""
    _seen.append(job)
    return shared, list(_seen)
