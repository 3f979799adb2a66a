"""A process beside a job: forked or started, it answers, and holds nothing of who started it."""

import os
import signal
import socket
import sys

import pytest

from heterog.errors import HeterogError
from heterog.healing.service import Service, answer_questions


def answer(question: float) -> tuple[float, int, int]:
    if question < 0:
        raise ValueError("it is negative")
    return question**0.5, os.getsid(0), os.getpid()


def main() -> None:
    answer_questions(answer)


@pytest.mark.parametrize("is_forked", [True, False])
@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_a_process_answers_and_ends_when_it_is_closed(is_forked: bool) -> None:
    here, there = socket.socketpair()
    service = Service("tests.healing.test_service", is_forked=is_forked)
    try:
        here.close()
        assert there.recv(1) == b"", "its connections are those of who started it"
        numbers = [service.ask(each) for each in (9, -1)]
        answers = [service.next_answer(60) for _ in numbers]
        assert answers[0] is not None
        os.kill(answers[0][1][2], signal.SIGKILL)
        while not service.has_ended:
            assert service.next_answer(60) is None
        another = service.answer_to(service.ask(16), 60)
        assert another[0] == 4.0, "the next question has started another process"
    finally:
        service.close()
        there.close()
    found, failed = answers
    assert found is not None
    assert failed is not None
    number, (root, session, pid) = found
    assert (number, root) == (numbers[0], 3.0)
    assert session != os.getsid(0), "what ends ranks does not reach it"
    assert isinstance(failed[1], HeterogError)
    assert str(failed[1]) == "ValueError: it is negative"
    for each in (pid, another[2]):
        with pytest.raises(ProcessLookupError):
            os.kill(each, 0)
    assert service.has_ended
    assert service.next_answer(1) is None
    with pytest.raises(HeterogError, match="has ended"):
        service.ask(1)


if __name__ == "__main__":
    main()
