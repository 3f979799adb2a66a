"""Layouts of Megatron's family: command lines, and YAML of NeMo and Megatron-Bridge.

All three use the names of Megatron-LM's arguments (its ``arguments.py``), with dashes in a command
line and in different sections in YAML. So both become one flat list of names.
"""

import re
from collections.abc import Callable, Mapping
from posixpath import normpath
from typing import Any

from heterog.errors import InputFileError
from heterog.files import parse_json
from heterog.names import shown
from heterog.strategy.layouts.fields import Fields, LayoutFile, Twice, leaves
from heterog.strategy.layouts.layout import LayoutError, layout_of_words, programs
from heterog.strategy.layouts.shell import OR, Script, read_script

_NAME = re.compile(
    r"(tensor|pipeline|virtual_pipeline|expert)_model_parallel_size|.+\.context_parallel_size"
)
_JUDGED = re.compile(
    r"(^|[._])(val|valid|validation|test|eval|evaluation|inference|infer)([._]|$)"
)
_REFERENCE = re.compile(r"\$\{(\.*)(\w[\w.]*)\}")
_RESOLVED = re.compile(r"\$\{oc\.(?:env:\w+,|decode:)([^${}]*)\}")
_MOST_NESTED = 8  # references in the value of a reference


def is_of_megatron(document: object) -> bool:
    """Whether a YAML document holds names of Megatron's arguments.

    >>> is_of_megatron({"model": {"tensor_model_parallel_size": 2}})
    True
    """
    return any(
        _NAME.fullmatch(path) or _NAME.fullmatch(path.rpartition(".")[2])
        for path, _ in leaves(document)
    )


def flat_document(document: object) -> dict[str, Any]:
    """The fields of all sections by their own names, with references resolved.

    Fields of sections about validation keep their dotted paths.
    """
    found: dict[str, Any] = {}
    fields = dict(leaves(document))
    for path in fields:
        name = path if _JUDGED.search(path.rpartition(".")[0]) else _own_name(path)
        _add(found, name, _referred(path, fields), f"sections say '{name}'")
    return found


def _own_name(path: str) -> str:
    """The name of a field in a flat list."""
    section, _, name = path.rpartition(".")
    if name == "name" and section.rpartition(".")[2] in ("optim", "optimizer"):
        return "optimizer_name"
    return name.replace("-", "_")


def _referred(path: str, fields: Mapping[str, Any]) -> object:
    """The value of a field, with references to other fields (as in OmegaConf) resolved."""

    def of(found: re.Match[str]) -> str:
        above = path.split(".")[: -len(found[1])] if found[1] else []
        value = fields.get(".".join([*above, found[2]]))
        return found[0] if value is None or isinstance(value, dict | list) else str(value)

    text = value = fields[path]
    for _ in range(_MOST_NESTED):
        if not isinstance(text, str) or "${" not in text or len(text) > 1000:
            break
        text = _RESOLVED.sub(r"\1", _REFERENCE.sub(of, text))
    return value if text == value else _typed(str(text))


def _add(found: dict[str, Any], name: str, value: object, where: str) -> None:
    """Add a field; if it has another value already, reading it will be an error."""
    before = found.setdefault(name, value)
    if before != value and not isinstance(before, Twice):
        found[name] = Twice(
            f"{where} as {shown(before)} and as {shown(value)}; leave the one that holds."
        )


def command_line_document(
    text: str, where: str, beside: Callable[[str], str | None]
) -> tuple[dict[str, Any], list[str]]:
    """The options in a command line or in the shell script around it, as fields.

    Args:
        text: The command line or script.
        where: Start of every message.
        beside: Text of the file of a name, relative to the script; ``None`` if there is none.

    Returns:
        The fields, and sentences about uncertain ones.

    Raises:
        InputFileError: the text is not what a shell reads, or has no options.
    """
    found: dict[str, Any] = {}
    unsure, unknown = dict[str, None](), dict[str, None]()
    script = read_script(text, where, beside)
    for option in script.options:
        name = _own_name(option.name)
        if not name:
            unknown[option.value] = None
            continue
        if not option.is_sure and name not in found:
            unsure[name] = None
        values = option.value.split(OR)
        for value in values:
            how = "depends on a condition," if len(values) > 1 else "stands there"
            _add(found, name, _typed(value), f"--{name.replace('_', '-')} {how}")
    if not found:
        raise InputFileError(f"{where} has no options, such as --tensor-model-parallel-size 2.")
    missing = [*script.missing, *_add_deepspeed(found, script, where, beside)]
    for name, value in script.directives.items():
        found.setdefault(_own_name(name), int(value))
    if "expert_model_parallel_size" in found:
        found.setdefault("moe_token_dispatcher_type", "allgather")  # default of arguments.py
    remarks = [
        f"{sentence}: {', '.join(shown(name)[1:-1] for name in names)}."
        for sentence, names in (
            ("Stands under a condition of the script, which is taken to hold", unsure),
            ("Only a shell can say what stands for", unknown),
            ("Settings in these files are not read, as they are not beside the script", missing),
        )
        if names
    ]
    return found, remarks


