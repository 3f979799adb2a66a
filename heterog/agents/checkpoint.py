"""Policies on disk.

One file, read with ``weights_only=True``: the configuration, the weights, the version of the
observation that they were trained on, and where they come from. A checkpoint of training holds the
trainer's state besides.
"""

import io
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from heterog.agents.config import PolicyConfig
from heterog.agents.encoder import BUILT_IN, ENCODERS
from heterog.agents.policy import Policy
from heterog.envs.observation import OBSERVATION_VERSION
from heterog.errors import InputFileError, UnknownNameError
from heterog.files import write_atomically

SCHEMA_VERSION = 1
_SHIPPED = resources.files("heterog.agents") / "policies"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A policy and what is known about it.

    Attributes:
        policy: the network with its weights.
        provenance: seed, training models and clusters, settings, what was reached.
        training: state of the trainer, empty in a policy that was only saved to be used.
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
    buffer = io.BytesIO()
    torch.save(
        {
            "schema_version": SCHEMA_VERSION,
            "observation_version": OBSERVATION_VERSION,
            "config": asdict(checkpoint.policy.config),
            "weights": checkpoint.policy.state_dict(),
            "provenance": dict(checkpoint.provenance),
            "training": dict(checkpoint.training),
        },
        buffer,
    )
    write_atomically(Path(path), buffer.getvalue())


def load_checkpoint(source: str | Path) -> Checkpoint:
    """Read a policy.

    Args:
        source: name of a shipped policy, or a file.

    Raises:
        InputFileError: the file is missing, is no policy, was trained on other observations, or
            has an encoder that is not known here.
        UnknownNameError: no shipped policy has that name.
    """
    if str(source) in shipped_policies():
        data = (_SHIPPED / f"{source}.pt").read_bytes()
    else:
        path = Path(source)
        if not path.suffix and not path.exists():
            raise UnknownNameError("policy", str(source), shipped_policies())
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputFileError(f"cannot read policy {path}: {error.strerror}.") from error
    try:
        record = torch.load(io.BytesIO(data), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputFileError(f"{source} is no policy of heterog: {reason[:120]}") from error
    return _from_record(record, str(source))


def _from_record(record: Any, source: str) -> Checkpoint:
    if not isinstance(record, dict) or record.get("schema_version") != SCHEMA_VERSION:
        version = record.get("schema_version") if isinstance(record, dict) else None
        raise InputFileError(
            f"policy {source} has schema_version {version!r}; this heterog reads {SCHEMA_VERSION}."
        )
    if record.get("observation_version") != OBSERVATION_VERSION:
        raise InputFileError(
            f"policy {source} was trained on observations of version "
            f"{record.get('observation_version')!r}; this heterog makes version "
            f"{OBSERVATION_VERSION}. Train it again with 'heterog train'."
        )
    try:
        config = PolicyConfig(**record["config"])
        if config.encoder not in ENCODERS:
            raise InputFileError(
                f"policy {source} has the encoder '{config.encoder}', which is not one of "
                f"heterog's ({', '.join(BUILT_IN)}); give its file with --encoder "
                f"FILE.py:{config.encoder}, or enter it in heterog.agents.encoder.ENCODERS."
            )
        policy = Policy(config)
        policy.load_state_dict(record["weights"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise InputFileError(f"policy {source} does not fit together: {reason}") from error
    policy.eval()
    return Checkpoint(policy=policy, provenance=record["provenance"], training=record["training"])
