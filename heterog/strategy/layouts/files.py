"""Layouts in files of other programs: torchtitan, DeepSpeed, Accelerate and Megatron's family.

Only fields about parallelism and the batch are read. A setting that a layout cannot express is
refused, or named in a remark if the layout is meaningful without it. Unknown fields are named in a
remark, too. Other sections (the model, the optimizer, logging) belong to the workload and are
skipped.
"""

import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from heterog.errors import InputFileError
from heterog.files import decoded, parse_json, read_bytes
from heterog.names import shown
from heterog.strategy.layouts.fields import Fields, LayoutFile
from heterog.strategy.layouts.layout import (
    Layout,
    LayoutError,
    Recompute,
    fsdp_words,
    layout_of_words,
)
from heterog.strategy.layouts.megatron import (
    LAUNCHER,
    command_line_document,
    flat_document,
    is_of_megatron,
    read_megatron,
    replicas_that_share,
)
from heterog.yaml_files import parse_yaml

MAX_FILE_BYTES = 1024**2
"""Size limit of a layout's file: a hundred times the largest shipped with those programs."""
_YAML = (".yaml", ".yml")
_COMMAND_LINE = (".sh", ".txt")
_SUFFIXES = (".toml", ".json", *_YAML, *_COMMAND_LINE)
_MOST_SECTIONS = 10_000


def is_layout_file(source: str) -> bool:
    """Whether a text names a file, rather than being a layout itself.

    >>> is_layout_file("llama3_8b.toml"), is_layout_file("tp=2,pp=4")
    (True, False)
    """
    return source.lower().endswith(_SUFFIXES)


def read_layout(path: str | Path) -> LayoutFile:
    """Read a layout from a file; its ending decides the program that it belongs to.

    Raises:
        InputFileError: the file cannot be read, or a field has a wrong type.
        LayoutError: a field asks for something that a layout cannot express.
    """
    path = Path(path)
    ending = path.suffix.lower()
    if ending not in _SUFFIXES:
        raise InputFileError(
            f"cannot tell what {path} is; a layout is read from .toml (torchtitan), .json "
            "(DeepSpeed), .yaml (Accelerate, NeMo, Megatron-Bridge) or .sh and .txt (Megatron-LM)."
        )
    kind, read = _READERS[ending]
    content = read_bytes(path, kind, MAX_FILE_BYTES)
    document, unsure = _parsed(content, path, kind, ending)
    if ending in _YAML and is_of_megatron(document):
        kind, read = "Megatron configuration", read_megatron
        document = flat_document(document)
    fields = Fields(document, f"{kind} {path}")
    try:
        found = read(fields)
        fields.check_that_some_are_known(LAUNCHER)
        remarks = (*unsure, *fields.remarks, *fields.unread())
    except LayoutError as error:
        raise LayoutError(f"{kind} {path}: {error}") from error
    return replace(found, remarks=remarks)


def _parsed(content: bytes, path: Path, kind: str, ending: str) -> tuple[object, list[str]]:
    """The document in a file, and sentences about its uncertain parts."""
    where = f"{kind} {path}"
    if ending == ".json":
        return parse_json(content, where), []
    text = decoded(content, where)
    if ending in _COMMAND_LINE:
        return command_line_document(text, where, lambda name: _beside(path, name))
    if ending == ".toml":
        # Each level of a nested table or array is a call of the parser.
        if text.count("[") > _MOST_SECTIONS or text.count("{") > _MOST_SECTIONS:
            raise InputFileError(f"{where} holds more than is read.")
        try:
            return tomllib.loads(text), []
        except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
            reason = (str(error).splitlines() or ["it is nested too deeply"])[0][:200]
            raise InputFileError(f"{where} is not valid TOML: {reason}.") from error
    what = "a configuration of Accelerate or Megatron"
    return parse_yaml(text, path, what=what, if_empty="run 'accelerate config'")[1], []


def _beside(path: Path, name: str) -> str | None:
    """The text of a file that a script names, in the script's folder; ``None`` if missing."""
    file = path.parent / name
    try:
        if Path(name).is_absolute() or not file.is_file():
            return None
    except (OSError, ValueError):  # no name that a file can have
        return None
    what = f"file that {path.name} reads"
    return decoded(read_bytes(file, what, MAX_FILE_BYTES), f"{what} {file}")


