"""The table of methods: what each does, for help texts and shell completion, and where it is made.

This module imports no planner, because planners import numba.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodNote:
    """A method in one line.

    Attributes:
        name: Name that users type.
        stage: ``"baseline"``, ``"search"``, ``"zero_shot"``, or ``"all"`` for ``auto``.
        what: Sentence about what it does.
        needs: Input beyond a graph and a cluster, or a limitation.
        made_by: ``module:name`` in ``heterog.methods`` that makes the method; empty for ``auto``
            and for methods that need a policy.
    """

    name: str
    stage: str
    what: str
    needs: str = ""
    made_by: str = ""


_EVEN = "even shares"
_BY_SPEED = "shares in proportion to speed"

METHODS = (
    MethodNote(
        name="auto",
        stage="all",
        what="runs all the others and picks the best",
        needs="a budget, which its searches share",
    ),
    MethodNote(
        name="ev_ps",
        made_by="data_parallel:EV_PS",
        stage="baseline",
        what=f"data parallelism, {_EVEN}, parameter servers",
    ),
    MethodNote(
        name="ev_ar",
        made_by="data_parallel:EV_AR",
        stage="baseline",
        what=f"data parallelism, {_EVEN}, all-reduce",
    ),
    MethodNote(
        name="cp_ps",
        made_by="data_parallel:CP_PS",
        stage="baseline",
        what=f"data parallelism, {_BY_SPEED}, parameter servers",
    ),
    MethodNote(
        name="cp_ar",
        made_by="data_parallel:CP_AR",
        stage="baseline",
        what=f"data parallelism, {_BY_SPEED}, all-reduce",
    ),
    MethodNote(
        name="ddp",
        made_by="data_parallel:DDP",
        stage="baseline",
        what="PyTorch's DDP: even shares, buckets of 25 MiB",
    ),
    MethodNote(
        name="ddp_accumulate",
        made_by="data_parallel:DDP_ACCUMULATE",
        stage="baseline",
        what="ddp with as few micro-batches as fit into memory",
        needs="a batch that can be cut",
    ),
    MethodNote(
        name="best_ddp",
        made_by="data_parallel:BestDataParallel",
        stage="baseline",
        what="the best data parallelism: shares, synchronisation, buckets, classes of hosts",
    ),
    MethodNote(
        name="tuned_uniform",
        made_by="tuned_uniform:TunedUniform",
        stage="baseline",
        what="one decision for the whole model, tuned, on the best machines",
    ),
    MethodNote(
        name="single_device",
        made_by="model_parallel:SingleDevice",
        stage="baseline",
        what="everything on one device",
        needs="a model and batch that fit there",
    ),
    MethodNote(
        name="model_parallel",
        made_by="model_parallel:ModelParallel",
        stage="baseline",
        what="consecutive layers on consecutive devices, in micro-batches",
        needs="two devices or more",
    ),
    MethodNote(
        name="megatron_grid",
        made_by="megatron_grid:MegatronGrid",
        stage="baseline",
        what="uniform tensor, pipeline and data parallelism with ZeRO, the best of the grid",
        needs="a batch that replicas divide; repeated layers for stages",
    ),
    MethodNote(
        name="spatial",
        made_by="unit_search:Spatial",
        stage="baseline",
        what="samples cut along depth, height or width, with halos",
        needs="convolutions; fewer samples than devices, or samples that fill a device",
    ),
    MethodNote(
        name="sequences",
        made_by="unit_search:Sequences",
        stage="baseline",
        what="sequences cut along their positions in unequal runs (context parallelism)",
        needs="sequences; fewer samples than devices, or samples that fill a device",
    ),
    MethodNote(
        name="agent",
        stage="zero_shot",
        what="a graph neural network's own answer, without search",
        needs="a policy (one is shipped)",
    ),
    MethodNote(
        name="deeppool",
        made_by="deeppool.planner:DeepPool",
        stage="search",
        what="devices for each layer by dynamic programming (DeepPool)",
        needs="a budget",
    ),
    MethodNote(
        name="hap",
        made_by="hap.planner:Hap",
        stage="search",
        what="column, row, head and expert parallelism by program synthesis (HAP)",
        needs="a budget; no micro-batches",
    ),
    MethodNote(
        name="islands",
        made_by="islands.planner:Islands",
        stage="search",
        what="unlike pipelines and replicas, each stage on machines of one kind",
        needs="a budget",
    ),
    MethodNote(
        name="pipeline",
        made_by="pipeline:PipelineSearch",
        stage="search",
        what="stages of machines, replicated inside, balanced by simulation",
        needs="a budget, two devices or more",
    ),
    MethodNote(
        name="pipette",
        made_by="pipette.planner:Pipette",
        stage="search",
        what="uniform layouts by a latency model, hosts put in order for measured links (Pipette)",
        needs="a budget, a batch that replicas divide; auto asks it where pairs of hosts differ",
    ),
    MethodNote(
        name="poplar",
        made_by="poplar.planner:Poplar",
        stage="search",
        what="ZeRO with unequal batches (Poplar)",
        needs="a budget; stages 1 to 3 an elementwise optimizer",
    ),
    MethodNote(
        name="two_segment",
        made_by="two_segment:TwoSegment",
        stage="search",
        what="two ranges of layers, each tuned on its own machines",
        needs="a budget",
    ),
    MethodNote(
        name="dedication",
        made_by="dedication:Dedication",
        stage="search",
        what="the best plans of the others with alike hosts in other places",
        needs="pairs of hosts that differ (pairs in the cluster file)",
    ),
    MethodNote(
        name="agent+search",
        stage="search",
        what="local_search that starts from the agent's proposals",
        needs="a budget and a policy",
    ),
    MethodNote(
        name="local_search",
        made_by="local_search.planner:LocalSearch",
        stage="search",
        what="simulated annealing over all decisions, from the best of the others",
        needs="a budget",
    ),
)
"""All methods, baselines first; those of a stage run in this order."""
