"""Layouts as Megatron's family says them: command lines, and YAML of NeMo and Megatron-Bridge.

All three use the names of Megatron-LM's arguments (its ``arguments.py``), with dashes in a command
line and below sections of their own in YAML; so both become one flat list of names.

The options in a shell script, as far as they can be known without running it.

Variables stand for their values, defaults (``${TP:-4}``) and sums (``$((2 * TP))``); what only a
shell can say, as the output of a command, is left as it is written.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from heterog.errors import InputFileError
from heterog.names import shown
from heterog.strategy.layouts.fields import Fields, LayoutFile, Twice, leaves
from heterog.strategy.layouts.layout import LayoutError, layout_of_words

_INNER = r"""
    \\. | \$\(\((?>[^()]|\([^()]*\))*+\)\) | \$\((?>[^()]|\((?>[^()]|\([^()]*\))*+\))*+\)
  | \$\{(?>[^{}]|\{(?>[^{}]|\{[^{}]*\})*+\})*+\} | \$\[[^\]]*\] | `[^`]*`
"""
"""What keeps its blanks in a word, also inside double quotes."""
_TOKEN = re.compile(
    rf"""(?P<gap> (?>[ \t\0]|\\\n)++ | \#[^\n]*+ )
    | (?P<to> \d?[<>]++&?\d? )
    | (?P<word> (?>{_INNER} | '[^']*' | "(?>{_INNER}|[^"\\])*+" | [^\s'"\\`;&|()<>\0])++ )
    | (?P<stop> && | \|\| | ;; | . )""",
    re.DOTALL | re.VERBOSE,
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[\w*\])?(\+?)=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"(?:\+{0,2}[A-Za-z_]\w*\.)[\w.]+=.*", re.DOTALL)
"""A field of a configuration in the manner of Hydra: ``model.tensor_model_parallel_size=4``."""
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?([-=?])([^{}]*))?\})", re.DOTALL)
_SUM = re.compile(r"\$\(\(([^$`]*?)\)\)|\$\[([^$`\]]*)\]", re.DOTALL)
_ALL_OF = re.compile(r"\$(?:[@*]|\{\w+\[[@*]\][^}]*\})")
_BEGINS = ("if", "case", "for", "while", "until", "select")
_ENDS = ("fi", "esac", "done")
_MOST_WORDS = 50_000
_MOST_NESTED = 8  # variables in the values of variables, references in what is referred to
_LONGEST = 10_000
_STOP = ";"
OR = "\0"
"""Stands between values of which a condition of the script takes one."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option and its value.

    Attributes:
        name: Its name, without dashes in front; empty for a word among options that only a shell
            can say, such as ``$@``.
        value: The word that follows; ``true`` where none does.
        is_sure: Whether it stands under no condition.
    """

    name: str
    value: str
    is_sure: bool


def options_of(text: str, where: str) -> list[Option]:
    """The options of all commands and lists of options in a script, in order.

    >>> script = 'TP=${TP:-4}; torchrun train.py --tp $TP --sp'
    >>> [(each.name, each.value) for each in options_of(script, "here")]
    [('tp', '4'), ('sp', 'true')]

    Raises:
        InputFileError: a quote is left open, or there are too many words.
    """
    found: list[Option] = []
    is_open = is_among = False
    for word, is_sure in _Script(where).words(text.replace("\r\n", "\n")):
        is_option = word.startswith("--") and len(word) > 2
        if is_option or _OVERRIDE.fullmatch(word):
            name, has_value, value = word.lstrip("-+").partition("=")
            found.append(Option(name, value if has_value else "true", is_sure))
        elif is_open and word not in ("", _STOP) and not _ALL_OF.fullmatch(word):
            found[-1] = replace(found[-1], value=word)
        elif is_among and word.startswith("$") and not word.endswith(("[@]}", ".py")):
            found.append(Option("", word, is_sure))
        is_open = is_option and "=" not in word
        is_among = word != _STOP and (is_among or is_option)
    return found


@dataclass(slots=True)
class _Script:
    where: str
    variables: dict[str, str] = field(default_factory=dict)
    depth: int = 0
    is_after_test: bool = False

    def words(self, text: str) -> Iterator[tuple[str, bool]]:
        """Words with their variables, and whether each stands under no condition."""
        begins_command, is_loop, in_list = True, False, 0
        for number, (kind, token) in enumerate(self._tokens(text)):
            if number > _MOST_WORDS:
                raise InputFileError(f"{self.where} holds more than {_MOST_WORDS:,} words.")
            if kind == "to":
                yield _STOP, True
                continue
            if kind == "stop":
                in_list = max(in_list + {"(": 1, ")": -1}.get(token, 0), 0)
                if not in_list:
                    begins_command = True
                    self.is_after_test = token in ("&&", "||")
                if token != "\n" or not in_list:
                    yield _STOP, True
                continue
            if begins_command and token in (*_BEGINS, *_ENDS):
                self.depth = max(self.depth + (1 if token in _BEGINS else -1), 0)
                begins_command, is_loop = False, token == "for"
                continue
            if is_loop:  # its variable has many values
                self.variables.pop(token, None)
            is_loop = False
            begins_command = begins_command and token in ("then", "else", "do", "{", "!")
            is_sure = not (self.depth or (self.is_after_test and _ASSIGNMENT.fullmatch(token)))
            yield from ((each, is_sure) for each in self._spread(token))

    def _tokens(self, text: str) -> Iterator[tuple[str, str]]:
        place = 0
        while found := _TOKEN.match(text, place):
            place = found.end()
            kind, token = found.lastgroup or "", found[0]
            if kind == "stop" and token in "'\"\\`":
                line = text.count("\n", 0, found.start()) + 1
                raise InputFileError(
                    f"{self.where} is no command line: the {token} of line {line} is left open."
                )
            if kind != "gap":
                yield kind, token

    def _spread(self, token: str) -> list[str]:
        """A word, or the words of a quoted list of options or command."""
        if token.startswith("`#"):  # a remark between the lines of a command
            return []
        is_set = _ASSIGNMENT.fullmatch(token)
        if is_set:
            value = self._value(is_set[3])
            if is_set[2]:
                value = self.variables.get(is_set[1], "") + value
            self._assign(is_set[1], value)
        else:
            value = self._value(token)
        alternatives = value.split(OR)
        if not all(each.startswith("--") for each in alternatives):
            alternatives = [value]
        parts = [part for each in alternatives for part in _bare(each).split()]
        if len(parts) > 1 and any(part.startswith("--") for part in parts):
            return [*parts, ""]
        return [] if is_set and not value.startswith("--") else [value]

    def _assign(self, name: str, value: str) -> None:
        before = self.variables.get(name, "")
        if (self.depth or self.is_after_test) and before and not value.startswith(before):
            kept = before.split(OR)
            value = before if not value or value in kept else f"{before}{OR}{value}"
        self.variables[name] = value[:_LONGEST]

    def _value(self, token: str) -> str:
        """A word as the command would get it."""
        if token.startswith("'") and token.endswith("'"):
            return token[1:-1]
        text = token
        for _ in range(_MOST_NESTED):
            changed = _SUM.sub(self._sum, _VARIABLE.sub(self._variable, text))
            if changed == text or len(changed) > _LONGEST:
                break
            text = changed
        return _bare(text)

    def _variable(self, found: re.Match[str]) -> str:
        name, how, default = found[1] or found[2], found[3], found[4]
        if how == "=":
            self.variables.setdefault(name, _bare(default))
        if (name in self.variables and how is None) or self.variables.get(name):
            return self.variables[name]
        return found[0] if how in (None, "?") else str(default)

    def _sum(self, found: re.Match[str]) -> str:
        said = found[1] if found[1] is not None else found[2]
        try:
            return str(_computed(ast.parse(said.strip(), mode="eval").body, self.variables))
        except (ValueError, SyntaxError, RecursionError, MemoryError, ZeroDivisionError):
            return found[0]


def _bare(text: str) -> str:
    """A text without the quotes and line ends of the shell."""
    return re.sub(r"\\\r?\n|[\"']|\\(?=[\"$`\\])", "", text)


_SIGNS: Mapping[type[ast.operator], Callable[[int, int], int]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.floordiv,
        ast.Mod: operator.mod,
    }
)


def _computed(node: ast.expr, variables: Mapping[str, str]) -> int:
    """A sum of whole numbers and variables.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        left, right = (_computed(side, variables) for side in (node.left, node.right))
        return _SIGNS[type(node.op)](left, right)
    said = variables.get(node.id, "") if isinstance(node, ast.Name) else None
    value = said if said is not None else getattr(node, "value", None)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        value = int(value)
    if type(value) is not int or value >= 10**9:
        raise ValueError("not a whole number")
    return value


