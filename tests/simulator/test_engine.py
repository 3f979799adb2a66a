"""The engine against a slow reference, and against answers by hand."""

from random import Random

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from tests.simulator import builders, reference


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_engine_like_reference(seed: int) -> None:
    rng = Random(seed)
    graph, cluster = builders.random_graph(rng), builders.random_cluster(rng)
    strategy = builders.random_strategy(rng, graph, cluster)
    order = rng.choice(list(Order))
    evaluator = Evaluator(graph, cluster)
    choice = evaluator.encode(strategy)
    if not strategy.step_barrier:
        choice = choice._replace(num_steps=rng.randint(2, 3))
    program, start, finish = evaluator.schedule(choice, order)
    tasks = reference.price(program, graph, cluster, evaluator.cost_model)
    reference.assert_legal(tasks, start, finish)
    slow_start, slow_finish = reference.simulate(tasks, order)
    np.testing.assert_allclose(start, slow_start, rtol=1e-9, atol=0)
    np.testing.assert_allclose(finish, slow_finish, rtol=1e-9, atol=0)
    step_s, peak = evaluator.simulate(choice, order)
    assert step_s == max(finish) / choice.num_steps
    np.testing.assert_allclose(peak, reference.memory(program, start, finish), rtol=1e-9)
    program, fair_start, fair_finish = evaluator.referee_schedule(choice, order)
    reference.assert_legal(tasks, fair_start, fair_finish)
    slow_start, slow_finish = reference.replay(tasks, list(start))
    np.testing.assert_allclose(fair_start, slow_start, rtol=1e-9, atol=0)
    np.testing.assert_allclose(fair_finish, slow_finish, rtol=1e-9, atol=0)
