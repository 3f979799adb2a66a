"""How long each device computes in a step, predicted or measured."""

import numpy as np

from heterog.strategy.program import FIRST_LINK_KIND, FloatArray, Program


def device_seconds(program: Program, start_s: FloatArray, finish_s: FloatArray) -> list[float]:
    """Sum the seconds of all compute tasks on each device.

    Args:
        program: The program of the step.
        start_s: Start of each task; not a number where it is unknown.
        finish_s: End of each task; not a number where it is unknown.
    """
    computes = program.kind < FIRST_LINK_KIND
    seconds = np.nan_to_num(finish_s - start_s)
    return [
        float(seconds[computes & (program.device == device)].sum())
        for device in range(program.num_devices)
    ]
