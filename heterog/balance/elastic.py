"""Elastic batches: ranks train alone for a window, average, and their batches follow speeds.

Adaptive SGD (arXiv 2110.07029; rules as in the authors' code). Each rank has a copy of the model
and an optimizer of its own. A *window* (their mega-batch) is a number of samples, handed out in
batches: the next one goes to the rank that is free first. A rank with batches of b samples updates
with the learning rate times b / b0. At the window's end

- copies are merged, weighted by updates:  w = sum_i p_i w_i,  p_i = u_i / sum_j u_j
  (``merge_weights``);
- batches of ranks with more updates than the mean grow by a step and those of others shrink,
  unless updates are within a dead band (``ElasticRule``); so all ranks come to equally many.

Unlike the paper, batches are assigned to ranks before a window, not while it runs, by simulating
the dispatch with the speeds measured so far. So a run follows from its measurements, and nothing
is sent within a window. A rank that slows down meanwhile delays the end of that window; the next
window takes it into account. The paper's momentum on the merged model is left out.

With several ranks, the weights are not those of one process with the whole batch.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from heterog.balance.group import RankGroup
from heterog.balance.rebalancing import ScalarWriter
from heterog.balance.shares import BalanceError, epoch_order
from heterog.balance.speeds import SpeedEstimate, StepClock
from heterog.balance.weights import by_type, take_over
from heterog.errors import experimental
from heterog.runtime.accelerators import CPU
from heterog.simulator.unequal_updates import ElasticRule, MegaBatch, dispatch_order, merge_weights

STATE_VERSION = 1
STEPS_PER_BATCH = 16
"""First batch over step, and over least batch, of the rule: 512 / 32, as in the paper's code."""
MOST_GROWTH = 2
"""Largest batch over the first one: 1,024 / 512."""

_logger = logging.getLogger(__name__)


class _Part(NamedTuple):
    """A batch of a window: its rank, and its place in the order of the epoch."""

    rank: int
    begin: int
    end: int