def _torchtitan(fields: Fields) -> LayoutFile:
    """The sections ``parallelism``, ``training`` and ``activation_checkpoint`` of torchtitan."""
    at = "parallelism"
    fields.ignore_known("torchtitan")
    fields.merge(at, older="experimental")
    fields.merge(at, older="training", having="_parallel_")
    replicas = fields.number(at, "data_parallel_replicate_degree", 1)
    shards = fields.number(at, "data_parallel_shard_degree", -1, least=-1)
    tp, cp, pp = (
        fields.number(at, f"{kind}_parallel_degree", 1)
        for kind in ("tensor", "context", "pipeline")
    )
    # By default FSDP reshards only without a pipeline, where every micro-batch would gather again.
    keeping = ("never", "default") if pp > 1 else ("never",)
    keeps = fields.word(at, "fsdp_reshard_after_forward", "default") in keeping
    split = fields.words(at, "pipeline_parallel_split_points") or _torchtitan_parts(fields)
    _about_torchtitans_stages(fields, are_split=bool(split) or pp == 1)
    if fields.flag("training", "enable_cpu_offload"):
        fields.remark("enable_cpu_offload is not modelled: everything stays on the devices.")
    local = fields.number("training", "local_batch_size", 0, least=0)
    local = local or fields.number("training", "batch_size", 0, least=0)
    whole = fields.number("training", "global_batch_size", 0, least=-1)
    micro = fields.number(at, "pipeline_parallel_microbatch_size", 1) if pp > 1 else local
    schedule = fields.word(at, "pipeline_parallel_schedule", "1F1B") if pp > 1 else ""
    said: dict[str, Any] = {
        "tp": tp,
        "cp": cp,
        "ep": _torchtitan_experts(fields, tp, cp),
        "pp": pp,
        "dp": replicas * max(shards, 0),  # -1: what the other degrees leave
        "dp_replicate": 1 if shards == 1 else replicas,
        "micro_batch": micro,
        "zero": 0 if shards == 1 else (2 if keeps else 3),
        **_torchtitan_checkpoints(fields),
        # Its tensor parallelism includes sequence parallelism unless a field switches it off.
        "sequence_parallel": fields.flag(at, "enable_sequence_parallel", default=True) and tp > 1,
        "schedule": schedule,
    }
    if split:
        said["split"] = split
        chunks, rest = divmod(len(split) + 1, pp)
        if not rest and chunks > 1:
            said["chunks"] = chunks
    return LayoutFile(layout=layout_of_words(said), batch_size=max(whole, 0))


def _about_torchtitans_stages(fields: Fields, *, are_split: bool) -> None:
    """Read the fields for numbers of layers of stages, which count if no modules are named."""
    at, start = "parallelism", "pipeline_parallel_"
    if (file := fields.word(at, f"{start}schedule_csv")) and not are_split:
        raise LayoutError(f"{start}schedule_csv is {shown(file)}; only schedules by name can be.")
    less = [fields.number(at, f"{start}{end}_stage_less_layers", 1, least=0)
            for end in ("first", "last")]  # fmt: skip
    each = fields.take(at, f"{start}layers_per_stage")
    if any(less) and not are_split:
        fields.remark(
            f"{start}first_ and last_stage_less_layers are {less[0]} and {less[1]}: all stages "
            "have equally many layers here; say layers=... in a text."
        )
    if each is not None and not are_split:
        fields.remark(
            f"{start}layers_per_stage is {shown(each)}: the number of stages is that which the "
            "schedule needs; say chunks=... in a text."
        )


def _torchtitan_parts(fields: Fields) -> tuple[str, ...]:
    """Modules at which stages begin, if a file lists the modules of each stage."""
    parts = fields.take("parallelism", "module_fqns_per_model_part") or []
    if not isinstance(parts, list) or not all(
        isinstance(part, list) and part and isinstance(part[0], str) for part in parts
    ):
        raise LayoutError(
            f"module_fqns_per_model_part is {shown(parts)}; it is a list of lists of modules."
        )
    return tuple(part[0] for part in parts[1:])


def _torchtitan_experts(fields: Fields, tp: int, cp: int) -> int:
    """Number of replicas that share experts; torchtitan gives a number of devices."""
    at = "parallelism"
    ep = fields.number(at, "expert_parallel_degree", 1)
    each = fields.number(at, "expert_tensor_parallel_degree", 1)
    if ep == 1:
        return 1
    return replicas_that_share(
        ep, tp, cp, each, "expert_parallel_degree", "context_parallel_degree, and "
        "tensor_parallel_degree unless expert_tensor_parallel_degree is as large"
    )  # fmt: skip


