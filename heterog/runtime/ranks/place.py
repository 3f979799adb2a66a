"""Where ranks run."""

from collections.abc import Mapping, Sequence


class Place:
    """This machine as it is; a subclass such as ``Testbed`` changes commands and variables."""

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``argv`` as this rank."""
        return list(argv)

    def environment(self, rank: int) -> Mapping[str, str]:
        """Variables of this rank beside those of all ranks."""
        return {}


HERE = Place()
