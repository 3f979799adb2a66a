"""``Balancer``: unequal ranks in a user's own training loop."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, SupportsIndex
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from heterog.balance.batch_norms import BatchNorms
from heterog.balance.group import RankGroup
from heterog.balance.label_means import MeanCounts, check_mean_over_samples
from heterog.balance.leaving import Leaving
from heterog.balance.passes import check_not_weighed
from heterog.balance.rebalancing import (
    DEAD_BAND,
    INTERVAL,
    Rebalancer,
    ScalarWriter,
    SpeedFollower,
)
from heterog.balance.replicas import ReplicaCheck, SameDeals, check_data_parallel
from heterog.balance.sampler import BalancedLoader, Follower, ShareSampler, check_data
from heterog.balance.shares import (
    BalanceError,
    Deal,
    GlobalBatches,
    SampleBatches,
    check_shares,
    cut_batch,
    first_shares,
    forward_communicates,
    gradients_stay_local,
    num_parts,
    without_singles,
)
from heterog.balance.speeds import StepClock, watch_waits
from heterog.balance.streams import StreamBatches, check_stream
from heterog.balance.tokens import TokenBatches
from heterog.balance.updates import LeftOut, OpenStep, OpenSteps, watch_updates
from heterog.balance.weights import StepWeights, average_gradients, check_loss
from heterog.errors import HeterogWarning
from heterog.runtime.accelerators import CPU
from heterog.strategy.division import split_in_proportion


class Balancer(Follower):
    """Gives each rank a share of every batch that suits its speed, and weighs losses exactly.

    The update is that of one process with the whole batch, whatever the shares are:

        balancer = heterog.Balancer(model, global_batch_size=96, speeds=[3, 3, 1])
        for inputs, targets in balancer.loader(dataset):
            loss = loss_function(model(inputs), targets)     # a mean, over this rank's samples
            balancer.weigh(loss).backward()
            optimizer.step()
            optimizer.zero_grad()

    ``model`` is wrapped in ``DistributedDataParallel`` or ``fully_shard`` as always; without
    either, call ``average_gradients`` after the backward pass. All ranks call all methods alike.

    Args:
        model: Wrapped model that is trained; needed for ``parts`` and ``average_gradients``. If a
            framework wraps it later, give it to ``watch`` then.
        global_batch_size: Samples of a batch, of all ranks together.
        shares: Samples of each rank in the first steps.
        speeds: Instead of ``shares``: one speed for each rank, in any unit. First shares are in
            proportion to them.
        plan: Instead of ``shares`` and ``speeds``: file of a data-parallel plan, whose device
            ``i`` is rank ``i``. With none of the three, ranks begin with equal shares.
        fits: Number of samples that a rank can hold at once: one number, which may differ between
            ranks, or one for each. A rank gets no more.
        micro_batches: Whether a rank may get more than ``fits``, which ``parts`` then cuts.
        interval: Number of steps between measurements of all ranks, after which shares may change;
            0 keeps the first shares.
        dead_band: Least predicted gain of a change, as a fraction of the step time.
        check_replicas: Whether ranks now and then compare a few numbers about their weights. These
            differ if gradients are not averaged, or if learning rates differ. Turn it off for
            replicas that shall differ for a while (local SGD).
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
        global_batch_size: int,
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
        self.global_batch_size = _checked_size(global_batch_size)
        if writer is not None and not hasattr(writer, "add_scalar"):
            raise BalanceError(
                f"writer={writer!r} has no add_scalar: give a TensorBoard SummaryWriter, such as "
                "torch.utils.tensorboard.SummaryWriter('runs')."
            )
        self.group = RankGroup()
        self.weights = StepWeights(self.group)
        watch_updates(self.weights, self.group)
        self._means = MeanCounts(self.group)
        self._same_deals, self._leaving = SameDeals(self.group), Leaving(self.group)
        self._num_in_step, self._is_cut = 0, False  # losses weighed in this step, in parts or not
        self._check_replicas = check_replicas
        self.weights.checks_updates = check_replicas
        self._replicas: ReplicaCheck | None = None
        self._first_shares = partial(first_shares, shares=shares, speeds=speeds, plan=plan)
        self._fits_given, self._micro_batches = fits, micro_batches
        self._fits: tuple[int | None, ...] | None = None
        self._samplers: list[ref[ShareSampler]] = []  # of loaders that exist, in order
        self._training: ShareSampler | None = None
        self._open, self._left_out = OpenSteps(), LeftOut(self.group.rank)
        self._make_follower = partial(
            SpeedFollower, self.group, interval=interval, writer=writer, tell=tell
        )
        self._interval, self._dead_band = interval, dead_band
        self._followers: WeakKeyDictionary[ShareSampler, SpeedFollower] = WeakKeyDictionary()
        self.clock = StepClock(CPU)
        self.model: nn.Module | None = None  # that is trained, if it is known
        self._norms: BatchNorms | None = None
        if model is not None:
            self.watch(model)

    def watch(self, model: nn.Module) -> None:
        """Set the model that is trained, once a framework has wrapped it."""
        check_data_parallel(model, self.group.num_ranks)
        self.model = model
        self.weights.parameters = frozenset(map(id, model.parameters()))
        if self._check_replicas and self.group.num_ranks > 1:
            self.weights.passes.watch(model)
        watch_waits(model, self.clock)
        self.watch_norms(model)

    def watch_norms(self, model: nn.Module) -> None:
        """Handle BatchNorm in a model, wrapped or not; ``watch`` calls this."""
        self._norms = BatchNorms(model)
        for sampler in self._existing_samplers():
            self._keep_from_singles(sampler)

    def _keep_from_singles(self, sampler: ShareSampler) -> None:
        """Deal no rank a single sample where BatchNorm needs two, and say so."""
        if self._norms is None:
            return
        sampler.least = self._norms.least
        shares = sampler.shares
        if sampler.least > 1 and 1 in shares and sampler.unit == "samples" and not self.group.rank:
            warnings.warn(
                f"shares {shares} give a rank one sample, which BatchNorm refuses in training: "
                f"dealt as {without_singles(shares)}.",
                HeterogWarning,
                stacklevel=2,
            )

    # --- what is dealt ---------------------------------------------------------------------------

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool = False,
        lengths: Sequence[int] | None = None,
        cost: Callable[[int], float] | None = None,
        padded: bool = False,
        **options: Any,
    ) -> BalancedLoader:
        """Make a loader of this rank's batches; each pass is the next epoch.

        There may be several loaders: to validate with, say, or to train with in turn. Shares
        follow the training loader, that is, the one whose losses are weighed for a backward pass.

        Args:
            dataset: Data set with a length, or an ``IterableDataset``, which all ranks read whole.
            seed: Seed of the order, the same on all ranks.
            shuffle: Whether each epoch has its own order; yes by default, a stream keeps its own.
            drop_last: Whether to leave out samples at the end that do not fill a batch.
            lengths: Number of tokens of each sample, where they differ: ``global_batch_size``,
                ``shares`` and ``fits`` then count tokens, and ranks get samples by their cost.
            cost: Function from a sample's length to its cost, in tokens; see ``TokenBatches``.
            padded: Whether a rank's samples are padded to the longest of them.
            options: Other arguments of ``DataLoader``: ``num_workers``, ``collate_fn``, ...

        Raises:
            BalanceError: the data set is of no known kind, or an option or the shares do not fit.
        """
        batches = self.global_batches(
            dataset,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            lengths=lengths,
            cost=cost,
            padded=padded,
            **options,
        )
        return self.loader_type(dataset, self.sampler(batches), self, options)

    def global_batches(
        self,
        dataset: Dataset[Any],
        *,
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool = False,
        lengths: Sequence[int] | None = None,
        cost: Callable[[int], float] | None = None,
        padded: bool = False,
        **options: Any,
    ) -> GlobalBatches:
        """The global batches of a loader with these arguments, before ranks cut them."""
        check_data(dataset, options)
        size = self.global_batch_size
        if isinstance(dataset, IterableDataset):
            check_stream(dataset, shuffle=shuffle, lengths=lengths)
            return StreamBatches(dataset, size, drop_last=drop_last, group=self.group)
        num_samples = checked_length(dataset)
        order: dict[str, Any] = {
            "seed": seed,
            "shuffle": shuffle is not False,
            "drop_last": drop_last,
        }
        if lengths is not None:
            return TokenBatches(lengths, size, cost=cost, padded=padded, **order)
        return SampleBatches(num_samples, size, **order)

    def sampler(self, batches: GlobalBatches) -> ShareSampler:
        """Make the sampler of a loader, with the shares of the training loader."""
        total, num_ranks = batches.units_per_batch, self.group.num_ranks
        if self._training is not None:
            shares = split_in_proportion(total, self._training.shares)
        else:
            shares = self._first_shares(total, num_ranks, self._most())
        sampler = ShareSampler(
            batches,
            rank=self.group.rank,
            num_ranks=num_ranks,
            shares=check_shares(shares, num_ranks, total),
        )
        self._keep_from_singles(sampler)
        self._samplers.append(ref(sampler))
        if self._training is None:
            self._training = sampler
        return sampler

    def train_with(self, sampler: ShareSampler) -> None:
        """Follow this sampler; otherwise, the one whose losses are weighed for training."""
        self._training = sampler
        self._open = OpenSteps()

    @property
    def shares(self) -> tuple[int, ...]:
        """Units of each rank in a whole batch."""
        return self.share_sampler.shares

    @property
    def deal(self) -> Deal:
        """The batch of the current step, as dealt to the ranks."""
        return self._open.current.deal

    def begin_pass(self, sampler: ShareSampler | None = None) -> None:
        """Called by a loader when the loop begins to iterate."""
        self._open.begin_pass()
        self._leaving.begin_pass(sampler)
        self.clock.restart()

    def begin_step(self, deal: Deal, sampler: ShareSampler | None = None) -> None:
        """Called by a loader when the loop gets the batch of this deal."""
        if self._replicas is None and self._check_replicas and self.model is not None:
            self._replicas = ReplicaCheck(self.model, self.group)
        sampler = self.share_sampler if sampler is None else sampler
        sampler.begin_step(deal)
        if self._open.is_inside:
            self._open.current.outer_weights = self.weights.kept()
        self._open.begin(sampler, deal)
        self._num_in_step, self._is_cut = 0, False
        self.weights.begin_batch(deal.samples)
        if self._norms is not None:
            self._norms.begin_step(is_empty=deal.samples[self.group.rank] == 0)

    def end_step(self, sampler: ShareSampler | None = None) -> None:
        """Called by a loader when the loop asks for the next batch."""
        sampler = self.share_sampler if sampler is None else sampler
        step = self._open.of(sampler)
        self._leaving.end_step(sampler)
        if sampler is self._training and self._check_replicas and self.group.num_ranks > 1:
            self._check_step(sampler, step)
        if step is None or not step.trains or not self._follows:
            return
        if not step.is_timed:
            self.clock.restart()
            return
        before = sampler.shares
        self._follower_of(sampler).end_step(step.deal, sampler)
        if sampler.shares != before:
            self._share_with_others(sampler)

    def _check_step(self, sampler: ShareSampler, step: OpenStep | None) -> None:
        """Check that a step of training has trained all replicas alike, and this one at all."""
        is_end, num_trained = sampler.num_done == sampler.num_steps, self.weights.num_trained
        if step is not None:
            self._left_out.end_step(step)
        if self._replicas is not None:
            with self.clock.waiting():
                self._replicas.end_step(is_end=is_end)
        if num_trained or self.weights.is_unlike:
            self.weights.passes.end_step(num_trained, is_end=is_end)

    def end_pass(self, sampler: ShareSampler) -> None:
        """Called by a loader when a pass ends or is left; returns to the step of an outer loop."""
        self._open.end_pass(sampler)
        self._leaving.end_pass(sampler)
        if sampler is self._training:
            self._left_out.end_pass()
        is_empty = False
        if self._open.is_inside:
            outer = self._open.current
            if outer.outer_weights is not None:
                self.weights.restore(outer.outer_weights)
            is_empty = outer.deal.samples[self.group.rank] == 0
        if self._norms is not None:
            self._norms.begin_step(is_empty=is_empty)

    def release_norms(self) -> None:
        """Leave BatchNorm as it was, after the backward pass of a step that may be the last."""
        if self._norms is not None:
            self._norms.begin_step(is_empty=False)

    @property
    def _follows(self) -> bool:
        return bool(self._interval) and self.group.num_ranks > 1

    def _follower_of(self, sampler: ShareSampler) -> SpeedFollower:
        if sampler not in self._followers:
            rebalancer = Rebalancer(
                self.group.num_ranks,
                most=self._most(),
                dead_band=self._dead_band,
                unit=sampler.unit,
            )
            self._followers[sampler] = self._make_follower(rebalancer, self.clock)
        return self._followers[sampler]

    def _share_with_others(self, sampler: ShareSampler) -> None:
        """Let the other loaders begin their next pass with the new shares."""
        for other in self._existing_samplers():
            if other is not sampler and other not in self._followers:
                shares = split_in_proportion(sum(other.shares), sampler.shares)
                other.set_shares(shares, from_step=other.num_steps)

    def _existing_samplers(self) -> list[ShareSampler]:
        found = [(each, each()) for each in self._samplers]
        self._samplers = [each for each, sampler in found if sampler is not None]
        return [sampler for _, sampler in found if sampler is not None]

    # --- gradients -------------------------------------------------------------------------------

    def weigh(self, loss: Tensor, count: float | Tensor | None = None) -> Tensor:
        """Weigh a loss; call ``backward`` on the result.

        Args:
            loss: A mean over this rank's samples, or over what ``count`` counts.
            count: Number of items that the loss is a mean over, if not samples: labels without
                padding, say. Either all ranks give it or none; it costs one all-reduce of a
                number. A rank may give 0 if its loss, or as with ``cross_entropy`` its gradient,
                is finite.

        Raises:
            BalanceError: the loss is no tensor of one element; or, without a count, it is a mean
                over labels that do not all count, or over elements whose number differs between
                samples; or the count is not that of its labels.
        """
        check_loss(loss)
        if self.group.num_ranks > 1:
            check_not_weighed(loss)
        step = self._open.current
        if loss.requires_grad:
            inner, step = step, self._open.back_to_training()
            if step is not inner and step.outer_weights is not None:
                self.weights.restore(step.outer_weights)
            if self.group.num_ranks > 1:
                self._open.check_alone(self.group.rank)
        own, counted = None, None
        if count is not None:
            own = count if step.deal.samples[self.group.rank] else 0
            with self.clock.waiting():
                counted = self.weights.exchange([own])
        if self.group.num_ranks > 1 and loss.requires_grad:
            self._check_mean(loss, own)
        weighed = self.weights.weigh(loss, counted)
        self.time_backward(weighed)
        return weighed

    def _check_mean(self, loss: Tensor, count: float | Tensor | None) -> None:
        """Check that a loss is a mean over samples, or over as many items as ``count`` says."""
        own = self.weights.samples if count is None else count
        if own is None:
            return
        looks = self.weights.looks_at_mean(loss)
        if looks and count is None and self.weights.samples:
            check_mean_over_samples(loss, self.weights.samples)
        place, self._num_in_step = self._num_in_step, self._num_in_step + 1
        part = self._is_cut and place > 0
        with self.clock.waiting():
            self._means.check(
                loss, own, place, looks=looks, part=part, is_stated=count is not None
            )

    def time_backward(self, loss: Tensor) -> None:
        """Note that this loss trains, and time its backward pass; ``weigh`` calls this."""
        if not loss.requires_grad:
            return
        step = self._open.current
        if not step.trains:
            self._leaving.train(step.sampler, step.deal.step)
            with self.clock.waiting():
                self._same_deals.check(step.sampler, step.deal)
        step.trains = True
        self.weights.num_trained += 1
        self.weights.passes.follow(loss)
        self._left_out.train()
        self._training = step.sampler
        if self._follows:
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
            deal.units, self._memory(), rank, alike=forward_communicates(self.model)
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
        self._is_cut = True
        for index, (part, _) in enumerate(pieces):
            self.weights.set(counts[index], total)
            if index == len(pieces) - 1:
                yield part
            else:
                with gradients_stay_local(self.model):
                    yield part

    def average_gradients(self) -> None:
        """Average the gradients of a model that is not wrapped, after the backward pass."""
        if self.model is None:
            raise BalanceError("average_gradients() needs the model: Balancer(model, ...).")
        with self.clock.waiting():
            average_gradients(self.model, self.group)

    def mean_loss(self) -> float:
        """The loss of the whole batch of this step; all ranks call it, after the backward pass.

        Weighed losses of several backward passes, such as those of parts, add up. A new sum begins
        after an optimizer's step and after each call of this method, because the next loss is that
        of a second optimizer, or of the next call of a closure (LBFGS).
        """
        with self.clock.waiting():
            return self.weights.mean_loss()

    # --- going on later --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Position in the data, and the shares; take it after the optimizer's step.

        It has the positions of all loaders, the training loader's first. After a ``break`` the
        position is still inside that epoch; a loader that loads it continues there.
        """
        training = self.share_sampler
        samplers = self._existing_samplers()
        states = [each.state_dict(num_done=each.num_done) for each in samplers]
        place = samplers.index(training)
        return {"sampler": states.pop(place), "others": states, "place": place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state; call it after the loaders are made, before they are used.

        Each position goes to the first loader that has the same samples next.

        Raises:
            BalanceError: the state is inside an epoch of other data, or of data in another order.
        """
        training = self.share_sampler
        states = list(state.get("others", ()))
        states.insert(state.get("place", 0), state["sampler"])
        left = self._existing_samplers()
        found = None
        for each in states:
            sampler = next((sampler for sampler in left if sampler.fits(each)), None)
            if sampler is not None:
                left.remove(sampler)
                sampler.load_state_dict(each)
                found = sampler if each is state["sampler"] else found
        if found is None:
            found = training if training in left or not left else left[0]
            found.load_state_dict(state["sampler"])
        self.train_with(found)

    @property
    def share_sampler(self) -> ShareSampler:
        """The sampler of the training loader; before training, of the first loader made.

        Raises:
            BalanceError: no loader has been made yet.
        """
        if self._training is None:
            raise BalanceError("no data yet: call balancer.loader(dataset) first.")
        return self._training

    def _most(self) -> tuple[int | None, ...] | None:
        """Largest share of each rank: what it holds at once, unless micro-batches are cut."""
        return None if self._micro_batches else self._memory()

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


def checked_length(dataset: Dataset[Any]) -> int:
    """Number of samples of a data set.

    Raises:
        BalanceError: it has no length, and is no stream either.
    """
    if not hasattr(dataset, "__len__"):
        raise BalanceError(
            f"{type(dataset).__name__} has no length, so that it is not known which samples are "
            "in a global batch. Give it __len__ and __getitem__, or make it a stream: a subclass "
            "of torch.utils.data.IterableDataset."
        )
    return len(dataset)


def _checked_size(size: object) -> int:
    """The number of samples of a global batch.

    Raises:
        BalanceError: it is no whole number.
    """
    if isinstance(size, bool) or not isinstance(size, SupportsIndex):
        raise BalanceError(
            f"global_batch_size={size!r}: give a whole number, the samples of all ranks together."
        )
    return size.__index__()