def _torchtitan_checkpoints(fields: Fields) -> dict[str, Any]:
    at = "activation_checkpoint"
    mode = fields.word(at, "mode", "selective")  # torchtitan's own default
    every = fields.word(at, "selective_ac_option", "2")
    if mode in ("none", "full"):
        return {"recompute": mode}
    if mode != "selective":
        raise LayoutError(
            f"activation_checkpoint.mode is {shown(mode)}; none, full and selective can be said."
        )
    if every.isascii() and every.isdigit():  # 0 and 1: every layer
        return {"recompute": "full", "recompute_every": max(int(every[:6]), 1)}
    return {"recompute": every}


def _deepspeed(fields: Fields) -> LayoutFile:
    """Batch sizes, ZeRO and tensor parallelism of a DeepSpeed configuration."""
    fields.ignore_known("deepspeed")
    at = "zero_optimization"
    stage = fields.number(at, "stage", 0, least=0, auto=True)
    for name in ("offload_optimizer", "offload_param"):
        device = fields.word(f"{at}.{name}", "device", "none")
        fields.skip(f"{at}.{name}", *fields.section(f"{at}.{name}"))
        if device != "none":
            fields.remark(f"{name} to {device} is not modelled: everything stays on the devices.")
    if (parts := fields.number(at, "zero_hpz_partition_size", 1)) > 1:
        fields.remark(f"zero_hpz_partition_size {parts}: parameters are sliced over all replicas.")
    if (parts := fields.number(at, "mics_shard_size", 0, least=-1)) > 0:
        fields.remark(f"mics_shard_size {parts}: slices are over all replicas.")
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        if fields.flag(at, name):
            fields.remark(f"{name} is not modelled: messages have the size of their dtype.")
    if (degree := fields.number("", "sequence_parallel_size", 1)) > 1:
        raise LayoutError(
            f"sequence_parallel_size is {degree}; Ulysses cannot be said, only 1, or cp={degree} "
            "in a text for teams that share sequences in a ring."
        )
    tp = max(
        fields.number("tensor_parallel", "autotp_size", 1, least=0),
        fields.number("tensor_parallel", "tp_size", 1),
        fields.number("tensor_parallel.tp", "tp_size", 1),
    )
    pp = fields.number("pipeline", "stages", 1, auto=True)
    again = fields.number("pipeline", "activation_checkpoint_interval", 0, least=0)
    if again > 1:
        fields.remark(
            f"activation_checkpoint_interval {again}: the inputs of every layer are kept, not of "
            "each such run."
        )
    kind = fields.word("optimizer", "type")
    if kind.lower().startswith(("onebit", "zeroone")):
        fields.remark(f"optimizer {kind} is not modelled: gradients travel whole.")
    if fields.section("activation_checkpointing"):
        fields.skip("activation_checkpointing", *fields.section("activation_checkpointing"))
        fields.remark(
            "activation_checkpointing says how the model's own checkpoints are kept; give "
            "recompute=full in a text if the model recomputes its layers."
        )
    return LayoutFile(
        layout=Layout(
            tp=tp,
            ep=_deepspeed_experts(fields, tp),
            pp=pp,
            micro_batch=fields.number("", "train_micro_batch_size_per_gpu", 0, auto=True),
            num_micro=fields.number("", "gradient_accumulation_steps", 0, auto=True),
            zero=stage,
            recompute=Recompute.FULL if again else Recompute.NONE,
        ),
        batch_size=fields.number("", "train_batch_size", 0, auto=True),
    )


def _deepspeed_experts(fields: Fields, tp: int) -> int:
    """Replicas that share experts by AutoEP."""
    experts = "expert_parallel"
    ep = fields.number(experts, "autoep_size", 1) if fields.flag(experts, "enabled") else 1
    if ep > 1 and tp > 1:
        raise LayoutError(
            f"{experts}.autoep_size is {ep} beside teams of {tp}; say ep=... in a text, of "
            "replicas that share experts."
        )
    return ep