@experimental
class ElasticAveraging:
    """Lets unequal ranks train alone on batches that suit them, and merges their models.

    This is not the training of one process: compare losses. All ranks run

        elastic = ElasticAveraging(model, optimizer, batch_size=512, window=20_000)
        for epoch in range(10):
            for window in elastic.windows(dataset):
                for inputs, targets in window:             # as many as this rank gets through
                    loss = loss_function(model(inputs), targets)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                ...                                        # all ranks have one model here

    ``model`` is not wrapped. All ranks call all methods alike. Within a window ranks make
    different numbers of steps, so no code there may wait for other ranks. Frozen parameters stay
    as they are, and buffers become those of the rank with the most updates.

    Args:
        model: Model that is trained; all ranks begin with rank 0's.
        optimizer: Its optimizer. Its state stays on its rank.
        batch_size: Samples of the first batch of each rank, b0.
        window: Samples of all ranks from one merge to the next; a little more if the last batch
            exceeds it, as batches stay whole.
        speeds: One speed for each rank, in any unit, with which the first window is handed out;
            by default equal ones.
        rule: Rule by which batch sizes change. By default the step and the least batch are a
            sixteenth of ``batch_size``, the largest is twice ``batch_size``, and the dead band
            one batch.
        boost: Fraction by which the largest weight grows and the smallest shrinks in a merge;
            ``MERGE_BOOST`` is the paper's, after which weights do not add up to 1.
        scales_rate: Whether learning rates are in proportion to batches, as in the paper.
        writer: TensorBoard writer for the batches and updates of all ranks.
        tell: Function that gets a line about each change of batches; by default rank 0 logs it
            as a warning.
        clock: Clock of this rank.

    Attributes:
        batches: Samples of the next batch of each rank.
        last: The window that was merged last, with the seconds of its slowest rank.

    Raises:
        BalanceError: numbers do not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        batch_size: int,
        window: int,
        speeds: Sequence[float] | None = None,
        rule: ElasticRule | None = None,
        boost: float = 0.0,
        scales_rate: bool = True,
        writer: ScalarWriter | None = None,
        tell: Callable[[str], None] | None = None,
        clock: StepClock | None = None,
    ) -> None:
        self.group = RankGroup()
        num_ranks = self.group.num_ranks
        self._rule = rule or default_rule(batch_size)
        _check(batch_size, window, speeds, num_ranks, self._rule)
        self._model, self._first, self._window = model, batch_size, window
        self._speeds = tuple(speeds or (1.0,) * num_ranks)
        self._boost, self._scales_rate = boost, scales_rate
        self._writer, self._tell = writer, tell
        self._clock = clock or StepClock(next((each.device for each in model.parameters()), CPU))
        self._estimates = [SpeedEstimate() for _ in range(num_ranks)]
        self.batches: tuple[int, ...] = (batch_size,) * num_ranks
        self.last: MegaBatch | None = None
        self._epoch = self._position = self._num_windows = 0
        self._is_open = False
        self._rates = _ScaledRates(optimizer)
        self._share((*model.parameters(), *model.buffers()), 0)

    def windows(
        self, dataset: Dataset[Any], *, seed: int = 0, shuffle: bool = True, **options: Any
    ) -> Iterator[Iterator[Any]]:
        """The windows of the rest of an epoch; each yields this rank's batches.

        Args:
            dataset: Data set with a length.
            seed: Seed of the order, the same on all ranks.
            shuffle: Whether each epoch has its own order.
            options: Keyword arguments of ``DataLoader``; with workers, let them be persistent, or
                they are started in every window.

        Raises:
            BalanceError: a window was left before its last batch, or has more samples than the
                data set.
        """
        num_samples = len(dataset)  # type: ignore[arg-type]
        if self._window > num_samples:
            raise BalanceError(
                f"a window of {self._window} samples is longer than the data set of "
                f"{num_samples}, so that batches would never change; make it shorter."
            )
        order = epoch_order(num_samples, seed, self._epoch, shuffle=shuffle)
        epoch = self._epoch
        batches: list[list[int]] = []  # of this rank in a window; a loader reads them anew in each
        loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=batches, **options)
        while self._epoch == epoch:
            parts = self._parts(num_samples)
            own = [part for part in parts if part.rank == self.group.rank]
            batches[:] = [order[part.begin : part.end].tolist() for part in own]
            self._is_open = True
            yield self._trained(parts, loader, num_samples)
            self._require_closed()

    def _parts(self, num_samples: int) -> list[_Part]:
        """The batches of the next window in the order in which they are handed out."""
        left = num_samples - self._position
        order = dispatch_order(self._batch_seconds(), self.batches, min(self._window, left))
        parts, begin = [], self._position
        for rank in order:
            end = min(begin + self.batches[rank], num_samples)
            parts.append(_Part(rank, begin, end))
            begin = end
        return parts

    def _batch_seconds(self) -> list[float]:
        """Seconds of each rank's batch as measured; from the given speeds before that.

        Rounded to six digits, so that ranks that are free at the same time take turns in order.
        """
        known = [each.speed for each in self._estimates]
        seconds = [
            speed.seconds(batch) if speed is not None and None not in known else batch / given
            for speed, batch, given in zip(known, self.batches, self._speeds, strict=True)
        ]
        return [float(f"{each:.6g}") for each in seconds]

    def _trained(
        self, parts: Sequence[_Part], loader: DataLoader[Any], num_samples: int
    ) -> Iterator[Any]:
        """This rank's batches of a window, and the merge behind them."""
        own = [part.end - part.begin for part in parts if part.rank == self.group.rank]
        self._clock.restart()
        for size, batch in zip(own, loader, strict=True):
            self._rates.factor = size / self._first if self._scales_rate else 1.0
            yield batch
            self._clock.end_step()
        self._rates.factor = 1.0
        self._end(parts, is_cut=self._position + self._window > num_samples)
        self._position = parts[-1].end
        if self._position == num_samples:
            self._epoch, self._position = self._epoch + 1, 0
        self._is_open = False

    def _end(self, parts: Sequence[_Part], *, is_cut: bool) -> None:
        """Exchange measurements, merge, and set the next batches; alike on all ranks."""
        sizes = [
            [float(part.end - part.begin) for part in parts if part.rank == rank]
            for rank in range(self.group.num_ranks)
        ]
        updates = tuple(map(len, sizes))
        measured = self._clock.take()
        unknown = [float("nan")] * (max(updates) - len(measured))
        told = self.group.gather([*measured, *unknown])
        for estimate, own, seconds in zip(self._estimates, sizes, told, strict=True):
            estimate.add(own, seconds[: len(own)])
        weights = merge_weights(updates, boost=self._boost)
        self._merge(weights)
        self._share(self._model.buffers(), max(range(len(updates)), key=updates.__getitem__))
        busy_s = max(sum(each[:number]) for each, number in zip(told, updates, strict=True))
        self.last = MegaBatch(
            batches=self.batches, updates=updates, weights=weights, seconds=busy_s
        )
        self._num_windows += 1
        self._write(self.last)
        if not is_cut:  # the end of an epoch cuts a window: its few updates say little
            self.batches = self._rule.next_batches(self.batches, updates)
            self._tell_change(self.last)

    def _merge(self, weights: Sequence[float]) -> None:
        """Give all ranks the weighted sum of their parameters."""
        weight = weights[self.group.rank]
        if self.group.num_ranks == 1:
            return
        with torch.no_grad():
            for values in by_type(each for each in self._model.parameters() if each.requires_grad):
                flat = torch.cat([value.detach().reshape(-1) for value in values])
                # Not multiplied by 0, because inf and nan would stay.
                take_over(values, self.group.add_up(flat.mul_(weight) if weight else flat.zero_()))

    def _share(self, values: Iterable[Tensor], rank: int) -> None:
        """Give all ranks the values of one of them, of whatever dtype."""
        if self.group.num_ranks == 1:
            return
        with torch.no_grad():
            for alike in by_type(values):
                flat = torch.cat([value.detach().reshape(-1) for value in alike])
                told = self.group.broadcast(flat.view(torch.uint8), rank)
                take_over(alike, told.view(flat.dtype))

    def _write(self, done: MegaBatch) -> None:
        if self._writer is None:
            return
        for rank, (batch, number) in enumerate(zip(done.batches, done.updates, strict=True)):
            self._writer.add_scalar(f"elastic/batch/rank{rank}", batch, self._num_windows)
            self._writer.add_scalar(f"elastic/updates/rank{rank}", number, self._num_windows)

    def _tell_change(self, done: MegaBatch) -> None:
        if self.batches == done.batches:
            return
        text = (
            f"window {self._num_windows}: {_shown(done.updates)} updates in {done.seconds:.3g} s; "
            f"batches {_shown(done.batches)} -> {_shown(self.batches)} samples"
        )
        if self._tell is not None:
            self._tell(text)
        elif self.group.rank == 0:
            _logger.warning(text)

    # --- going on later --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Position in the data, batches and measurements, as JSON values; between two windows.

        It is the same on all ranks, like the model; the optimizer's state is each rank's own.

        Raises:
            BalanceError: a window has begun.
        """
        self._require_closed()
        return {
            "version": STATE_VERSION,
            "epoch": self._epoch,
            "position": self._position,
            "num_windows": self._num_windows,
            "batches": list(self.batches),
            "estimates": [each.state_dict() for each in self._estimates],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, before windows are asked for.

        With another number of ranks, batches and measurements begin anew.

        Raises:
            BalanceError: the state has another version.
        """
        if state["version"] != STATE_VERSION:
            raise BalanceError(
                f"the state of elastic batches has version {state['version']}; this is "
                f"{STATE_VERSION}."
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._num_windows = int(state["num_windows"])
        if len(state["batches"]) != self.group.num_ranks:
            return
        self.batches = tuple(int(each) for each in state["batches"])
        for estimate, saved in zip(self._estimates, state["estimates"], strict=True):
            estimate.load_state_dict(saved)

    def _require_closed(self) -> None:
        if self._is_open:
            raise BalanceError(
                "a window was left before its last batch, so that ranks have models of their own; "
                "take all batches of a window, and leave the loop between two windows."
            )


class _ScaledRates:
    """Multiplies an optimizer's learning rates by a factor while it steps, and only then.

    Args:
        optimizer: The optimizer.

    Attributes:
        factor: The factor.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.factor = 1.0
        self._rates: list[Any] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate


def default_rule(batch_size: int) -> ElasticRule:
    """The paper's rule for first batches of another size.

    >>> default_rule(512)
    ElasticRule(step=32, least=32, most=1024, dead_band=1.0)
    """
    step = max(batch_size // STEPS_PER_BATCH, 1)
    return ElasticRule(step=step, least=step, most=MOST_GROWTH * batch_size)


def _check(
    batch_size: int, window: int, speeds: Sequence[float] | None, num_ranks: int, rule: ElasticRule
) -> None:
    if not 1 <= rule.least <= batch_size <= rule.most or rule.step < 1:
        raise BalanceError(
            f"batches begin with {batch_size} samples and go in steps of {rule.step} from "
            f"{rule.least} to {rule.most}; all are 1 or more, and the first lies between."
        )
    if window < batch_size * num_ranks:
        raise BalanceError(
            f"a window of {window} samples has no batch of {batch_size} for each of {num_ranks} "
            f"ranks; it needs {batch_size * num_ranks}, and is of use with many times that."
        )
    if speeds is not None and not (len(speeds) == num_ranks and all(each > 0 for each in speeds)):
        raise BalanceError(
            f"speeds are {list(speeds)}; give a positive number for each of the {num_ranks} ranks."
        )


def _shown(numbers: Sequence[int]) -> str:
    return "/".join(map(str, numbers))
