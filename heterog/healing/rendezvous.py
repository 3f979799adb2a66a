"""Where the machines of a job meet, and who of them leads it.

The same command runs on every machine. It leads where the address of the rendezvous can be
listened on, and takes part everywhere else.
"""

import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from heterog.errors import HeterogError

TOKEN = "HETEROG_TOKEN"
"""Variable with the secret that the commands of one job share."""
DEFAULT_PORT = 29400
"""torchrun's."""
_LEAST_TOKEN = 16
_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EADDRINUSE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """An address and the secret of those who meet there.

    Attributes:
        address: Name or address of the machine that leads.
        port: Port that it listens on.
        token: Secret that all commands of the job know.
    """

    address: str
    port: int
    token: str

    @staticmethod
    def parse(text: str) -> "Rendezvous":
        """Read ``ADDRESS:PORT``, or ``ADDRESS``; the secret comes from the environment.

        Raises:
            HeterogError: the text is no address, or there is no secret.
        """
        address, colon, port = text.rpartition(":")
        if not colon:
            address, port = text, str(DEFAULT_PORT)
        if not address or not port.isdecimal() or not 0 < int(port) < 65536:
            raise HeterogError(
                f"the rendezvous {text!r} is no address; write HOST:PORT, such as "
                f"10.0.0.1:{DEFAULT_PORT}."
            )
        token = os.environ.get(TOKEN, "")
        if len(token) < _LEAST_TOKEN:
            raise HeterogError(
                f"the variable {TOKEN} has no secret of at least {_LEAST_TOKEN} characters; set "
                "the same one on every host, made by 'openssl rand -hex 16', say."
            )
        return Rendezvous(address=address.strip("[]"), port=int(port), token=token)

    def listen(self) -> socket.socket | None:
        """Listen there; ``None`` if the address is another machine's, or somebody leads already.

        Raises:
            HeterogError: the address has no meaning here.
        """
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(
                self.address, self.port, type=socket.SOCK_STREAM
            )[0]
        except OSError as error:
            raise HeterogError(
                f"the rendezvous {self.address} is not known here: {error.strerror or error}."
            ) from error
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
            listening.listen()
        except OSError as error:
            listening.close()
            if error.errno in _NOT_OURS:
                return None
            raise HeterogError(
                f"cannot listen on {self.address}:{self.port}: {error.strerror or error}."
            ) from error
        return listening


def own_host(name: str, hosts: Sequence[str]) -> int:
    """Number of this machine among the hosts of a plan.

    Args:
        name: Name given by the user; empty for the one of this machine.
        hosts: Names of the plan's hosts.

    Raises:
        HeterogError: the plan has no such host.
    """
    wanted = name or socket.gethostname()
    for candidate in (wanted, wanted.partition(".")[0]):
        if candidate in hosts:
            return hosts.index(candidate)
    say = "`host` names one" if name else "name this one by `host`"
    raise HeterogError(f"'{wanted}' is no host of the plan; {say} of {', '.join(hosts)}.")
