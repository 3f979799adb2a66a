"""A process beside a job: forked or started, it answers, and holds nothing of who started it."""

import os
import socket
import sys

import pytest

from heterog.healing.service import Message, Service, answer_requests


def answer(request: Message) -> Message:
    if request["number"] < 0:
        raise ValueError("it is negative")
    return {"root": request["number"] ** 0.5, "session": os.getsid(0)}


def main() -> None:
    answer_requests(answer)


@pytest.mark.parametrize("is_forked", [True, False])
@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_a_process_answers_and_ends_when_it_is_closed(is_forked: bool) -> None:
    here, there = socket.socketpair()
    service = Service("tests.healing.test_service", is_forked=is_forked)
    try:
        here.close()
        assert there.recv(1) == b"", "its connections are those of who started it"
        numbers = [service.ask({"number": number}) for number in (9, -1)]
        replies = [service.next_reply(60) for _ in numbers]
    finally:
        service.close()
        there.close()
    found, failed = replies
    assert found is not None
    assert failed is not None
    assert (found["id"], found["root"]) == (numbers[0], 3.0)
    assert found["session"] != os.getsid(0), "what ends ranks does not reach it"
    assert failed["error"] == "ValueError: it is negative"
    assert not service.is_alive
    assert service.next_reply(1) is None


if __name__ == "__main__":
    main()
