"""The rows of its input that a part of an op reads: rows owned, rows needed, and transfers.

A tensor is cut along one of its dimensions, and every device owns some consecutive rows of it. A
convolution or a pooling that makes the output rows ``[a, b)`` reads the input rows
``[max(0, a s - p), min(D, (b - 1) s - p + e (k - 1) + 1))`` for kernel ``k``, stride ``s``,
padding ``p`` and dilation ``e``. Those of them that a device does not own are its *halo*:
neighbours send it (Oyama et al. 2020, arXiv 2007.12856). Nothing has to divide anything here, and
a halo may reach past the neighbour.

The gradient of the input at the rows ``[a, b)`` in turn needs the gradients of all output rows
that read any of them (``Stencil.readers``): no device has to add up what others computed.
"""

from dataclasses import dataclass
from typing import NamedTuple

from heterog.errors import StrategyError


class Rows(NamedTuple):
    """Consecutive rows ``begin`` to ``end - 1`` of a tensor; none if ``begin == end``."""

    begin: int
    end: int

    @property
    def num(self) -> int:
        """Number of rows."""
        return self.end - self.begin

    def clipped(self, size: int) -> "Rows":
        """The rows that exist in a tensor of ``size`` rows."""
        begin = min(max(self.begin, 0), size)
        return Rows(begin, max(begin, min(self.end, size)))

    def overlap(self, other: "Rows") -> "Rows":
        """Rows that are in both."""
        begin = max(self.begin, other.begin)
        return Rows(begin, max(begin, min(self.end, other.end)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stencil:
    """The rows that a convolution or pooling reads, along one dimension, for each output row.

    Attributes:
        kernel: Number of rows of the kernel.
        stride: Number of rows between positions of the kernel.
        padding: Number of rows added before the first one, and after the last.
        dilation: Distance in rows between the kernel's own rows.

    Raises:
        StrategyError: a number is out of range.
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def __post_init__(self) -> None:
        if min(self.kernel, self.stride, self.dilation) < 1 or self.padding < 0:
            raise StrategyError(
                f"a kernel of {self.kernel} rows with stride {self.stride}, padding "
                f"{self.padding} and dilation {self.dilation} cannot be split; kernel, stride and "
                "dilation must be 1 or more, padding 0 or more."
            )

    @property
    def reach(self) -> int:
        """Number of rows from the first to the last that one output row reads."""
        return self.dilation * (self.kernel - 1) + 1

    def span(self, made: Rows) -> Rows:
        """Input rows that some output rows read, including padding.

        >>> Stencil(kernel=3, padding=1).span(Rows(0, 4))
        Rows(begin=-1, end=5)
        """
        if made.num == 0:
            return Rows(0, 0)
        begin = made.begin * self.stride - self.padding
        return Rows(begin, begin + (made.num - 1) * self.stride + self.reach)

    def needed(self, made: Rows, size: int) -> Rows:
        """Input rows, of ``size`` in all, that some output rows read."""
        return self.span(made).clipped(size)

    def readers(self, owned: Rows, output_size: int) -> Rows:
        """Output rows, of ``output_size`` in all, that read any of some input rows.

        >>> Stencil(kernel=3, stride=2, padding=1).readers(Rows(4, 8), 8)
        Rows(begin=2, end=5)
        """
        if owned.num == 0:
            return Rows(0, 0)
        begin = -((self.reach - 1 - self.padding - owned.begin) // self.stride)
        end = (owned.end - 1 + self.padding) // self.stride + 1
        return Rows(begin, end).clipped(output_size)