_NAME = re.compile(
    r"(tensor|pipeline|virtual_pipeline|expert)_model_parallel_size|.+\.context_parallel_size"
)
_JUDGED = re.compile(
    r"(^|[._])(val|valid|validation|test|eval|evaluation|inference|infer)([._]|$)"
)
_REFERENCE = re.compile(r"\$\{(\.*)(\w[\w.]*)\}")
_RESOLVED = re.compile(r"\$\{oc\.(?:env:\w+,|decode:)([^${}]*)\}")


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
    """The fields of all sections by their own names, with what they refer to.

    Those of sections about validation keep their dotted paths.
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
    """The value of a field, or of the one that it names in the manner of OmegaConf."""

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
    """Add a field; one that is there with another value is refused where it is read."""
    before = found.setdefault(name, value)
    if before != value and not isinstance(before, Twice):
        found[name] = Twice(
            f"{where} as {shown(before)} and as {shown(value)}; leave the one that holds."
        )


def command_line_document(text: str, where: str) -> tuple[dict[str, Any], list[str]]:
    """The options in a command line or in the shell script around it, as fields.

    Returns:
        The fields, and sentences about what is not sure of them.

    Raises:
        InputFileError: the text is not what a shell reads, or has no options.
    """
    found: dict[str, Any] = {}
    unsure, unknown = dict[str, None](), dict[str, None]()
    for option in options_of(text, where):
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
    if "expert_model_parallel_size" in found:
        found.setdefault("moe_token_dispatcher_type", "allgather")  # what arguments.py has
    remarks = [
        f"{sentence}: {', '.join(shown(name)[1:-1] for name in names)}."
        for sentence, names in (
            ("Stands under a condition of the script, which is taken to hold", unsure),
            ("Only a shell can say what stands for", unknown),
        )
        if names
    ]
    return found, remarks


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
    fields.skip("", "_target_", "_partial_", "_call_")
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
    fields.skip("", *_TUNING, *_MEETING)
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
    """Devices that the launcher is told of; 0 if it is not, or by what only a shell can say."""

    def count(*names: str) -> int:
        found = 0
        for name in names:
            said = fields.take(name)
            if isinstance(said, str | list) and said not in ("auto", "gpu"):
                fields.remark(
                    f"{name} is {shown(said)}: the cluster says how many devices there are."
                )
            elif not isinstance(said, str):
                found = found or fields.number("", name, 0, least=-1)
        return found

    return max(count(*_HOSTS), 0) * max(count(*_PER_HOST), 0)


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
    if fields.flag("", "fsdp"):  # NeMo's
        kind = fields.word("", "fsdp_sharding_strategy", "full")
        if kind not in _NEMO_STAGES:
            raise LayoutError(f"fsdp_sharding_strategy {shown(kind)} is none that is known.")
        return {"zero": str(_NEMO_STAGES[kind]), "dp_replicate": "0" if kind == "hybrid" else "1"}
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
_NEMO_STAGES = {"full": 3, "grad": 2, "hybrid": 3}
_PER_HOST = ("devices", "nproc_per_node", "gpus_per_node", "num_gpus")
_HOSTS = ("num_nodes", "nnodes")
_MEETING = ("node_rank", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id")
LAUNCHER = (*_PER_HOST, *_HOSTS, "fsdp")
"""Fields that other programs' files have, too."""
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
    "stage", "cp_comm_type", "eval_batch_size", "micro_batch_size_eval",
)  # fmt: skip
"""Fields that change only speed."""
