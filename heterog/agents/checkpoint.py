"""Policies on disk.

One file, read with ``weights_only=True``: the configuration, the weights, the version of the
observation that they were trained on, and their provenance. A checkpoint of training also has the
trainer's state.
"""

import io
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from heterog.agents.config import PolicyConfig
from heterog.agents.encoder import BUILT_IN, ENCODERS
from heterog.agents.policy import Policy
from heterog.envs.observation import OBSERVATION_VERSION
from heterog.errors import InputFileError, UnknownNameError
from heterog.files import read_bytes, write_atomically
from heterog.names import shown
from heterog.records import Name, Number, Record, parse_record
from heterog.units import GIB

SCHEMA_VERSION = 1
MAX_FILE_BYTES = GIB
"""Most bytes of a file: a hundred times a shipped policy with its state of training."""
_SHIPPED = resources.files("heterog.agents") / "policies"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A policy and its record.

    Attributes:
        policy: Network with its weights.
        provenance: Seed, training models and clusters, settings, results.
        training: State of the trainer; empty in a policy that is saved for use only.
    """

    policy: Policy
    provenance: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)


def shipped_policies() -> tuple[str, ...]:
    """Names of the policies that come with the package."""
    return tuple(
        sorted(entry.name[:-3] for entry in _SHIPPED.iterdir() if entry.name.endswith(".pt"))
    )


def save_checkpoint(path: str | Path, checkpoint: Checkpoint) -> None:
    """Write a policy, whole or not at all."""
    write_atomically(Path(path), packed(record_of(checkpoint)))


def record_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """A policy as plain values and tensors; ``checkpoint_of`` reads them."""
    return {
        "schema_version": SCHEMA_VERSION,
        "observation_version": OBSERVATION_VERSION,
        "config": asdict(checkpoint.policy.config),
        "weights": checkpoint.policy.state_dict(),
        "provenance": dict(checkpoint.provenance),
        "training": dict(checkpoint.training),
    }


def load_checkpoint(source: str | Path) -> Checkpoint:
    """Read a policy.

    Args:
        source: Name of a shipped policy, or a file.

    Raises:
        InputFileError: the file is missing, is no policy, was trained on other observations, or
            has an unknown encoder.
        UnknownNameError: no shipped policy has that name.
    """
    if str(source) in shipped_policies():
        data = (_SHIPPED / f"{source}.pt").read_bytes()
    else:
        path = Path(source)
        if not path.suffix and not path.exists():
            raise UnknownNameError("policy", str(source), shipped_policies())
        data = read_bytes(path, "policy", MAX_FILE_BYTES)
    return checkpoint_of(unpacked(data, f"policy {source}"), f"policy {source}")


def packed(values: object) -> bytes:
    """A file of ``torch.save``; ``unpacked`` reads it."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def unpacked(data: bytes, where: str) -> Any:
    """The values of a file of ``torch.save``; its members must be uncompressed and intact.

    Raises:
        InputFileError: the file is damaged, unpacks to more than its own size, or holds code.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            packed = [member for member in members if member.compress_type != zipfile.ZIP_STORED]
            if packed or sum(member.file_size for member in members) > len(data):
                raise InputFileError(f"{where} is no policy of heterog: it is compressed.")
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError) as error:
        raise InputFileError(f"{where} is no policy of heterog: {_reason(error)}.") from error
    if damaged is not None:
        raise InputFileError(f"{where} is damaged: the checksum of {shown(damaged)} is wrong.")
    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    # Its unpickler fails on damaged data in many different ways.
    except Exception as error:
        raise InputFileError(f"{where} is no policy of heterog: {_reason(error)}.") from error


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if not line.endswith(":")]
    return (lines[0][:120].rstrip(".") if lines else "") or type(error).__name__


class _ConfigRecord(Record):
    encoder: Name
    width: Annotated[int, Field(ge=1, le=4096)]
    num_heads: Annotated[int, Field(ge=1, le=256)]
    num_rounds: Annotated[int, Field(ge=1, le=64)]
    rank: Annotated[int, Field(ge=0, le=4096)]
    stay_bias: Number


class _PolicyRecord(Record):
    schema_version: int
    observation_version: int
    config: _ConfigRecord
    weights: dict[str, Any]
    provenance: dict[str, Any]
    training: dict[str, Any]


def checkpoint_of(record: object, where: str) -> Checkpoint:
    """The policy of a record; raises an ``InputFileError`` that says what does not fit."""
    version = record.get("observation_version") if isinstance(record, dict) else None
    if isinstance(record, dict) and record.get("schema_version") == SCHEMA_VERSION:
        if version != OBSERVATION_VERSION:
            raise InputFileError(
                f"{where} was trained on observations of version {shown(version)}; this heterog "
                f"makes version {OBSERVATION_VERSION}. Train it again with 'heterog train'."
            )
    found = parse_record(record, _PolicyRecord, where, versions=(SCHEMA_VERSION,))
    if found.config.encoder not in ENCODERS:
        encoder = found.config.encoder
        raise InputFileError(
            f"{where} has the encoder '{encoder}', which is not one of heterog's "
            f"({', '.join(BUILT_IN)}); give its file by `encoder` FILE.py:{encoder}, or enter "
            "it in heterog.agents.encoder.ENCODERS."
        )
    for name, value in found.weights.items():
        # A tensor that repeats its elements takes no memory until it is used.
        if not isinstance(value, Tensor) or value.is_sparse or not value.is_contiguous():
            raise InputFileError(f"{where}: field {shown(f'weights.{name}')} is no tensor.")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise InputFileError(
                f"{where}: field {shown(f'weights.{name}')} holds numbers that are not finite."
            )
    try:
        config = PolicyConfig(**found.config.model_dump())
        if config.encoder in BUILT_IN:  # on meta, a config with wrong sizes takes no memory
            with torch.device("meta"):
                Policy(config).load_state_dict(found.weights, assign=True)
        policy = Policy(config)
        policy.load_state_dict(found.weights)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputFileError(f"{where} does not fit together: {_reason(error)}.") from error
    policy.eval()
    return Checkpoint(policy=policy, provenance=found.provenance, training=found.training)
