"""Code that asks for values only to raise an error is captured, and asks when the step runs."""

import re
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from heterog.errors import CaptureError, HeterogWarning
from heterog.graph.batch_plan import batch_plan, micro_batches_refused
from heterog.graph.capture import CapturedStep, capture_step
from heterog.graph.op_costs import CHECK
from heterog.graph.workload import Workload
from tests.graph.questions import (
    Asking,
    Question,
    Trains,
    asks_a_list,
    asks_a_lists_question,
    asks_for_one_of_two,
    asserts_a_chain,
    asserts_a_maximum,
    asserts_absence,
    asserts_all_of_a_list,
    asserts_closeness,
    asserts_no_count,
    asserts_none,
    asserts_two_bounds,
    branches,
    calls_its_own,
    catches,
    chooses,
    computes_with_the_number,
    converts,
    goes_on_where_something_is_finite,
    keeps_the_answer,
    keeps_the_number,
    lets_torch_raise,
    loops,
    mends_what_is_not_finite,
    prints,
    raises_after_a_choice,
    raises_between_bounds,
    raises_if_not_all,
    raises_in_else,
    raises_on_any,
    raises_with_a_setting,
    raises_with_the_number,
    returns_early,
    tells_the_number,
    warns,
    warns_or_computes,
)


def step_of(question: Question) -> CapturedStep:
    batch = torch.ones(8, 3, dtype=torch.long), torch.zeros(8, 4, dtype=torch.float64)
    return capture_step(
        Workload(
            lambda: Asking(question), batch, functional.mse_loss, torch.optim.SGD, {"lr": 0.1}
        )
    )


QUESTIONS = (
    asserts_a_maximum,
    asserts_two_bounds,
    asserts_a_chain,
    asserts_no_count,
    asserts_none,
    asserts_all_of_a_list,
    asserts_absence,
    asserts_closeness,
    raises_on_any,
    raises_if_not_all,
    raises_in_else,
    raises_with_a_setting,
    lets_torch_raise,
    keeps_the_number,
    keeps_the_answer,
    raises_with_the_number,
)


