"""What Python keeps between steps is refused where the step reads it, and only there."""

import datetime
import functools
import itertools
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from heterog.errors import CaptureError
from heterog.graph.capture import capture, capture_step
from heterog.graph.workload import Workload

STEP = 0
START = time.time()
TABLE = {"weight": 1.0}


class Kept(nn.Module):
    """A layer that is given a factor, or other ops, by a function of the module."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.function(self, x)
        made: Tensor = self.layer(x) * (1.0 if factor is None else factor)
        return made


def step_of(model: Callable[[], nn.Module] | nn.Module, loss: Any = None) -> Workload:
    batch = (torch.randn(6, 4), torch.randn(6, 4))
    return Workload(model, batch, loss or nn.functional.mse_loss, torch.optim.SGD, {"lr": 0.1})


def counted(m: Any) -> int:
    m.k += 1
    return int(m.k)


def anneal(m: Any, _: Tensor) -> float:
    return min(1.0, counted(m) / 5)


def begin_late(m: Any, _: Tensor) -> float:
    return 1.0 if counted(m) > 1_000 else 0.5


def every_hundredth(m: Any, _: Tensor) -> float:
    return 2.0 if counted(m) % 100 == 0 else 1.0


def in_one_step(m: Any, _: Tensor) -> float:
    return 2.0 if counted(m) == 900 else 1.0


def in_a_stated_step(m: Any, _: Tensor) -> float:
    m.k += 1
    return 2.0 if m.k == m.begin else 1.0


def lazy(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "first"):
        m.register_buffer("first", x.mean().detach())
    return m.first  # type: ignore[no-any-return]


def first_only(m: Any, _: Tensor) -> float:
    first, m.is_first = m.is_first, False
    return 2.0 if first else 1.0


def cool(m: Any, _: Tensor) -> float:
    m.tau *= 0.99
    return float(m.tau)


def global_step(_m: Any, _: Tensor) -> float:
    global STEP
    STEP += 1
    return 1.0 / STEP


def global_table(_m: Any, _: Tensor) -> float:
    TABLE["weight"] *= 0.5
    return TABLE["weight"]


def history(m: Any, _: Tensor) -> float:
    m.history.append(len(m.history))
    return float(sum(m.history))


def long_history(m: Any, _: Tensor) -> float:
    m.history.append(1.0)
    return 2.0 if len(m.history) > 100 else 1.0


def tensor_average(m: Any, x: Tensor) -> Tensor:
    m.average = 0.9 * m.average + 0.1 * x.mean().detach()
    return m.average  # type: ignore[no-any-return]


def tensor_in_place(m: Any, _: Tensor) -> Tensor:
    m.count += 1
    return 1 / m.count  # type: ignore[no-any-return]


def next_of_cycle(m: Any, _: Tensor) -> float:
    return float(next(m.turns))


def clock(_m: Any, _: Tensor) -> float:
    return time.time()


def class_attribute(m: Any, _: Tensor) -> float:
    Counting.calls += 1
    return float(Counting.calls)


class Counting(Kept):
    calls = 0


class Schedule:
    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step = 0

    def __call__(self) -> float:
        self.step += 1
        return 0.9**self.step


def closure() -> Callable[[Any, Tensor], float]:
    calls = 0

    def count(_m: Any, _: Tensor) -> float:
        nonlocal calls
        calls += 1
        return float(calls)

    return count


def endless() -> Iterator[int]:
    yield from itertools.count(1)


def drop(draw: Callable[[Any], float], p: float = 0.1) -> Callable[[Any, Tensor], float]:
    return lambda m, x: 0.0 if draw(m) < p else 1.0


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "counter": (lambda: Kept(anneal, k=0), "'k' of the model (0, then 1)"),
    "warm-up": (lambda: Kept(begin_late, k=0), "'k' of the model"),
    "now and then": (lambda: Kept(every_hundredth, k=0), "'k' of the model"),
    "one step": (lambda: Kept(in_one_step, k=0), "'k' of the model (0, then 899)"),
    "stated step": (lambda: Kept(in_a_stated_step, k=0, begin=7), "'k' of the model (0, then 6)"),
    "lazy buffer": (lambda: Kept(lazy), "'first' of the model"),
    "first call": (lambda: Kept(first_only, is_first=True), "'is_first' of the model"),
    "temperature": (lambda: Kept(cool, tau=1.0), "'tau' of the model (1.0, then 0.99)"),
    "global": (lambda: Kept(global_step), "global 'STEP'"),
    "global dict": (lambda: Kept(global_table), "global 'TABLE'"),
    "class attribute": (lambda: Counting(class_attribute), "'calls' of class Counting"),
    "deque": (lambda: Kept(history, history=deque([1], maxlen=9)), "'history' of the model"),
    "long list": (lambda: Kept(long_history, history=[]), "'history' of the model"),
    "tensor": (lambda: Kept(tensor_average, average=torch.ones(())), "'average' of the model"),
    "tensor in place": (lambda: Kept(tensor_in_place, count=torch.ones(())), "'count' of the"),
    "cycle": (lambda: Kept(next_of_cycle, turns=itertools.cycle([1, 2, 3])), "'turns' of the"),
    "generator": (lambda: Kept(next_of_cycle, turns=endless()), "'turns' of the model"),
    "clock": (lambda: Kept(clock), "'time' in clock"),
    "object": (lambda: Kept(lambda m, x: m.plan(), plan=Schedule()), "'step' of 'plan'"),
    "closure": (lambda: Kept(closure()), "variable 'calls' around"),
    "partial": (
        lambda: Kept(lambda m, x: m.of({}), of=functools.partial(history_of, [])),
        "'of' of the model",
    ),
    "layer drop": (lambda: Kept(drop(lambda m: random.random(), 0.07)), "Python's random"),
    "layer kept": (lambda: Kept(drop(lambda m: random.random(), 0.93)), "Python's random"),
    "numpy": (lambda: Kept(drop(lambda m: np.random.rand(), 0.07)), "numpy.random"),  # noqa: NPY002
    "own random": (lambda: Kept(drop(lambda m: m.r.random(), 0.07), r=random.Random(3)), "'r' of"),
    "own numpy": (
        lambda: Kept(drop(lambda m: m.r.random(), 0.07), r=np.random.default_rng(3)), "'r' of"
    ),
}  # fmt: skip


def history_of(given: list[int], _: Any) -> float:
    given.append(1)
    return float(len(given))


@pytest.mark.parametrize("name", REFUSED)
def test_what_decides_a_step_and_changes_is_named(name: str) -> None:
    model, text = REFUSED[name]
    with pytest.raises(CaptureError, match="something else when it is called again") as refusal:
        capture(step_of(model))
    assert text in str(refusal.value)


def log_only(m: Any, x: Tensor) -> None:
    m.k += 1
    m.seen.append(x.mean().detach())
    m.last = x.detach()
    m.when = time.time()
    if random.random() < 0.5:
        m.lucky = True


def cached(m: Any, x: Tensor) -> Tensor:
    if m.length < x.shape[0]:
        m.length = x.shape[0]
        m.table = torch.arange(m.length, dtype=x.dtype)[:, None].cos()
    return m.table[: x.shape[0]]  # type: ignore[no-any-return]


def largest(m: Any, x: Tensor) -> float:
    m.largest = max(m.largest, x.shape[0])
    return float(m.largest)


def numbered_layers(m: Any, _: Tensor) -> float:
    m.number = 0
    for _each in range(3):
        m.number += 1
    return float(m.number)


def buffer(m: Any, x: Tensor) -> Tensor:
    m.count += 1
    m.average.lerp_(x.mean().detach(), 0.1)
    return m.average / m.count  # type: ignore[no-any-return]


def drawn_by_torch(_m: Any, x: Tensor) -> Tensor:
    return torch.where(torch.rand(()) < 0.1, 0.0, torch.ones_like(x))


def scratch(m: Any, x: Tensor) -> Tensor:
    m.scratch.copy_(x.detach()).mul_(2.0)
    return m.scratch.sum()  # type: ignore[no-any-return]


def rotating(m: Any, _: Tensor) -> float:
    m.turn = (m.turn + 1) % 3
    return (1.0, 1.0, 1.0)[int(m.turn)]


def with_buffers() -> nn.Module:
    made = Kept(buffer)
    made.register_buffer("count", torch.zeros(()))
    made.register_buffer("average", torch.ones(()))
    return made


ALLOWED: dict[str, Callable[[], nn.Module]] = {
    "a log": lambda: Kept(log_only, k=0, seen=[], last=None),
    "a cache": lambda: Kept(cached, length=0),
    "a maximum": lambda: Kept(largest, largest=0),
    "a number of layers": lambda: Kept(numbered_layers, number=7),
    "buffers": with_buffers,
    "draws of torch": lambda: Kept(drawn_by_torch),
    "turns that do the same": lambda: Kept(rotating, turn=0),
    "its own random state, unread": lambda: Kept(
        lambda m, x: m.r.shuffle([1]), r=random.Random(1)
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_changes_and_decides_nothing_is_allowed_and_left_as_it_was(name: str) -> None:
    model = ALLOWED[name]()
    before = {key: value for key, value in vars(model).items() if not key.startswith("_")}
    lists = {key: list(value) for key, value in before.items() if isinstance(value, list)}
    state = random.getstate()
    capture(step_of(model))
    assert random.getstate() == state
    after = {key: value for key, value in vars(model).items() if not key.startswith("_")}
    assert after.keys() == before.keys()
    assert all(after[key] is value for key, value in before.items())
    assert all(after[key] == value for key, value in lists.items())


def test_a_tensor_that_is_written_in_place_has_to_be_a_buffer() -> None:
    with pytest.raises(CaptureError, match="writes in place to 'scratch' of the model, a tensor"):
        capture(step_of(lambda: Kept(scratch, scratch=torch.zeros(6, 4))))
    buffered = Kept(scratch)
    buffered.register_buffer("scratch", torch.zeros(6, 4))
    capture(step_of(buffered))


def frozen_later(m: Any, _: Tensor) -> None:
    m.layer.weight.requires_grad_(counted(m) < 3)


def trained_later(m: Any, _: Tensor) -> None:
    m.other.weight.requires_grad_(counted(m) > 2)


def swapped_data(m: Any, _: Tensor) -> None:
    m.other.weight.data = 0.9 * m.other.weight.data


def swapped_modules(m: Any, _: Tensor) -> None:
    m.layer, m.other = m.other, m.layer


def swapped_activation(m: Any, x: Tensor) -> Tensor:
    m.act = nn.Tanh() if isinstance(m.act, nn.ReLU) else nn.ReLU()
    return m.act(x)[:, :1]  # type: ignore[no-any-return]


def growing(m: Any, x: Tensor) -> None:
    m.kept = torch.cat([m.kept, x.mean()[None].detach()])


def drawn_apart(m: Any, x: Tensor) -> Tensor:
    return torch.rand((), generator=m.draws) * x.mean()


def seeded(_m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return torch.rand_like(x)


def seeded_behind(_m: Any, _: Tensor) -> None:
    torch.default_generator.manual_seed(0)


def forked(_m: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return nn.functional.dropout(x)


def drawn_twice(_m: Any, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    first = torch.rand_like(x)
    torch.set_rng_state(state)
    return first + torch.rand_like(x)


def seeded_backward(m: Any, x: Tensor) -> Tensor:
    made: Tensor = x * m.layer.weight.mean()
    made.register_hook(lambda gradient: torch.manual_seed(0) and gradient)  # type: ignore[no-untyped-call]
    return made


def hooked(m: Any, _: Tensor) -> None:
    m.layer.weight.register_hook(lambda gradient: gradient / 2)


def hooked_behind(m: Any, _: Tensor) -> None:
    m.layer.weight.register_post_accumulate_grad_hook(lambda _: None)


def without_answer(_m: Any, x: Tensor) -> float:
    try:
        return float(x.mean())
    except RuntimeError:
        return 1.0


_OF_SEEDS = "sets the state of torch's random numbers (torch.manual_seed,"


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (seeded, _OF_SEEDS),
        (seeded_behind, _OF_SEEDS),
        (forked, _OF_SEEDS),
        (drawn_twice, _OF_SEEDS),
        (seeded_backward, "seen at the end of its backward pass"),
        (hooked, "registers one more hook of 'layer.weight'"),
        (hooked_behind, "'layer.weight' has a hook that runs after its gradient"),
        (without_answer, "depends on tensor values at"),
        (frozen_later, "sets requires_grad of 'layer.weight' to False, and all steps"),
        (trained_later, "sets requires_grad of 'other.weight' to True, and all steps"),
        (swapped_modules, "float32 of (4, 4) in the place of 'layer.weight' (float32 of (4, 4))"),
        (swapped_activation, "'act' of the model decides that"),
        (swapped_data, "puts other memory (.data = ...) in the place of 'other.weight'"),
        (growing, "puts float32 of (2,) in the place of 'kept' (float32 of (1,))"),
        (drawn_apart, "draws from a torch.Generator of its own"),
    ],
)
def test_other_ways_to_keep_something_are_refused_by_name(
    forward: Callable[[Any, Tensor], Any], text: str
) -> None:
    def made() -> nn.Module:
        model = Kept(forward, k=0, draws=torch.Generator(), act=nn.ReLU())
        model.other.requires_grad_(requires_grad=False)
        model.register_buffer("kept", torch.zeros(1))
        return model

    with pytest.raises(CaptureError) as refusal:
        capture(step_of(made))
    assert text in str(refusal.value)


def test_seeds_are_watched_without_leaving_a_trace() -> None:
    drawing, seeding = (step_of(lambda: Kept(drawn_by_torch)), step_of(lambda: Kept(seeded)))
    state = torch.get_rng_state()
    capture(drawing)
    with pytest.raises(CaptureError):
        capture(seeding)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_table_in_the_place_of_a_buffer_is_allowed() -> None:
    def longer(m: Any, x: Tensor) -> Tensor:
        if len(m.kept) < len(x):
            m.kept = torch.arange(len(x), dtype=x.dtype)
        return m.kept[: len(x), None]  # type: ignore[no-any-return]

    model = Kept(longer)
    model.register_buffer("kept", torch.zeros(1))
    capture(step_of(model))


def test_tensors_in_plain_attributes_have_their_values() -> None:
    def scaled(*, converted: bool) -> nn.Module:
        model = Kept(lambda m, x: m.scale.to(x.dtype), scale=torch.tensor([3.0, 4.0, 5.0, 6.0]))
        return model.double() if converted else model

    for converted in (False, True):
        dtype = torch.float64 if converted else torch.float32
        batch = (torch.randn(6, 4, dtype=dtype), torch.randn(6, 4, dtype=dtype))
        made = replace(step_of(lambda: scaled(converted=converted)), example_batch=batch)  # noqa: B023
        step = capture_step(made)
        constants = [node.target for node in step.module.graph.nodes if node.op == "get_attr"]
        values = [getattr(step.module, str(name)) for name in constants]
        assert all(value.tolist() == [3.0, 4.0, 5.0, 6.0] for value in values)
        assert values


@functools.singledispatch
def _kind_of(_: object) -> str:
    return "other"


_kind_of.register(Tensor, lambda _: "tensor")
_kind_of.register(nn.Parameter, lambda _: "parameter")


OTHER_MEMORY = torch.ones(4)


@pytest.mark.parametrize(
    "holds",
    [
        lambda m, x: type(x) is Tensor and x.__class__ == Tensor,
        lambda m, _: type(m.layer.weight) is nn.Parameter,
        lambda m, x: isinstance(type(m), type) and type("New", (), {}) is not type(x),
        lambda m, x: {"Tensor": True, "Parameter": False}[type(x * 2).__name__],
        lambda _, x: (x + 1).data_ptr() != x.data_ptr() == x.view(-1).data_ptr(),
        lambda m, x: m.layer.weight.data_ptr() not in (m.other.weight.data_ptr(), 0),
        lambda _, x: x[1].data_ptr() - x.data_ptr() == 4 * x.element_size(),
        lambda _, x: x.untyped_storage().data_ptr() != (x + 1).untyped_storage().data_ptr(),
        lambda *_: OTHER_MEMORY.untyped_storage().data_ptr() == OTHER_MEMORY.data_ptr(),
        lambda _, x: _kind_of(x) == "tensor" and _kind_of(nn.Parameter(x)) == "parameter",
    ],
)
def test_code_that_asks_what_a_tensor_is_goes_the_way_of_training(
    holds: Callable[[Any, Tensor], bool],
) -> None:
    def checked(m: Any, x: Tensor) -> float:
        assert holds(m, x)
        return 1.0

    model = Kept(checked)
    assert holds(model, torch.randn(6, 4))
    capture(step_of(model))
    assert "type" not in globals()


def normalized_weight(m: Any, x: Tensor) -> Tensor:
    if m.version != m.layer.weight._version:
        m.version, m.kept = m.layer.weight._version, m.layer.weight.norm()
    return m.kept + x.mean()  # type: ignore[no-any-return]


def test_a_cache_by_the_version_of_a_weight_is_a_step_that_can_be_captured() -> None:
    capture(step_of(lambda: Kept(normalized_weight, version=-1, kept=None)))


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (lambda m, _: 1.0 + m.layer.weight._version, "'_version' in <lambda> decides"),
        (lambda m, _: 1.0 if m.layer.weight._version < 1_000 else 2.0, "'_version' in"),
        (lambda m, _: 1.0 if time.time() < START + 3_600 else 2.0, "'time' in"),
        (lambda m, _: 1.0 if datetime.datetime.now().year < 2_030 else 2.0, "'now' in"),
        (lambda m, _: step_of_environment(), "environ"),
    ],
)
def test_what_tells_the_number_of_a_step_is_named(
    forward: Callable[[Any, Tensor], float], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CALLS", "0")
    with pytest.raises(CaptureError) as refusal:
        capture(step_of(lambda: Kept(forward)))
    assert text in str(refusal.value)


def step_of_environment() -> float:
    os.environ["CALLS"] = str(int(os.environ["CALLS"]) + 1)
    return 1.0 if int(os.environ["CALLS"]) < 3 else 2.0


def test_a_clock_that_decides_nothing_may_be_read() -> None:
    def timed(m: Any, x: Tensor) -> Tensor:
        begin = time.perf_counter()
        made = x.mean()
        m.took = time.perf_counter() - begin
        return made

    before = time.time, datetime.datetime
    capture(step_of(lambda: Kept(timed, took=0.0)))
    assert before == (time.time, datetime.datetime)


def test_a_loss_that_counts_is_named_too() -> None:
    class Loss(nn.Module):
        calls = 0

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.calls += 1
            made: Tensor = nn.functional.mse_loss(output, target) / self.calls
            return made

    with pytest.raises(CaptureError, match="'calls' of the loss"):
        capture(step_of(lambda: nn.Linear(4, 4), loss=Loss()))


def test_what_only_the_backward_pass_reads_counts() -> None:
    def scaled(m: Any, x: Tensor) -> Tensor:
        m.k += 1
        factor = x.mean() * m.layer.weight.mean()
        factor.register_hook(lambda gradient: gradient / m.k)
        return factor  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match="'k' of the model"):
        capture(step_of(lambda: Kept(scaled, k=0)))


class Mute(Exception):
    """An error that fails to say what it is."""

    def __str__(self) -> str:
        raise ValueError("no text")


def test_an_error_without_words_is_one_line() -> None:
    def fail(_m: Any, _: Tensor) -> float:
        raise Mute

    with pytest.raises(CaptureError, match=r"fails in the root module at .*: Mute: "):
        capture(step_of(Kept(fail)))
