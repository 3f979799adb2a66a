"""A plan without the devices that it leaves idle, so that no job reserves them."""

from dataclasses import replace

from heterog.explain.decided import Lowered
from heterog.explain.wording import types_in_words
from heterog.lowering import lower
from heterog.methods.planner import Candidate
from heterog.search.cheapest import on_part
from heterog.search.issue_order import IssuedSteps
from heterog.search.plan import Plan
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator


def on_used_devices(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The plan on a cluster without idle devices, and remarks on what is not reserved.

    Nothing runs on them and nothing crosses their links, so that the step stays as it is. Idle
    devices of a host with several types stay: a launcher counts the devices of a host, and would
    give the plan others. So do those of a plan with a background job, or with a mode that trains
    otherwise than one device, which may name devices.
    """
    cluster = plan.cluster
    if plan.background is not None or plan.strategy.modes:
        return plan, ()
    program = lower(plan.graph, cluster, plan.strategy, num_steps=1)
    idle = set(Lowered(program, plan.strategy, plan.graph).idle)
    for host in range(cluster.num_hosts):
        members = set(cluster.host_devices(host))
        if not members <= idle and len({cluster.devices[each].type for each in members}) > 1:
            idle -= members
    if not idle:
        return plan, ()
    left = [device for device in range(cluster.num_devices) if device not in idle]
    part = cluster.part(left)
    strategy = on_part(plan.strategy, cluster, left, part)
    candidate = Candidate(strategy=strategy, orders=(Order[plan.order.upper()],))
    step = IssuedSteps(Evaluator(plan.graph, part)).of(candidate)
    assert step is not None, "it was written on more devices"

    def peaks(found: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(found[device] for device in left) if found else ()

    rows = [
        replace(row, peak_memory_bytes=peaks(row.peak_memory_bytes), candidate=None)
        for row in plan.rows
    ]
    smaller = replace(
        plan,
        cluster=part,
        strategy=strategy,
        task_order=step.task_order,
        sent_before=step.sent_before,
        program_hash=step.program.hash,
        peak_memory_bytes=peaks(plan.peak_memory_bytes),
        rows=tuple(rows),
    )
    unused = types_in_words(cluster, idle)
    return smaller, (f"Devices without work: {unused} not used by the plan, and not reserved.",)