def goes_on(run: Callable[[], object]) -> bool:
    try:
        run()
    except (AssertionError, RuntimeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_captured_step_raises_on_the_values_on_which_the_code_does(question: Question) -> None:
    """The slow reference is the code itself, asked about small integers of all kinds."""
    step = step_of(question)
    model = Asking(question)
    state = [*model.parameters()]
    target = torch.zeros(8, 4, dtype=torch.float64)
    torch.manual_seed(0)
    seen = set()
    for low, high in [(0, 10), (-2, 12), (1, 2), (0, 1), (0, 4), (3, 9), (8, 11), (0, 3)] * 3:
        x = torch.randint(low, high, (8, 3))
        wanted = goes_on(lambda x=x: question(x))  # type: ignore[misc]
        assert goes_on(lambda x=x: step.module(*state, x, target)) == wanted, x  # type: ignore[misc]
        seen.add(wanted)
    assert seen == {True, False}, "the question would not have been noticed"


@pytest.mark.parametrize("question", QUESTIONS)
def test_checks_are_made_on_each_part_of_the_batch_where_a_part_can_tell(
    question: Question,
) -> None:
    """Else every device would gather what is asked about, and there were no micro-batches."""
    graph = step_of(question).graph
    plan = batch_plan(graph)
    checks = [plan.needed[i][0].kind for i, op in enumerate(graph.ops) if op.kind == CHECK]
    of_the_whole = {"asserts_a_chain": 2, "raises_on_any": 1}.get(question.__name__, 0)
    assert checks.count("S") == len(checks) - of_the_whole
    assert len(checks) >= 1
    # What follows from the batch alone is known before the step.
    assert not micro_batches_refused(graph, 2)


def test_a_failed_check_names_the_line_that_asked() -> None:
    step = step_of(raises_if_not_all)
    x = torch.full((8, 3), 12)
    with pytest.raises(
        RuntimeError, match=r"questions.py:\d+ \(`if not .*\.all\(\): raise`\) does not"
    ):
        step.module(*Asking(raises_if_not_all).parameters(), x, torch.zeros(8, 4).double())


def test_a_branch_that_mends_what_is_not_finite_is_taken_for_one_that_raises() -> None:
    step = step_of(mends_what_is_not_finite)
    state = list(Asking(mends_what_is_not_finite).parameters())
    target = torch.zeros(8, 4, dtype=torch.float64)
    step.module(*state, torch.ones(8, 3).long(), target)
    with pytest.raises(
        RuntimeError, match=r"\(`if not torch.isfinite\(made\).all\(\):`\) does not"
    ):
        step.module(*state, torch.zeros(8, 3).long(), target)
    with pytest.raises(CaptureError, match="values decide there"):
        step_of(goes_on_where_something_is_finite)


def test_questions_about_activations_and_gradients_change_no_gradient() -> None:
    torch.manual_seed(0)
    model, x, y = Trains(), torch.randn(8, 3), torch.randn(8, 4)
    step = capture_step(
        Workload(lambda: model, (x, y), functional.mse_loss, torch.optim.SGD, {"lr": 0.1})
    )
    _, *gradients = step.module(*model.parameters(), x, y)
    torch.autograd.backward(functional.mse_loss(model(x), y))
    flat = torch.utils._pytree.tree_leaves(gradients)
    for gradient, parameter in zip(flat, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
    assert not micro_batches_refused(step.graph, 2)
    for bad, module in ((x, "assert not"), (torch.full_like(x, 1e9), "1000000.0")):
        wrong = bad.clone()
        wrong[5] = wrong[5] * (float("nan") if module == "assert not" else 1)
        with pytest.raises(RuntimeError, match=re.escape(module)):
            step.module(*model.parameters(), wrong, y)
    with pytest.raises(RuntimeError, match="isnan"):  # of the backward pass
        step.module(*model.parameters(), x, y * float("nan"))


@pytest.mark.parametrize("question", [prints, warns])
def test_what_only_says_something_is_left_out(question: Question) -> None:
    assert not any(op.kind == CHECK for op in step_of(question).graph.ops)


@pytest.mark.parametrize(
    ("question", "advice"),
    [
        (branches, "values decide there which ops run"),
        (warns_or_computes, "values decide there which ops run"),
        (calls_its_own, "values decide there which ops run"),
        (returns_early, "values decide there which ops run"),
        (loops, "values decide there which ops run"),
        (chooses, r"`if` on tensors there"),
        (catches, "an assert may stay if it asks tensors"),
        (asks_for_one_of_two, r"torch.logical_or instead of `or`"),
        (raises_between_bounds, "values decide there which ops run"),
        (converts, r"leave out int\(\)"),
        (computes_with_the_number, r"avoid \.item\(\)"),
        (tells_the_number, r"avoid \.item\(\)"),
        (asks_a_list, "an assert may stay"),
        (raises_after_a_choice, "values decide there which ops run"),
    ],
)
def test_a_question_that_may_change_the_step_is_refused(question: Question, advice: str) -> None:
    with pytest.raises(CaptureError, match=advice) as caught:
        step_of(question)
    assert "depends on tensor values" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_question_of_a_library_below_is_left_to_torch() -> None:
    """Who asks is a function that the user calls: what it does with the answer is not known."""

    with pytest.raises(CaptureError, match="depends on tensor values"):
        step_of(asks_a_lists_question)


def test_layers_that_are_never_left_out_ask_nothing() -> None:
    def left_out(rate: float) -> Question:
        def question(x: torch.Tensor) -> None:
            if torch.rand([]) < rate:
                x.add_(1)

        return question

    kinds = [op.kind for op in step_of(left_out(0.0)).graph.ops]
    assert "add_.Tensor" not in kinds
    assert CHECK not in kinds
    with pytest.warns(HeterogWarning, match="writes to a tensor of its batch"):
        step_of(left_out(1.0))
    with pytest.raises(CaptureError, match="no LayerDrop"):
        step_of(left_out(0.1))
