"""The seconds of every task of a program, before any waits for another."""

from heterog.lowering.kernels import helper, kernel
from heterog.lowering.program import FIRST_LINK_KIND, LAST_OP_KIND, FloatArray, TaskKind
from heterog.lowering.tape import NUM_TASKS, Tape
from heterog.pricing.cost_model import ChannelPrices, Prices


@helper
def latency_of(channels: ChannelPrices, channel: int, payload: float) -> float:
    """Seconds of an operation before its bytes move at full rate; see ``ChannelSeconds``."""
    fill: float = payload * channels.fill_s_per_byte[channel]
    latency: float = channels.latency_s[channel]
    return latency + min(fill, float(channels.fill_s[channel]))


@kernel
def price_kernel(tape: Tape, prices: Prices, seconds: FloatArray) -> None:
    """Compute the seconds of every task on a tape."""
    for number in range(tape.counts[NUM_TASKS]):
        task = tape.tasks[number]
        if task.kind >= FIRST_LINK_KIND:
            channel = task.channel
            seconds[number] = (
                latency_of(prices.channels, channel, task.num_bytes)
                + task.num_bytes * prices.channels.s_per_byte[channel]
            )
            continue
        device_type = prices.type_of_device[task.device]
        if task.kind <= LAST_OP_KIND:
            # A remade op has no entry in the row: its work depends only on the samples.
            if prices.has_rule[task.subject] and task.kind != TaskKind.REMAKE:
                row = prices.ruled_row[task.subject]
                work = prices.ruled_number[row, task.micro, task.device]
                seconds[number] = prices.ruled_seconds[work, task.subject]
            else:
                seconds[number] = prices.op_seconds[device_type, task.samples, task.subject]
        elif task.kind == TaskKind.UPDATE:
            whole = prices.update_seconds[device_type, task.subject]
            if task.num_bytes > 0.0:  # the update of a slice
                whole *= task.num_bytes / prices.parameter_bytes[task.subject]
            seconds[number] = whole
        else:
            seconds[number] = (
                prices.copy_fixed_s[device_type]
                + task.num_bytes * prices.copy_s_per_byte[device_type]
            )
