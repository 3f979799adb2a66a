"""A run that saves while it is not settled, and what goes on from its checkpoint."""

from heterog.errors import StrategyError
from heterog.runtime.checkpoint import load_checkpoint, save_checkpoint
from heterog.runtime.deploy import DeployedStep, deploy
from heterog.search.plan import load_plan
from tests.runtime.cases import batch_of, workload_of


def save_settled(step: DeployedStep, folder: str) -> str:
    """Save a step, once it has settled; returns why it could not be saved before, if so."""
    try:
        save_checkpoint(step, folder)
    except StrategyError as error:
        step.settle()
        save_checkpoint(step, folder)
        return str(error)
    return ""


def interrupted_after(
    cut: int, num_steps: int, path: str, again_path: str, folder: str
) -> tuple[str, object, object]:
    """Train an MLP, save it after ``cut`` steps, and go on with it and with the checkpoint.

    Returns:
        Why it could not be saved before it had settled, its state, and that of the resumed one.
    """
    workload = workload_of("mlp", "AdamW")
    first = deploy(workload, load_plan(path))
    for number in range(cut):
        first(batch_of("mlp", number))
    refused = save_settled(first, folder)
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
