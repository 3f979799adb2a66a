"""The gradients of one step: accumulated, copied into buckets, pushed and summed over devices.

``ErrorFeedback`` adds what a codec leaves out of a gradient to the next gradient. The same holds
for the changes that an island sends when parameters are averaged.

    m_t = encode(g_t + e_t),   e_{t+1} = g_t + e_t - decode(m_t),   e_0 = 0

(Seide et al. 2014 for one bit, Stich et al. 2018 for top-k.) Each rank keeps what its own messages
left out, in the gradient's dtype. Activations have no feedback, because their elements belong to
other samples in every step.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from heterog.lowering.program import TaskKind
from heterog.modes.mode import MessageCodec
from heterog.runtime.step.collectives import Communicator, Pending, add_in_place, slice_counts
from heterog.runtime.step.rank_program import Near
from heterog.runtime.step.rank_state import RankState
from heterog.runtime.step.recipes import Recipe, followed
from heterog.runtime.step.slices import SlicedBucket
from heterog.runtime.step.spans import Spans
from heterog.runtime.step.values import Values
from heterog.strategy.division import Ring

Key = tuple[int, tuple[int, ...]]
"""A bucket, or a row of ``graph.updates``, and the devices that exchange its messages."""


class ErrorFeedback:
    """Parts of gradients that this rank's messages have left out so far.

    Attributes:
        left_out: Flat tensors that were left out, by bucket or row and devices.
    """

    def __init__(self) -> None:
        self.left_out: dict[Key, Tensor] = {}

    def encode(self, key: Key, gradient: Tensor, codec: MessageCodec) -> Tensor:
        """Encode a gradient together with what earlier messages left out of it.

        Args:
            key: Key of the gradient: its bucket or row, and its devices.
            gradient: Flat gradient; it is not changed.
            codec: Codec of the message.
        """
        kept = self.left_out.get(key)
        whole = gradient if kept is None else kept.add_(gradient)
        message: Tensor = codec.encode(whole)
        if not message.is_meta:
            meant = codec.decode(message, whole.numel(), whole.dtype)
            self.left_out[key] = torch.sub(whole, meant, out=meant)
        return message


def added_up(codec: MessageCodec, into: Tensor) -> Callable[[list[Tensor]], Tensor]:
    """A function that decodes messages and adds them up, in place of what a tensor holds.

    Their order is the same on all ranks, so that replicas stay equal to the last bit.
    """

    def total(messages: list[Tensor]) -> Tensor:
        into.zero_()
        for each in messages:
            if each.numel():
                codec.add_decoded(into, each)
        return into

    return total


_InRing = tuple[int, tuple[int, ...]]
"""A bucket, and the devices of one of its rings."""
_PUSHED = (TaskKind.PUSH, TaskKind.DECODE_SUM)


class Gradients:
    """The gradients of one step, by row of ``graph.updates``.

    They may outlive their step: without a step barrier the next step finishes what this one began.

    Args:
        rank: What the rank runs the program with.
        values: Values of the step.
        feedback: Parts of gradients that codecs have left out in earlier steps.

    Attributes:
        own: Sums over this rank's micro-batches so far, by row.
    """

    def __init__(self, rank: RankState, values: Values, feedback: ErrorFeedback) -> None:
        self._rank, self._part = rank, rank.part
        self._communicator = rank.communicator
        self._values = values
        self.own: dict[int, Tensor | Pending] = {}
        # By (row, micro-batch): a device that waits for an earlier one continues with the next.
        self._fresh: dict[tuple[int, int], Tensor | Pending] = {}
        self._to_replicas: dict[tuple[int, int], Tensor] = {}  # for replicas that make none
        self._feedback = feedback
        self._messages: dict[_InRing, Tensor] = {}  # not sent yet
        self._coming: dict[int, Pending] = {}  # decoded messages, by their tasks
        self._pushed: dict[int, list[Pending]] = {}  # received as the parameter's server
        self._sums: dict[int, Tensor] = {}
        self._flat: dict[_InRing, Tensor] = {}
        self._parts: dict[_InRing, Pending] = {}
        self._totals: dict[_InRing, Pending] = {}
        self._slices: dict[int, Pending] = {}  # under ZeRO, by bucket
        # The next three are used if each micro-batch's gradients are scattered.
        self._of_micro: dict[tuple[int, int], Tensor | Pending] = {}  # by row and micro-batch
        self._flat_of_micro: dict[tuple[int, int], Tensor] = {}  # by bucket and micro-batch
        self._scattered: list[Pending] = []  # not waited for yet
        self._last_scatter: dict[tuple[int, ...], Pending] = {}  # once a step, by devices
        self._num_stepped: dict[int, int] = {}  # parameters of each bucket
        self._summed: dict[int, Tensor] = {}  # views of buckets that are summed, by row

    def keep(
        self, task: int, spans: Spans | None, micro: int, *, gathered_by: int = -1
    ) -> list[tuple[int, Recipe | None]]:
        """Keep the gradients that a task has made; returns their rows and recipes.

        Args:
            task: The task.
            spans: Spans of the op that makes them.
            micro: The micro-batch.
            gathered_by: The slot whose gather, the task, has completed them; -1 for an op.
        """
        part, found = self._part, []
        for buffer in part.made(task):
            if part.program.buffer_device[buffer] != part.rank:
                continue
            value, whole = part.value_in(buffer)
            for row in part.parameters_of_value.get(value, ()):
                if gathered_by < 0:
                    is_complete = not part.gradient_is_converted(row)
                else:
                    is_complete = part.tables.gradient_slot[row] == gathered_by
                if is_complete and part.gives(row, micro):
                    found.append((row, self._keep(row, {(value, whole): buffer}, spans, micro)))
        return found

    def _keep(self, row: int, near: Near, spans: Spans | None, micro: int) -> Recipe | None:
        """Keep a gradient, which a collective may still have to complete."""
        values, tensor = self._values, self._part.graph.updates[row][2]
        (((value, whole), buffer),) = near.items()
        held, seen = (
            values.held[buffer],
            values.look(tensor, whole, near, values.reader(spans, micro)),
        )
        rows = self._part.parameters_of_value[value]
        is_late = isinstance(held.value, Pending)
        if len(rows) > 1 if is_late else row != rows[0]:
            # Sums over micro-batches and devices change it in place, maybe before others wait.
            seen.then(Tensor.clone)
        if is_late:
            # The buffer may have been dropped by then.
            self.keep_row(row, micro, Pending(None, lambda: followed(held.tensor(), seen.steps)))
            return None
        gradient, recipe = values.first_read(seen)
        self.keep_row(row, micro, gradient)
        return recipe

    def keep_row(self, row: int, micro: int, kept: Tensor | Pending) -> None:
        """Keep a parameter's gradient, which may be under way."""
        if (row, micro) in self._part.given_to_replicas:
            # A copy, as sums over devices and micro-batches may change it before it is sent.
            kept = _waited(kept)
            self._to_replicas[row, micro] = kept.clone()
        bucket = self._part.sliced_bucket(row)
        if bucket is not None and bucket.by_micro:
            self._of_micro[row, micro] = kept
        else:
            self._put(row, micro, kept)

    def _put(self, row: int, micro: int, gradient: Tensor | Pending) -> None:
        if (row, micro) in self._part.accumulated:
            self._fresh[row, micro] = gradient
        else:
            self.own[row] = gradient

    def accumulate(self, task: int, row: int) -> None:
        """Add the gradient of a micro-batch to the sum of earlier ones, in place if possible."""
        micro = int(self._part.program.micro[task])
        own, fresh = _waited(self.own[row]), _waited(self._fresh.pop((row, micro)))
        is_shared = any(self._values.is_needed_after(task, b) for b in self._part.reads(task))
        if is_shared or not own.is_contiguous():
            self.own[row] = own + fresh
        else:
            add_in_place(own, fresh)
            self.own[row] = own

    def flatten(self, task: int, bucket: int, micro: int) -> None:
        """Copy gradients into their bucket, if it has more than one or a ring takes a part."""
        members = self._part.bucket_members[bucket]
        sliced = self._part.sliced.get(bucket)
        if sliced is not None and sliced.by_micro:
            # Frees earlier scattered buckets; ranks that run ahead would keep all of them.
            while len(self._scattered) > 1:
                self._scattered.pop(0).wait()
            if len(members) == 1:
                return
            parts = [self._take_of_micro(row, micro) for row in members]
            self._flat_of_micro[bucket, micro] = torch.cat([part.reshape(-1) for part in parts])
            return
        ring = self._part.flattened_for(task)
        if len(members) > 1 and bucket in self._part.in_one_ring:
            own = [self._take_own(row) for row in members]
            flat = _flatten_dense_tensors(own)  # type: ignore[no-untyped-call]
        else:
            flat = torch.cat([self._in_ring(row, ring) for row in members])
        self._flat[bucket, ring.devices] = flat

    def _take_of_micro(self, row: int, micro: int) -> Tensor:
        """A micro-batch's gradient; zeros if this rank makes only other gradients of its bucket.

        This happens because ops with rules run on the samples of the team, even on a device
        without samples of its own.
        """
        gradient = self._of_micro.pop((row, micro), None)
        return self._zeros(row) if gradient is None else _waited(gradient)

    def _in_ring(self, row: int, ring: Ring) -> Tensor:
        """The part of a parameter's gradient that this rank gives to a ring, flat."""
        part = self._part
        is_last = len([each for each in part.rings[row] if part.rank in each.devices]) == 1
        own = self._take_own(row) if is_last else self._own_or_zeros(row)
        # gloo ignores strides, which a part of the columns has.
        return part.cut_to_ring(own, row, ring).reshape(-1).contiguous()

    def synchronise(self, task: int, kind: TaskKind, bucket: int) -> None:
        """Issue a collective of a bucket."""
        channel = self._part.channel(task)
        key = bucket, channel.devices
        flat = self._take_flat(task, key, 0, in_place=True)
        if kind == TaskKind.ALL_REDUCE:
            if key in self._messages:
                self._totals[key] = self._coming[task] = self._gathered(task, key, flat)
                return
            self._totals[key] = self._communicator.all_reduce(flat, channel.devices)
            return
        counts = slice_counts(flat.numel(), channel.slices)
        if kind == TaskKind.REDUCE_SCATTER:
            self._parts[key] = self._communicator.reduce_scatter(flat, channel.devices, counts)
            return
        self._parts.pop(key).wait()
        self._totals[key] = self._communicator.all_gather_slices(flat, channel.devices, counts)

    def _gathered(self, task: int, key: _InRing, flat: Tensor) -> Pending:
        """The sum of all members' decoded messages, in place of this rank's gradient."""
        message, devices = self._messages.pop(key), key[1]
        total = added_up(self._part.rule(task).codec, flat)
        counts = [message.numel()] * len(devices)
        return self._communicator.all_gather(message, devices, counts, total)

    def encode(self, task: int, row: int) -> None:
        """Encode a gradient that is pushed, or summed with those of other devices.

        Args:
            task: The encoding task.
            row: Row of the parameter, or the first row of the bucket.
        """
        message = self._part.message_of[task]
        devices = self._part.channel(message).devices
        codec = self._part.rule(task).codec
        if self._part.kinds[message] is TaskKind.PUSH:
            flat = _waited(self.own[row]).reshape(-1)
        else:
            flat = self._take_flat(task, (row, devices), 0, in_place=True)
        self._messages[row, devices] = self._feedback.encode((row, devices), flat, codec)

    def decode(self, task: int) -> None:
        """Wait for a message and decode it."""
        self._coming.pop(self._part.message_of[task]).wait()

    def scatter(self, task: int, number: int, micro: int) -> None:
        """Issue the reduce-scatter of a bucket that is updated in slices."""
        bucket = self._part.sliced[number]
        senders = self._part.senders(task)
        before = self._slices.get(number)
        flat: Tensor | None = None
        if self._part.rank in senders:
            key = number, bucket.devices
            flat = self._take_flat(task, key, micro, in_place=not bucket.by_micro)
        self._slices[number] = self._communicator.reduce_scatter_slices(
            flat,
            bucket.devices,
            bucket.counts,
            senders,
            like=self._rank.slices.own[number]
            .detach()
            .new_empty(0, dtype=self._part.gradient_dtype(number)),
            before=before,
            in_place=not bucket.by_micro,
        )
        if not bucket.by_micro:
            # A communicator's operations run one after another. As the next one is issued now, the
            # receive buffer of the previous one can be freed.
            last = self._last_scatter.get(bucket.devices)
            if last is not None:
                last.wait()
            self._last_scatter[bucket.devices] = self._slices[number]
        else:
            if flat is None:  # ``flatten``, which frees them, did not run here
                for pending in self._scattered:
                    pending.wait()
                self._scattered.clear()
            self._scattered.append(self._slices[number])

    def add_up_copies(self, task: int, number: int) -> None:
        """Add up this rank's slice of a bucket over all slice groups."""
        scattered = self._slices[number]
        own = scattered.wait()
        self._scattered = [each for each in self._scattered if each is not scattered]
        devices = self._part.sliced[number].devices
        if self._last_scatter.get(devices) is scattered:
            del self._last_scatter[devices]
        if own.numel():  # a slice of a fraction of an element is empty
            over = self._part.channel(task).devices
            self._slices[number] = self._communicator.all_reduce(own, over)

    def _take_flat(self, task: int, key: _InRing, micro: int, *, in_place: bool) -> Tensor:
        """This rank's gradients of a bucket in a ring, flat."""
        bucket = key[0]
        if not in_place:
            flat = self._flat_of_micro.pop((bucket, micro), None)
            if flat is None:
                flat = _waited(self._of_micro.pop((bucket, micro))).reshape(-1)
            return flat
        if key not in self._flat:
            # Also for a replica without a gradient, which gives zeros to each of its rings.
            own = self._in_ring(bucket, self._part.ring_over(bucket, key[1]))
            # A copy if the gradient is still read, because collectives add in place.
            is_shared = any(self._values.is_needed_after(task, b) for b in self._part.reads(task))
            self._flat[key] = own.clone() if is_shared else own
        return self._flat[key]

    def slice_total(self, bucket: int) -> Tensor:
        """This rank's slice of a bucket's gradients, summed over devices and micro-batches."""
        return self._slices[bucket].wait()

    def push(self, task: int, row: int) -> None:
        """Send a gradient to the device that sums it or has none, or receive it there."""
        src, dst = self._part.channel(task).devices
        micro = int(self._part.program.micro[task])
        is_served = self._part.is_served_by(row, dst)
        if self._part.rank == src:
            gradient = self.own.get(row) if is_served else self._to_replicas[row, micro]
            assert gradient is not None
            message = self._messages.pop((row, (src, dst)), None)
            self._communicator.send(_waited(gradient) if message is None else message, dst, task)
            if is_served:
                self.own.pop(row, None)  # only the server needs it
            return
        parameter = self._parameter(row)
        like = torch.empty(
            parameter.shape, dtype=self._part.gradient_dtype(row), device=parameter.device
        )
        codec = self._part.program.codec_of(task)
        pending = decoded(self._communicator, like, src, task, codec)
        if codec is not None:
            self._coming[task] = pending
        if is_served:
            self._pushed.setdefault(row, []).append(pending)
        elif self._part.scatters_by_micro(row):
            self._of_micro[row, micro] = pending
        else:
            self._put(row, micro, pending)

    def add_pushed(self, task: int, row: int) -> None:
        """Add the gradients pushed to this rank, and its own if that is a part of the sum."""
        parts = [pending.wait() for pending in self._pushed[row]]
        kept = self.own.get(row)
        makers = [int(self._part.program.buffer_maker[b]) for b in self._part.reads(task)]
        is_part = any(self._part.kinds[maker] not in _PUSHED for maker in makers)
        own = None if kept is None or not is_part else _waited(kept)
        total = parts[0]  # received by this rank alone
        for part in (*parts[1:], *(() if own is None else (own,))):
            add_in_place(total, part)
        self._sums[row] = total

    def total(self, row: int) -> Tensor:
        """The gradient summed over all devices, in the parameter's shape."""
        bucket = self._part.bucket[row]
        if bucket in self._part.in_one_ring:
            if row not in self._summed:
                flat = self._totals[bucket, self._part.rings[row][0].devices].wait()
                members = self._part.bucket_members[bucket]
                like = [self._parameter(each) for each in members]
                views = _unflatten_dense_tensors(flat, like)  # type: ignore[no-untyped-call]
                self._summed |= zip(members, views, strict=True)
            return self._summed[row]
        shape = self._parameter(row).shape
        if bucket >= 0 and any(self._part.rank in ring.devices for ring in self._part.rings[row]):
            return self._total_of_rings(row, bucket).view(shape)
        if row in self._sums:
            return self._sums[row].view(shape)
        pushed = self._pushed.get(row)
        if pushed:
            return pushed[0].wait().view(shape)
        return self._own_or_zeros(row)

    def _total_of_rings(self, row: int, bucket: int) -> Tensor:
        """A parameter's gradient as summed by the rings of this rank."""
        part = self._part
        pieces = []
        for ring in part.rings[row]:
            if part.rank not in ring.devices:
                continue
            flat = self._totals[bucket, ring.devices].wait()
            pieces.append(flat.narrow(0, *part.place_in_ring(row, ring)))
        return pieces[0] if len(pieces) == 1 else part.join_rings(row, pieces)

    def let_go(self, row: int) -> None:
        """Drop the gradient of a whole parameter that has been updated."""
        for known in (self.own, self._sums, self._pushed, self._summed):
            known.pop(row, None)
        bucket = self._part.bucket[row]
        if bucket < 0:
            return
        self._num_stepped[bucket] = self._num_stepped.get(bucket, 0) + 1
        if self._num_stepped[bucket] == len(self._part.bucket_members[bucket]):
            for ring in self._part.rings[row]:
                self._totals.pop((bucket, ring.devices), None)
                self._flat.pop((bucket, ring.devices), None)

    def let_go_slice(self, bucket: SlicedBucket) -> None:
        """Drop the gradients of a slice of parameters that has been updated."""
        pending = self._slices.pop(bucket.number)
        self._flat.pop((bucket.number, bucket.devices), None)
        self._scattered = [each for each in self._scattered if each is not pending]
        if self._last_scatter.get(bucket.devices) is pending:
            del self._last_scatter[bucket.devices]

    def wait_for_issued(self) -> None:
        """Wait for the communication of this step that has been issued."""
        pushed = (pending for row in self._pushed.values() for pending in row)
        rings = *self._parts.values(), *self._totals.values()
        for pending in (*self._slices.values(), *rings, *pushed):
            pending.wait()

    def _take_own(self, row: int) -> Tensor:
        """Take this rank's gradient out, because its bucket now has a copy."""
        gradient = self._own_or_zeros(row)
        self.own.pop(row, None)
        return gradient

    def _own_or_zeros(self, row: int) -> Tensor:
        gradient = self.own.get(row)
        return self._zeros(row) if gradient is None else _waited(gradient)

    def _zeros(self, row: int) -> Tensor:
        return torch.zeros_like(self._parameter(row), dtype=self._part.gradient_dtype(row))

    def _parameter(self, row: int) -> Tensor:
        return self._rank.parameters[self._part.graph.updates[row][1]]


def decoded(
    communicator: Communicator,
    into: Tensor,
    src: int,
    task: int,
    codec: MessageCodec | None,
) -> Pending:
    """Receive a tensor, or its message, which is decoded.

    Args:
        communicator: Receives the message.
        into: Tensor that it is written to.
        src: Rank that sends.
        task: The transfer.
        codec: Codec of the message, if it has one.
    """
    if codec is None:
        return communicator.receive(into, src, task)
    size = codec.message_bytes(into.numel(), into.element_size())
    message = torch.empty(size, dtype=torch.uint8, device=into.device)
    received = communicator.receive(message, src, task)

    def finish() -> Tensor:
        into.copy_(codec.decode(received.wait(), into.numel(), into.dtype).view(into.shape))
        return into

    return Pending(None, finish)


def _waited(gradient: Tensor | Pending) -> Tensor:
    return gradient.wait() if isinstance(gradient, Pending) else gradient
