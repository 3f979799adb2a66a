"""Layouts as Megatron's family says them: command lines, and YAML of NeMo and Megatron-Bridge.

All three use the names of Megatron-LM's arguments (its ``arguments.py``), with dashes in a command
line and below sections of their own in YAML; so both become one flat list of names.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from heterog.errors import InputFileError
from heterog.names import shown
from heterog.strategy.layouts.fields import Fields, LayoutFile, Twice, leaves
from heterog.strategy.layouts.layout import LayoutError, layout_of_words

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^{}]*))?\})")
_MOST_WORDS = 10_000
_MOST_NESTED = 8  # variables in the values of variables


def is_of_megatron(document: object) -> bool:
    """Whether a YAML document holds names of Megatron's arguments.

    >>> is_of_megatron({"model": {"tensor_model_parallel_size": 2}})
    True
    """
    return any(
        path.rpartition(".")[2] in ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        for path, _ in leaves(document)
    )


def flat_document(document: object) -> dict[str, Any]:
    """The fields of all sections by their own names."""
    found: dict[str, Any] = {}
    for path, value in leaves(document):
        section, _, name = path.rpartition(".")
        if name == "name" and section.split(".")[-1] in ("optim", "optimizer"):
            name = "optimizer_name"
        _add(found, name, value, f"sections say '{name}'")
    return found


def _add(found: dict[str, Any], name: str, value: object, where: str) -> None:
    """Add a field; one that is there with another value is refused where it is read."""
    before = found.setdefault(name, value)
    if before != value and not isinstance(before, Twice):
        found[name] = Twice(
            f"{where} as {shown(before)} and as {shown(value)}; leave the one that holds."
        )


def command_line_document(text: str, where: str) -> dict[str, Any]:
    """The options in a command line or in the shell script around it, as fields.

    Variables that the script sets, or gives a default, stand for their values; what a shell would
    have to run is left as it is written.

    Raises:
        InputFileError: the text is not what a shell reads, or has no options.
    """
    try:
        words = shlex.split(text.replace("\\\n", " ").replace("\\\r\n", " "), comments=True)
    except ValueError as error:
        raise InputFileError(f"{where} is no command line: {error}.") from error
    if len(words) > _MOST_WORDS:
        raise InputFileError(f"{where} holds {len(words):,} words; at most {_MOST_WORDS:,}.")
    found: dict[str, Any] = {}
    for name, value in _options(_spread(words)):
        _add(found, name, _typed(value), f"--{name.replace('_', '-')} stands there")
    if not found:
        raise InputFileError(f"{where} has no options, such as --tensor-model-parallel-size 2.")
    return found


def _options(words: Iterable[str]) -> list[tuple[str, str]]:
    """Options with the word that follows them; ``true`` where none does."""
    found: list[tuple[str, str]] = []
    is_open = False
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            found.append((name.replace("-", "_"), value if has_value else "true"))
            is_open = not has_value
        elif is_open:
            found[-1] = (found[-1][0], "true" if word == ")" else word)
            is_open = False
    return found


def _spread(words: list[str]) -> Iterator[str]:
    """Words with their variables, those of quoted lists of options one by one."""
    variables: dict[str, str] = {}
    for word in words:
        is_set = _ASSIGNMENT.fullmatch(word)
        value = _with_variables(is_set[2] if is_set else word, variables)
        if "(" not in value and value.strip(")"):
            value = value.rstrip(")")  # the end of an array in one line
        if is_set:
            variables[is_set[1]] = value
        text = value.lstrip("(").strip()
        if " " in text and text.startswith("--"):
            yield from [*text.split(), ")"]
        elif not is_set or text.startswith("--"):
            yield text


def _with_variables(text: str, variables: Mapping[str, str]) -> str:
    for _ in range(_MOST_NESTED):
        changed = _VARIABLE.sub(
            lambda found: variables.get(found[1] or found[2], found[3] or found[0]), text
        )
        if changed == text or len(changed) > 1000:
            break
        text = changed
    return text


def _typed(value: str) -> object:
    if value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    return {"true": True, "false": False}.get(value.lower(), value)


def read_megatron(fields: Fields) -> LayoutFile:
    """Read a layout from the fields of ``flat_document`` or ``command_line_document``.

    Raises:
        InputFileError: a field has a wrong type.
        LayoutError: a field asks for something that a layout cannot express.
    """
    for name, none in _CANNOT_BE_SAID.items():
        value = fields.take(name)
        if value not in (None, none, False):
            raise LayoutError(f"{name} is {shown(value)}; it cannot be said, only {none}.")
    said = {own: str(fields.number("", name, 1)) for own, name in _DEGREES.items()}
    if int(said["ep"]) > 1:
        said["ep"] = str(_experts(fields, said))
    said["micro_batch"] = str(fields.number("", "micro_batch_size", 0))
    said["dispatch"] = fields.word("", "moe_token_dispatcher_type", "alltoall")
    said["sequence_parallel"] = str(fields.flag("", "sequence_parallel"))
    said |= _sharding(fields) | _recomputation(fields) | _stages(fields, int(said["pp"]))
    if world := _num_devices(fields):
        replica = int(said["tp"]) * int(said["pp"]) * int(said["cp"])
        needed = replica * int(said["ep"])
        words = f"tp {said['tp']} x pp {said['pp']} x cp {said['cp']}"
        if world < needed:  # examples are for one host until somebody writes how many
            fields.remark(
                f"The {world} devices that the launcher is told of are fewer than {needed}, "
                f"{words} x replicas that share experts {said['ep']}: the cluster says how many "
                "there are."
            )
        elif world % replica:
            raise LayoutError(f"{world} devices are not {words} times a number of replicas.")
        else:
            said["dp"] = str(world // replica)
    for name in _REMARKED:
        if fields.take(name) not in (None, False, "null", 0):
            fields.remark(f"{name} is not modelled.")
    fields.skip("", *_TUNING)
    batch = fields.number("", "global_batch_size", 0)
    return LayoutFile(layout=layout_of_words(said), batch_size=batch)


def replicas_that_share(ep: int, tp: int, cp: int, each: int, words: str) -> int:
    """Replicas that share experts, where a program counts devices.

    They take in all of ``cp``, and ``tp`` unless that splits each expert.

    Args:
        ep: Devices with different experts.
        tp: Devices of a team.
        cp: Teams that share a sequence.
        each: Devices that split an expert.
        words: Names of the program's fields for these.

    Raises:
        LayoutError: a replica's devices do not divide them.
    """
    inside = cp * (1 if each == tp else tp)
    if ep % inside:
        raise LayoutError(
            f"{ep} must be a multiple of the {inside} devices of a replica ({words})."
        )
    return ep // inside


def _experts(fields: Fields, said: Mapping[str, str]) -> int:
    tp, cp, ep = (int(said[name]) for name in ("tp", "cp", "ep"))
    each = fields.number("", "expert_tensor_parallel_size", tp)
    try:
        return replicas_that_share(
            ep, tp, cp, each, "context_parallel_size, and tensor_model_parallel_size unless "
            "expert_tensor_parallel_size is as large"
        )  # fmt: skip
    except LayoutError as error:
        raise LayoutError(f"expert_model_parallel_size {error}") from error


def _num_devices(fields: Fields) -> int:
    """Devices that the launcher is told of; 0 if it is not, or by a variable of its own."""
    hosts = 0
    for name in ("num_nodes", "nnodes"):
        if str(said := fields.take(name)).startswith("$"):
            fields.remark(f"{name} is {shown(said)}: the cluster says how many devices there are.")
        else:
            hosts = hosts or fields.number("", name, 0)
    each = fields.take("devices")
    if type(each) is not int:
        each = fields.take("nproc_per_node") or fields.take("gpus_per_node")
    return hosts * each if type(each) is int else 0


def _sharding(fields: Fields) -> dict[str, str]:
    """What is sliced over replicas: ZeRO-1 by the distributed optimizer, more by FSDP."""
    stage = 0
    if fields.flag("", "use_distributed_optimizer"):
        stage = 1
    if fields.word("", "optimizer_name").lower() in _DISTRIBUTED_OPTIMIZERS:
        stage = 1
    if any([fields.flag("", name) for name in ("use_megatron_fsdp", "use_custom_fsdp")]):
        kind = fields.word("", "data_parallel_sharding_strategy", "no_shard")
        if kind not in _FSDP_STAGES:
            raise LayoutError(
                f"data_parallel_sharding_strategy is {shown(kind)}; it is one of "
                f"{', '.join(_FSDP_STAGES)}."
            )
        stage = _FSDP_STAGES[kind]
    fields.skip("", "data_parallel_sharding_strategy")
    if fields.flag("", "use_torch_fsdp2"):
        stage = 3
    stage = max(stage, fields.number("", "zero_stage", 0, least=0))  # Megatron-DeepSpeed
    copies = fields.number("", "num_distributed_optimizer_instances", 1)
    return {"zero": str(stage), "dp_replicate": str(copies if stage else 1)}


def _recomputation(fields: Fields) -> dict[str, str]:
    kind = ""
    for name in ("recompute_granularity", "activations_checkpoint_granularity"):
        kind = fields.word("", name) or kind
    if fields.flag("", "recompute_activations"):
        kind = kind or "selective"
    for name in ("checkpoint_activations", "deepspeed_activation_checkpointing"):
        if fields.flag("", name):
            kind = kind or "full"
    method = count = ""
    for start in ("recompute", "activations_checkpoint"):
        method = fields.word("", f"{start}_method") or method
        count = str(fields.take(f"{start}_num_layers") or count)
    if modules := fields.take("recompute_modules"):
        listed = modules if isinstance(modules, list) else [modules]
        if kind == "selective" and listed != ["core_attn"]:
            fields.remark(f"recompute_modules {shown(modules)}: only the scores are made again.")
    if kind == "full" and (method == "block" or count not in ("", "1")):
        fields.remark(
            f"recompute_method {method or 'uniform'} over {count or 'all'} layers: every layer "
            "is made again."
        )
    return {"recompute": kind or "none"}


def _stages(fields: Fields, pp: int) -> dict[str, str]:
    """Chunks of a stage, and unequal first and last stages."""
    layers = fields.number("", "num_layers", 0)
    chunks = 0
    for name in ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"):
        chunks = fields.number("", name, 0) or chunks
    each = fields.number("", "num_layers_per_virtual_pipeline_stage", 0)
    if each:
        if not layers or layers % (pp * each):
            raise LayoutError(
                f"num_layers_per_virtual_pipeline_stage is {each}; num_layers must be given and a "
                f"multiple of pp {pp} times that."
            )
        chunks = layers // (pp * each)
    said = {"chunks": str(chunks), "schedule": "interleaved"} if chunks > 1 and pp > 1 else {}
    ends = [
        fields.number("", f"decoder_{end}_pipeline_num_layers", 0) for end in ("first", "last")
    ]
    if any(ends):
        between = pp - sum(1 for end in ends if end)
        left = layers - sum(ends)
        if chunks > 1 or not layers or left < between or (between and left % between):
            raise LayoutError(
                f"decoder_first_ and decoder_last_pipeline_num_layers are {ends[0]} and "
                f"{ends[1]}; what is left of num_layers {layers} must divide into {between} equal "
                "stages."
            )
        middle = left // between if between else 0
        sizes = [ends[0] or middle, *[middle] * (pp - 2), ends[1] or middle]
        said["layers"] = "-".join(map(str, sizes))
    return said


_DEGREES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
_DISTRIBUTED_OPTIMIZERS = ("distributed_fused_adam", "mcore_distributed_optim")
"""NeMo's names of optimizers that slice their state over replicas."""
_FSDP_STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_CANNOT_BE_SAID: Mapping[str, object] = {
    "pipeline_model_parallel_layout": None,
    "pipeline_model_parallel_split_rank": None,
    "encoder_tensor_model_parallel_size": 0,
    "encoder_pipeline_model_parallel_size": 0,
    "hierarchical_context_parallel_sizes": None,
    "ds_sequence_parallel_size": 1,
}
"""Fields that no layout says, with the value that changes nothing."""
_REMARKED = (
    "cpu_offloading", "optimizer_cpu_offload", "rampup_batch_size", "moe_extended_tp",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "defer_embedding_wgrad_compute", "delay_wgrad_compute", "overlap_moe_expert_parallel_comm",
)  # fmt: skip
"""Fields that change the step, and without which the answer stays meaningful."""
_TUNING = (
    "overlap_grad_reduce", "overlap_param_gather", "overlap_p2p_comm", "overlap_param_gather_with_"
    "optimizer_step", "tp_comm_overlap", "ub_tp_comm_overlap", "align_grad_reduce",
    "align_param_gather", "batch_p2p_comm", "batch_p2p_communication", "ddp_bucket_size",
    "ddp_num_buckets", "ddp_average_in_collective", "no_overlap_p2p_communication",
    "distribute_saved_activations", "pipeline_dtype", "microbatch_group_size_per_virtual_pipeline_"
    "stage", "cp_comm_type", "eval_batch_size", "micro_batch_size_eval", "master_addr",
    "master_port", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id",
)  # fmt: skip
"""Fields that change only speed, or where ranks find each other."""
