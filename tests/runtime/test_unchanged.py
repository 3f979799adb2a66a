"""What is changed on a deployed model, and what loops do change: obeyed, or one clear error."""

import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

from heterog.errors import HeterogWarning, StrategyError
from heterog.graph.capture import capture_step
from heterog.graph.grouping import group_ops
from heterog.graph.workload import Workload
from heterog.runtime.deploy import DeployedStep, deploy
from heterog.runtime.step.deploy_checks import Unchanged
from heterog.search.plan import load_plan
from heterog.strategy.strategy import Decision
from tests.runtime.cases import batch_of, captured_once, workload_of
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import SYNCS, ZERO, graph_of, plan_of, strategy_of


def freeze(step: DeployedStep) -> None:
    next(step.model.parameters()).requires_grad_(False)


def tie(step: DeployedStep) -> None:
    modules = [each for each in step.model.modules() if isinstance(each, nn.Linear)]
    modules[1].bias = nn.Parameter(modules[1].bias.detach().clone())


def evaluate(step: DeployedStep) -> None:
    step.model.eval()


def add_hook(step: DeployedStep) -> None:
    step.model.register_forward_hook(lambda module, inputs, output: output * 2)


def add_forward(step: DeployedStep) -> None:
    step.model.forward = lambda x: x * 2


def assign(step: DeployedStep) -> None:
    for value in step.model.parameters():
        value.data = value.data / 2


def evaluate_and_train(step: DeployedStep) -> None:
    step.model.eval().train()


def add_group(step: DeployedStep) -> None:
    step.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def add_step_hook(step: DeployedStep) -> None:
    step.optimizer.register_step_pre_hook(lambda *_: None)


def add_hook_of_all(step: DeployedStep) -> None:
    register_optimizer_step_post_hook(lambda *_: None)


def step_again(step: DeployedStep) -> None:
    step.optimizer.step()


def call(step: DeployedStep) -> None:
    with torch.no_grad():
        step.model(batch_of("mlp", 0)[0])


def slow_down(step: DeployedStep) -> None:
    for group in step.optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.01, 0.1


def cast(step: DeployedStep) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        step(batch_of("mlp", 1))


def infer(step: DeployedStep) -> None:
    with torch.inference_mode():
        step(batch_of("mlp", 1))


CHANGES: dict[Callable[[DeployedStep], None], str] = {
    freeze: "'0.weight' has requires_grad=False now, which this step does not know. The step was",
    tie: "'2.bias' is another parameter now, or gone",
    evaluate: r"module '\(root\)' is in eval\(\) mode now, but .* call train\(\) on it before",
    add_group: "the optimizer has 2 parameter groups now, 1 when the plan was deployed",
    add_hook: r"a forward hook of module '\(root\)' was registered after the step was captured",
    add_forward: r"'forward' of the model has changed since .*\(register_buffer\)",
    add_step_hook: "a hook of its steps, .* not for all of them. Clip to a norm of all with max_",
    add_hook_of_all: "a hook of its steps, .* several times a step, .* count steps by num_steps",
    step_again: r"no parameter has a gradient, .* Leave optimizer.step\(\) out; to clip,",
    assign: r"'0.weight' has other memory now \(.data = ...\), which this step does not read",
    call: "this rank holds a part of the model, .* Load step.state_dict",
    cast: r"under torch.autocast or in inference mode, .* open autocast in the model's forward",
    infer: r"in inference mode, which change what its ops compute\. Call it outside",
    evaluate_and_train: "",
    slow_down: "",
}


def trained(rank: int, path: str, number: int) -> dict[str, torch.Tensor] | str | None:
    with captured_once("mlp"):
        step = deploy(workload_of("mlp"), load_plan(path))
    step(batch_of("mlp", 0))
    try:
        with warnings.catch_warnings(action="error", category=HeterogWarning):
            list(CHANGES)[number](step)
            step(batch_of("mlp", 1))
    except (StrategyError, HeterogWarning) as error:
        return str(error)
    finally:
        _global_optimizer_post_hooks.clear()
    state = step.state_dict()
    step.close()
    return state


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "change"),
    [*product(("ring", "zero3"), CHANGES), ("stages", assign)],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_changes_are_obeyed_or_refused(
    ranks: Ranks, tmp_path: Path, case: str, change: Callable[[DeployedStep], None]
) -> None:
    graph = graph_of("mlp")
    decisions = [
        (SYNCS | ZERO).get(case, Decision(devices=(number % 3,), shares=(8,)))
        for number in range(group_ops(graph).num_groups)
    ]
    path = tmp_path / "plan.json"
    plan_of(graph, strategy_of(graph, decisions)).save(path)
    said = ranks.run(trained, str(path), list(CHANGES).index(change))
    text = CHANGES[change]
    if text and not (change in (call, assign) and case != "zero3"):  # parameters are whole there
        for each in said:
            with pytest.raises(StrategyError, match=text):
                raise StrategyError(each)
        return
    model = workload_of("mlp").make_model()
    stepper = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        if step and change in (assign, slow_down):
            change(SimpleNamespace(model=model, optimizer=stepper))  # type: ignore[arg-type]
        stepper.zero_grad()
        torch.autograd.backward(workload_of("mlp").step_loss(model, batch_of("mlp", step)))
        stepper.step()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(said[0][key], value, rtol=1e-4, atol=1e-6)


class Averaged(nn.Module):
    """A student, a frozen teacher, and an average that no op reads."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher, self.average = (nn.Parameter(torch.ones(3)) for _ in range(3))
        self.teacher.requires_grad_(False)
        self.average.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * self.student - x * self.teacher) ** 2).mean()


def test_only_frozen_parameters_that_are_read_keep_their_memory() -> None:
    workload = Workload(
        model=Averaged, loss=None, example_batch=(torch.ones(8, 3),), optimizer=torch.optim.SGD
    )
    model = Averaged()
    optimizer = torch.optim.SGD([model.student], lr=0.1)
    unchanged = Unchanged(workload, model, optimizer, capture_step(workload), sliced=[])
    for value in (model.student, model.average):
        value.data = value.data / 2
    unchanged.check()
    model.teacher.data = model.teacher.data / 2
    with pytest.raises(StrategyError, match="'teacher' has other memory now"):
        unchanged.check()
