"""Whether all ranks deal the same batches of the same data in the same shares.

Each rank deals for itself, from arguments that all of them have to give alike. A seed, a drawn
split, or shares that differ by rank would train with some samples twice and leave others out.
"""

import warnings
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import Dataset, Subset, TensorDataset

from heterog.balance.dealing import Deal
from heterog.balance.group import RankGroup
from heterog.balance.sampler import ShareSampler
from heterog.balance.shares import BalanceError
from heterog.balance.streams import fingerprint
from heterog.errors import HeterogWarning
from heterog.runtime.step.replicas import compared_after

_MOST_INDICES = 4096
_FACTS = ("the data sets", "the orders of the samples", "the shares")


def samples_of(dataset: Dataset[Any] | None) -> tuple[int, int]:
    """Numbers that tell which samples a data set has, as far as it says so unread.

    The first is of its length, the indices of a ``Subset``, and the rows of one of tensors. The
    second is the fingerprint of one of Hugging Face, which is drawn for what cannot be hashed.
    """
    told: list[Any] = []
    while isinstance(dataset, Subset):
        number = len(dataset.indices)
        places = range(0, number, 1 + number // _MOST_INDICES)
        told += [number, *(int(dataset.indices[place]) for place in places)]
        dataset = dataset.dataset
    if isinstance(dataset, TensorDataset):
        told += [each[:1] for each in dataset.tensors]
    told.append(getattr(dataset, "__len__", int)())
    return fingerprint(told), fingerprint(str(getattr(dataset, "_fingerprint", "")))


class SameDeals:
    """Compares what ranks deal, in the first step of each loader that is trained with, and later.

    Args:
        group: The ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._num_steps: WeakKeyDictionary[ShareSampler, int] = WeakKeyDictionary()

    def check(self, sampler: ShareSampler, deal: Deal) -> None:
        """Compare the batch of a step; all ranks call it, once in each step.

        Raises:
            BalanceError: ranks deal differently.
        """
        number = self._num_steps[sampler] = self._num_steps.get(sampler, 0) + 1
        if not compared_after(number):
            return
        (which, maybe), order = (0, 0), [deal.epoch, deal.step]
        if sampler.stream is None:  # whose first samples are compared when they are read
            which, maybe = samples_of(sampler.dataset)
            order += sampler.first_samples(*order)
        own = [which, fingerprint(order), fingerprint(list(map(int, deal.samples))), maybe]
        told = self._group.gather(own)
        for rank, each in enumerate(told):
            for what, mine, others in zip(_FACTS, told[0], each, strict=False):
                if mine != others:
                    raise BalanceError(
                        f"{what} of rank {rank} and rank 0 differ. Every rank makes the "
                        "loader of all samples with the same arguments (seed, shuffle, lengths, "
                        "shares, speeds, global_batch_size), and the balancer deals them: do not "
                        "cut data by ranks (DistributedSampler, shard), and draw splits and "
                        "subsets with one seed (random_split(..., generator=torch.Generator()"
                        ".manual_seed(0)))."
                    )
        if len({each[-1] for each in told}) > 1 and number == 1:
            warnings.warn(
                "the fingerprints of ranks' data sets differ: unless a transform could not be "
                "hashed, their samples do. Give train_test_split, shuffle and select the same "
                "arguments and a seed on all ranks, and leave out shard.",
                HeterogWarning,
                stacklevel=5,
            )