def _accelerate(fields: Fields) -> LayoutFile:
    """The output of ``accelerate config``."""
    fields.ignore_known("accelerate")
    if "distributed_type" not in fields.section(""):
        return LayoutFile(layout=Layout())  # refused later, because no field was read
    kind = fields.word("", "distributed_type", "NO").upper().replace("-", "_")
    count = fields.number("", "num_processes", 0, least=0)
    readers: dict[str, Callable[[Fields], Layout]] = {
        "FSDP": _accelerate_fsdp,
        "DEEPSPEED": _accelerate_deepspeed,
        "MEGATRON_LM": _accelerate_megatron,
    }
    if kind in readers:
        layout = readers[kind](fields)
    elif kind == "TP":  # of Accelerate 1.3 to 1.5
        layout = Layout(tp=fields.number("tp_config", "tp_size", 1))
    elif kind in ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU"):
        layout = Layout(num_micro=fields.number("", "gradient_accumulation_steps", 0, auto=True))
    else:
        raise LayoutError(
            f"distributed_type {shown(kind)} cannot be said; NO, MULTI_GPU, FSDP, TP, DEEPSPEED "
            "and MEGATRON_LM can."
        )
    layout = _with_mesh(fields, layout)
    if count:
        replica = layout.tp * layout.cp * layout.pp
        if count % replica or (layout.dp and layout.dp * replica != count):
            raise LayoutError(
                f"num_processes {count} is not tp {layout.tp} x cp {layout.cp} x pp {layout.pp}"
                + (f" x dp {layout.dp}." if layout.dp else " times a number of replicas.")
            )
        layout = replace(layout, dp=count // replica)
    return LayoutFile(layout=layout)


def _with_mesh(fields: Fields, layout: Layout) -> Layout:
    """The sizes of ``parallelism_config``, if there is one."""
    at, name = "parallelism_config", "parallelism_config_"
    if not fields.section(at):
        return layout
    if (degree := fields.number(at, f"{name}sp_size", 1)) > 1:
        raise LayoutError(f"{name}sp_size is {degree}; it cannot be said yet, only 1.")
    fields.ignore_known("accelerate_mesh")
    tp, cp, replicas, shards = (
        fields.number(at, f"{name}{axis}_size", 1)
        for axis in ("tp", "cp", "dp_replicate", "dp_shard")
    )
    zero = layout.zero if shards > 1 else 0
    return replace(
        layout,
        tp=max(layout.tp, tp),
        cp=cp,
        dp=replicas * shards,
        zero=zero,
        dp_replicate=replicas if zero else 1,
    )


def _accelerate_fsdp(fields: Fields) -> Layout:
    at = "fsdp_config"
    words: dict[str, Any]
    strategy = fields.word(at, "fsdp_sharding_strategy")
    if strategy:
        words = fsdp_words(strategy)
        fields.skip(at, "fsdp_reshard_after_forward")
    else:
        reshard = fields.section(at).get("fsdp_reshard_after_forward")
        if isinstance(reshard, str):
            words = fsdp_words(fields.word(at, "fsdp_reshard_after_forward"))
        else:
            keeps = not fields.flag(at, "fsdp_reshard_after_forward", default=True)
            words = {"zero": 2 if keeps else 3}
    if fields.flag(at, "fsdp_offload_params"):
        fields.remark("fsdp_offload_params is not modelled: everything stays on the devices.")
    full = fields.flag(at, "fsdp_activation_checkpointing")
    fields.ignore_known("accelerate_fsdp")
    num_micro = fields.number("", "gradient_accumulation_steps", 0, auto=True)
    return layout_of_words(
        words | {"num_micro": num_micro, "recompute": "full" if full else "none"}
    )


def _accelerate_deepspeed(fields: Fields) -> Layout:
    at = "deepspeed_config"
    if (other := fields.word(at, "deepspeed_config_file", "none")) != "none":
        raise LayoutError(
            f"what is run stands in the DeepSpeed configuration {shown(other)}; give that file."
        )
    for name in ("offload_optimizer_device", "offload_param_device"):
        if (device := fields.word(at, name, "none")) != "none":
            fields.remark(f"{name} {device} is not modelled: everything stays on the devices.")
    fields.ignore_known("accelerate_deepspeed")
    return Layout(
        zero=fields.number(at, "zero_stage", 2, least=0),
        num_micro=fields.number(at, "gradient_accumulation_steps", 0, auto=True),
    )


def _accelerate_megatron(fields: Fields) -> Layout:
    num_micro = fields.number("megatron_lm_config", "megatron_lm_num_micro_batches", 0)
    of_megatron = fields.below("megatron_lm_config", "megatron_lm_", _OF_MEGATRON)
    of_megatron.ignore_known("accelerate_megatron")
    layout = read_megatron(of_megatron).layout
    fields.remarks += of_megatron.unread()
    return replace(layout, num_micro=num_micro)


_OF_MEGATRON = {
    "tp_degree": "tensor_model_parallel_size",
    "pp_degree": "pipeline_model_parallel_size",
    "sequence_parallelism": "sequence_parallel",
}
"""Accelerate's names of Megatron's arguments, if they differ."""


_READERS: dict[str, tuple[str, Callable[[Fields], LayoutFile]]] = {
    ".toml": ("torchtitan configuration", _torchtitan),
    ".json": ("DeepSpeed configuration", _deepspeed),
    ".yaml": ("Accelerate configuration", _accelerate),
    ".yml": ("Accelerate configuration", _accelerate),
    ".sh": ("Megatron command line", read_megatron),
    ".txt": ("Megatron command line", read_megatron),
}
