"""``Balancer``: unequal ranks in a user's own training loop."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from heterog.balance.arguments import check_arguments, check_data
from heterog.balance.clock import StepClock
from heterog.balance.dealing import Deal, GlobalBatches, SampleBatches
from heterog.balance.following import INTERVAL, ScalarWriter, SpeedFollower
from heterog.balance.gradients import average_gradients
from heterog.balance.group import RankGroup
from heterog.balance.loader import BalancedLoader
from heterog.balance.micro_batches import (
    cut_batch,
    forward_communicates,
    gradients_stay_local,
    num_parts,
)
from heterog.balance.rebalancing import DEAD_BAND, Rebalancer
from heterog.balance.replicas import ReplicaCheck
from heterog.balance.sampler import ShareSampler
from heterog.balance.shares import BalanceError, check_shares
from heterog.balance.start import Start, first_shares
from heterog.balance.tokens import TokenBatches
from heterog.balance.updates import watch_updates
from heterog.balance.watching import watch_waits
from heterog.balance.weights import StepWeights
from heterog.runtime.accelerators import CPU


class Balancer:
    """Gives each rank a share of every batch that suits its speed, and weighs losses exactly.

    The update is that of one process with the whole batch, whatever the shares are:

        balancer = heterog.Balancer(model, batch_size=96, speeds=[3, 3, 1])
        for inputs, targets in balancer.loader(dataset):
            loss = loss_function(model(inputs), targets)     # a mean, over this rank's samples
            balancer.weigh(loss).backward()
            optimizer.step()
            optimizer.zero_grad()

    ``model`` is wrapped in ``DistributedDataParallel`` or ``fully_shard`` as always; without
    either, call ``average_gradients`` after the backward pass. All methods are to be called on all
    ranks alike.

    Args:
        model: Wrapped model that is trained; needed for ``parts`` and ``average_gradients``. Where
            a framework wraps it later, ``watch`` takes it then.
        batch_size: Samples of the global batch, of all ranks together.
        shares: Samples of each rank in the first steps.
        speeds: Instead of ``shares``: one speed for each rank, in any unit. First shares are in
            proportion to them.
        plan: Instead of these: file of a data-parallel plan, whose device ``i`` is rank ``i``.
            Without all three, ranks begin with equal shares.
        fits: Number of samples that a rank can hold at once: one number, which may differ between
            ranks, or one for each. A rank gets no more.
        micro_batches: Whether a rank may get more than ``fits``, which ``parts`` then cuts.
        interval: Number of steps between measurements of all ranks, after which shares may change;
            0 keeps the first shares.
        dead_band: Least predicted gain of a change, as a fraction of the step time.
        check_replicas: Whether ranks compare a few numbers about their weights now and then, which
            differ where gradients are not averaged, or where a learning rate differs. Turn it off
            for replicas that shall differ for a while (local SGD).
        writer: TensorBoard writer for the shares and seconds of all ranks.
        tell: Function that gets a line about each change of shares. By default rank 0 logs it as a
            warning, which Python shows on standard error.

    Raises:
        BalanceError: shares, speeds or plan do not fit the ranks; later, weights of ranks differ.
    """

    loader_type: type[BalancedLoader] = BalancedLoader
    """Class of the loaders that ``loader`` makes; adapters for frameworks replace it."""

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        batch_size: int,
        shares: Sequence[int] | None = None,
        speeds: Sequence[float] | None = None,
        plan: str | Path | None = None,
        fits: int | Sequence[int | None] | None = None,
        micro_batches: bool = False,
        interval: int = INTERVAL,
        dead_band: float = DEAD_BAND,
        check_replicas: bool = True,
        writer: ScalarWriter | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        check_arguments(batch_size, writer)
        self.group = RankGroup()
        self.batch_size = int(batch_size)
        self.weights = StepWeights(self.group)
        watch_updates(self.weights, self.group)
        self._check_replicas = check_replicas
        self._replicas: ReplicaCheck | None = None
        self._start = Start(shares=shares, speeds=speeds, plan=plan)
        self._fits_given, self._micro_batches = fits, micro_batches
        self._fits: tuple[int | None, ...] | None = None
        self._sampler: ShareSampler | None = None
        self._deal: Deal | None = None
        self._make_follower = partial(
            SpeedFollower, self.group, interval=interval, writer=writer, tell=tell
        )
        self._interval, self._dead_band = interval, dead_band
        self._follower: SpeedFollower | None = None
        self.clock = StepClock(CPU)
        self._model: nn.Module | None = None
        if model is not None:
            self.watch(model)

    def watch(self, model: nn.Module) -> None:
        """Set the model that is trained, once a framework has wrapped it."""
        self._model = model
        watch_waits(model, self.clock)

    @property
    def model(self) -> nn.Module | None:
        """The model that is trained, if it is known."""
        return self._model

    # --- what is dealt ---------------------------------------------------------------------------

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        lengths: Sequence[int] | None = None,
        cost: Callable[[int], float] | None = None,
        padded: bool = False,
        **options: Any,
    ) -> BalancedLoader:
        """Make a loader of this rank's batches; each pass is the next epoch.

        Args:
            dataset: Data set with a length.
            seed: Seed of the order, the same on all ranks.
            shuffle: Whether each epoch has its own order.
            drop_last: Whether to leave out samples at the end that do not fill a batch.
            lengths: Number of tokens of each sample, where they differ: ``batch_size``, ``shares``
                and ``fits`` then count tokens, and ranks get samples by their cost.
            cost: Function from a sample's length to its cost, in tokens; see ``TokenBatches``.
            padded: Whether a rank's samples are padded to the longest of them.
            options: Other arguments of ``DataLoader``: ``num_workers``, ``collate_fn``, ...
        """
        check_data(dataset, options)
        size = self.batch_size
        order: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last}
        batches: GlobalBatches
        if lengths is not None:
            batches = TokenBatches(lengths, size, cost=cost, padded=padded, **order)
        else:
            batches = SampleBatches(len(dataset), size, **order)  # type: ignore[arg-type]
        return self.loader_type(dataset, self.sampler(batches), self, options)

    def sampler(self, batches: GlobalBatches) -> ShareSampler:
        """Make the sampler of a loader; a balancer has one at a time."""
        total, num_ranks = batches.units_per_batch, self.group.num_ranks
        most = None if self._micro_batches else self._memory()
        shares = first_shares(total, num_ranks, most, self._start)
        self._sampler = ShareSampler(
            batches,
            rank=self.group.rank,
            num_ranks=num_ranks,
            shares=check_shares(shares, num_ranks, total),
        )
        self._deal = None
        if self._interval and num_ranks > 1:
            rebalancer = Rebalancer(
                num_ranks, most=most, dead_band=self._dead_band, unit=batches.unit
            )
            self._follower = self._make_follower(rebalancer, self.clock)
        return self._sampler

    @property
    def shares(self) -> tuple[int, ...]:
        """Units of each rank in a whole batch."""
        return self.share_sampler.shares

    @property
    def deal(self) -> Deal:
        """The batch of the current step, as dealt to the ranks."""
        if self._deal is None:
            raise BalanceError(
                "no batch yet: take batches from balancer.loader(dataset), whose steps it follows."
            )
        return self._deal

    def begin_pass(self) -> None:
        """Called by a loader when the loop begins to iterate."""
        self.clock.restart()

    def begin_step(self, deal: Deal) -> None:
        """Called by a loader when the loop gets the batch of this deal."""
        if self._replicas is None and self._check_replicas and self._model is not None:
            self._replicas = ReplicaCheck(self._model, self.group)
        self._deal = deal
        self.weights.begin_step()
        self.weights.set(deal.samples[self.group.rank], sum(deal.samples))

    def end_step(self) -> None:
        """Called by a loader when the loop asks for the next batch."""
        if self._replicas is not None:
            with self.clock.waiting():
                self._replicas.end_step()
        if self._follower is not None:
            self._follower.end_step(self.deal, self.share_sampler)

    # --- gradients -------------------------------------------------------------------------------

    def weigh(self, loss: Tensor, count: float | Tensor | None = None) -> Tensor:
        """Weigh a loss; call ``backward`` on the result.

        Args:
            loss: A mean over this rank's samples, or over what ``count`` counts.
            count: Number of items that the loss is a mean over, if not samples: labels without
                padding, say. All ranks give it or none; it costs one all-reduce of a number. One
                may give 0 if its loss is finite, as that of ``cross_entropy`` is in the gradient.
        """
        if count is not None:
            own = count if self.deal.samples[self.group.rank] else 0
            with self.clock.waiting():
                self.weights.set(*self.weights.exchange([own]))
        elif self._deal is None:
            self.deal  # noqa: B018  # raises
        weighed = self.weights.weigh(loss)
        self.time_backward(weighed)
        return weighed

    def time_backward(self, loss: Tensor) -> None:
        """Measure the backward pass from this tensor; ``weigh`` does it."""
        if self._follower is not None and loss.requires_grad:
            self.clock.use(loss.device)
            loss.register_hook(self.clock.backward_begins)  # type: ignore[no-untyped-call]

    def parts(self, batch: Any, count: Any = None) -> Iterator[Any]:
        """Cut this rank's batch into parts that fit; all but the last keep gradients local.

        Call ``weigh`` without a count for the loss of each, and ``backward``; step the optimizer
        after the last.

        Args:
            batch: Tensors, or lists, dictionaries or tuples of them, samples first.
            count: Function from a part to the number of items in its loss's mean, if not samples.
        """
        deal, rank = self.deal, self.group.rank
        own = deal.samples[rank]
        number = num_parts(
            deal.units, self._memory(), rank, alike=forward_communicates(self._model)
        )
        pieces = (
            [(batch, 0)]
            if not own and number == 1
            else list(cut_batch(batch, max(own, 1), number))
        )
        counts: list[Any] = [samples if own else 0 for _, samples in pieces]
        total: Any = sum(deal.samples)
        if count is not None:
            told = [count(part) if n else 0 for (part, _), n in zip(pieces, counts, strict=True)]
            with self.clock.waiting():
                *counts, total = self.weights.exchange(told)
        for index, (part, _) in enumerate(pieces):
            self.weights.set(counts[index], total)
            if index == len(pieces) - 1:
                yield part
            else:
                with gradients_stay_local(self._model):
                    yield part

    def average_gradients(self) -> None:
        """Average the gradients of a model that is not wrapped, after the backward pass."""
        if self._model is None:
            raise BalanceError("average_gradients() needs the model: Balancer(model, ...).")
        with self.clock.waiting():
            average_gradients(self._model, self.group)

    def mean_loss(self) -> float:
        """The loss of the whole batch of this step; all ranks call it, after the backward pass.

        Weighed losses of several backward passes add up, such as those of parts. Those that are
        weighed after an optimizer's step, or after the last call, are a sum of their own: the loss
        of a second optimizer, or of the next call of a closure (LBFGS).
        """
        with self.clock.waiting():
            return self.weights.mean_loss()

    # --- going on later --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Position in the data, and the shares; take it after the optimizer's step."""
        sampler, deal = self.share_sampler, self._deal
        is_inside = deal is not None and deal.epoch == sampler.epoch
        done = deal.step + 1 if deal is not None and is_inside else sampler.start
        return {"sampler": sampler.state_dict(num_done=done)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state; call it after the loader is made, before it is used."""
        self.share_sampler.load_state_dict(state["sampler"])
        self._deal = None

    @property
    def share_sampler(self) -> ShareSampler:
        """The sampler of the loader.

        Raises:
            BalanceError: no loader has been made yet.
        """
        if self._sampler is None:
            raise BalanceError("no data yet: call balancer.loader(dataset) first.")
        return self._sampler

    def _memory(self) -> tuple[int | None, ...]:
        """Number of samples that each rank can hold at once; exchanged between ranks only once."""
        given, num_ranks = self._fits_given, self.group.num_ranks
        if self._fits is None:
            if given is None:
                self._fits = (None,) * num_ranks
            elif isinstance(given, int):
                self._fits = tuple(int(fits[0]) for fits in self.group.gather([given]))
            else:
                self._fits = tuple(given)
            if len(self._fits) != num_ranks or any(n is not None and n < 1 for n in self._fits):
                raise BalanceError(
                    f"fits={given}: give a number of samples of 1 or more, or one for each of the "
                    f"{num_ranks} ranks."
                )
        return self._fits