def _add_deepspeed(
    found: dict[str, Any], script: Script, where: str, beside: Callable[[str], str | None]
) -> list[str]:
    """Add the fields of a command's DeepSpeed configuration; returns its name if it is missing."""
    name = found.get("deepspeed_config")
    if not isinstance(name, str):
        return []
    text = script.written.get(normpath(name)) or beside(name)
    if text is None:
        return [name]
    document = parse_json(text.encode(), f"{where}: {shown(name)[1:-1]}")
    for path, value in leaves(document):
        own = _OF_DEEPSPEED.get(path, path)
        if own == path:
            found.setdefault(f"deepspeed_config.{path}", value)
        elif value != "auto":
            _add(found, own, value, f"the command and {shown(name)} say {own}")
    return []


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
    fields.ignore_known("megatron")
    for name, none in programs()["refused"].items():
        value = fields.take("", name)
        if value not in (None, none, False):
            raise LayoutError(f"{name} is {shown(value)}; it cannot be said, only {none}.")
    said: dict[str, Any] = {own: fields.number("", name, 1) for own, name in _DEGREES.items()}
    tp, pp, cp = said["tp"], said["pp"], said["cp"]
    ep = said["ep"] = _experts(fields, tp, cp, said["ep"])
    said["micro_batch"] = fields.number("", "micro_batch_size", 0)
    said["dispatch"] = fields.word("", "moe_token_dispatcher_type", "alltoall")
    said["sequence_parallel"] = fields.flag("", "sequence_parallel")
    said |= _sharding(fields) | _recomputation(fields) | _stages(fields, pp)
    if world := _num_devices(fields):
        replica, words = tp * pp * cp, f"tp {tp} x pp {pp} x cp {cp}"
        if world < replica * ep:  # example scripts name one host until a user writes how many
            fields.remark(
                f"The {world} devices that the launcher is told of are fewer than {replica * ep}, "
                f"{words} x replicas that share experts {ep}: the cluster says how many there are."
            )
        elif world % replica:
            raise LayoutError(f"{world} devices are not {words} times a number of replicas.")
        else:
            said["dp"] = world // replica
    for name in programs()["remarked"]:
        if fields.take("", name) not in (None, False, "null", 0):
            fields.remark(f"{name} is not modelled.")
    batch = fields.number("", "global_batch_size", 0)
    return LayoutFile(layout=layout_of_words(said), batch_size=batch)


def replicas_that_share(ep: int, tp: int, cp: int, each: int, name: str, words: str) -> int:
    """Number of replicas that share experts, for a program that gives a number of devices.

    A replica has ``cp`` times ``tp`` of these devices, or only ``cp`` if ``tp`` splits experts.

    Args:
        ep: Devices with different experts.
        tp: Devices of a team.
        cp: Teams that share a sequence.
        each: Devices that split an expert.
        name: Name of the program's field for ``ep``.
        words: Names of its fields for the devices of a replica.

    Raises:
        LayoutError: a replica's devices do not divide them.
    """
    inside = cp * (1 if each == tp else tp)
    if ep % inside:
        raise LayoutError(
            f"{name} {ep} must be a multiple of the {inside} devices of a replica ({words})."
        )
    return ep // inside


def _experts(fields: Fields, tp: int, cp: int, ep: int) -> int:
    if ep == 1:
        return 1
    each = fields.number("", "expert_tensor_parallel_size", tp)
    return replicas_that_share(
        ep, tp, cp, each, "expert_model_parallel_size", "context_parallel_size, and "
        "tensor_model_parallel_size unless expert_tensor_parallel_size is as large"
    )  # fmt: skip


def _num_devices(fields: Fields) -> int:
    """Number of devices by the launcher's options; 0 if there are none, or only a shell knows."""

    def count(*names: str) -> int:
        found = 0
        for name in names:
            said = fields.take("", name)
            if isinstance(said, str | list) and said not in ("auto", "gpu"):
                fields.remark(
                    f"{name} is {shown(said)}: the cluster says how many devices there are."
                )
            elif not isinstance(said, str):
                found = found or fields.number("", name, 0, least=-1)
        return found

    return max(count(*_HOSTS), 0) * max(count(*_PER_HOST), 0)


