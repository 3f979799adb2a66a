"""A run that saves while it is not settled, and what goes on from its checkpoint."""

from heterog.errors import StrategyError
from heterog.planners.plan import load_plan
from heterog.runtime.checkpoint import load_checkpoint, save_checkpoint
from heterog.runtime.deploy import deploy
from tests.runtime.cases import batch_of, workload_of


def interrupted_after(
    cut: int, num_steps: int, path: str, again_path: str, folder: str
) -> tuple[str, object, object]:
    """Train an MLP, save it after ``cut`` steps, and go on with it and with the checkpoint.

    Returns:
        Why it could not be saved before it had settled, its state, and that of the resumed one.
    """
    workload = workload_of("mlp", "AdamW")
    first = deploy(workload, load_plan(path))
    refused = ""
    for number in range(cut):
        first(batch_of("mlp", number))
    try:
        save_checkpoint(first, folder)
    except StrategyError as error:
        refused = str(error)
    first.settle()
    save_checkpoint(first, folder)
    again = deploy(workload, load_plan(again_path))
    load_checkpoint(again, folder)
    for step in (first, again):
        for number in range(cut, num_steps):
            step(batch_of("mlp", number))
        step.settle()
    found = first.state_dict(), again.state_dict()
    first.close()
    again.close()
    return refused, *found