def _sharding(fields: Fields) -> dict[str, int]:
    """State in slices over replicas: ZeRO-1 with the distributed optimizer, more with FSDP."""
    is_named = fields.word("", "optimizer_name").lower() in _DISTRIBUTED_OPTIMIZERS
    stage = int(fields.flag("", "use_distributed_optimizer") or is_named)
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
    if fields.flag("", "fsdp"):  # NeMo's
        kind = fields.word("", "fsdp_sharding_strategy", "full")
        if kind not in _NEMO_STAGES:
            raise LayoutError(f"fsdp_sharding_strategy {shown(kind)} is none that is known.")
        return {"zero": _NEMO_STAGES[kind], "dp_replicate": 0 if kind == "hybrid" else 1}
    stage = max(stage, fields.number("", "zero_stage", 0, least=0))  # Megatron-DeepSpeed
    copies = fields.number("", "num_distributed_optimizer_instances", 1)
    return {"zero": stage, "dp_replicate": copies if stage else 1}


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
        count = str(fields.take("", f"{start}_num_layers") or count)
    if modules := fields.take("", "recompute_modules"):
        listed = modules if isinstance(modules, list) else [modules]
        if kind == "selective" and listed != ["core_attn"]:
            fields.remark(f"recompute_modules {shown(modules)}: only the scores are made again.")
    if kind == "full" and (method == "block" or count not in ("", "1")):
        fields.remark(
            f"recompute_method {method or 'uniform'} over {count or 'all'} layers: every layer "
            "is made again."
        )
    return {"recompute": kind or "none"}


def _stages(fields: Fields, pp: int) -> dict[str, Any]:
    """Chunks of a stage, and unequal first and last stages."""
    layers = fields.number("", "num_layers", 0)
    if (stages := fields.take("", "pipeline_model_parallel_layout")) is not None:
        fields.skip("", "virtual_pipeline_model_parallel_size")
        return _written_out(stages, pp)
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
    said: dict[str, Any] = {}
    if chunks > 1 and pp > 1:
        said = {"chunks": chunks, "schedule": "interleaved"}
    ends = [
        fields.number("", f"decoder_{end}_pipeline_num_layers", 0)
        or fields.number("", f"num_layers_in_{end}_pipeline_stage", 0)
        for end in ("first", "last")
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
        said["layers"] = (ends[0] or middle, *[middle] * (pp - 2), ends[1] or middle)
    return said


def _written_out(stages: object, pp: int) -> dict[str, Any]:
    """Layers of each stage if a file writes stages out, as ``Et*3|(tt|)*2L`` or in lists."""
    name = "pipeline_model_parallel_layout"
    text = stages if isinstance(stages, str) else ""
    if isinstance(stages, list) and all(isinstance(each, list) for each in stages):
        text = "|".join("".join(_PARTS.get(str(part), "?") for part in each) for each in stages)
    text = "".join(text.replace(",", "").split())
    for repeated in (r"\(([^()]+)\)\*(\d{1,4})", r"(.)\*(\d{1,4})"):
        text = re.sub(repeated, lambda found: found[1] * int(found[2]), text[:_LONGEST_STAGES])
    counts = [each.count("t") for each in text.split("|")]
    if not re.fullmatch(r"E?t+(\|t+)*L?", text) or len(counts) % pp:
        raise LayoutError(
            f"{name} is {shown(stages)}; only decoder layers on each of a multiple of {pp} stages "
            "can be said, with the embedding (E) on the first and the loss (L) on the last."
        )
    said = {"layers": tuple(counts)} if pp > 1 else {}
    chunks = len(counts) // pp
    return said | ({"chunks": chunks, "schedule": "interleaved"} if chunks > 1 else {})


_PARTS = {"embedding": "E", "decoder": "t", "loss": "L"}
_LONGEST_STAGES = 1000
_DEGREES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
_DISTRIBUTED_OPTIMIZERS = ("distributed_fused_adam", "mcore_distributed_optim")
"""NeMo's names of optimizers that slice their state over replicas."""
_FSDP_STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_NEMO_STAGES = {"full": 3, "grad": 2, "hybrid": 3}
_PER_HOST = ("devices", "nproc_per_node", "gpus_per_node", "num_gpus", "ntasks_per_node")
_HOSTS = ("num_nodes", "nnodes", "nodes")
LAUNCHER = (*_PER_HOST, *_HOSTS, "fsdp")
"""Fields that files of other programs have, too."""
_OF_DEEPSPEED = {
    "zero_optimization.stage": "zero_stage",
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
}
"""Names in Megatron-DeepSpeed's command of fields that DeepSpeed's file has, too."""
