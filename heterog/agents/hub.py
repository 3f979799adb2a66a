"""Policies as folders that a hub can hold, read from any address that ``fsspec`` opens.

The weights are in ``model.safetensors``, or in ``weights.pt`` if safetensors is not installed.
``config.json`` has a digest of the weights and the rest of a policy's file: versions, sizes,
training and results. ``README.md`` is the card. Reading a folder runs no code from it.
"""

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import heterog
from heterog.agents.checkpoint import (
    MAX_FILE_BYTES,
    Checkpoint,
    checkpoint_of,
    packed,
    record_of,
    unpacked,
)
from heterog.errors import HeterogError, InputFileError
from heterog.files import (
    MAX_JSON_BYTES,
    parse_json,
    read_bytes,
    read_json,
    write_atomically,
    write_json,
)
from heterog.names import shown

SAFE, PLAIN = "model.safetensors", "weights.pt"
_TOLD = ("models", "clusters", "reward", "command", "num_evaluations", "seconds")
_CARD = """---
library_name: heterog
tags:
- reinforcement-learning
- distributed-training
---
# {name}

A policy that decides how a model is trained on unequal devices, of heterog {version}.

`heterog policy pull` makes a file of this folder, which `heterog plan` and `heterog evaluate` take
as a policy.

## Data and training

{told}

## Results

{results}

## Limits

It was trained on the models and clusters above; on others it may be worse than a search. Its
numbers are predictions of a simulator. It reads observations of version {observation} only.
"""


def pack(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a policy as a folder, new or one of a packed policy, which is renewed.

    Raises:
        InputFileError: a file of another origin would be replaced, or the system refuses.
    """
    record = record_of(checkpoint)
    weights = {name: each.contiguous() for name, each in record.pop("weights").items()}
    del record["training"]
    try:
        from safetensors.torch import save

        name, data = SAFE, save(weights)
    except ImportError:
        name, data = PLAIN, packed(weights)
    _refuse_others(folder, name, "config.json", "README.md")
    digest = hashlib.sha256(data).hexdigest()
    versions = {"heterog": heterog.__version__, "torch": torch.__version__}
    stored = {"weights": {"file": name, "sha256": digest}, "versions": versions}
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, data)
        write_json(folder / "config.json", record | stored, indent=1)
        write_atomically(folder / "README.md", _card(record).encode())
    except BaseException:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _refuse_others(folder: Path, *names: str) -> None:
    """Refuse to replace files that are not of a packed policy."""
    there = [name for name in names if (folder / name).exists()]
    if there and not _is_packed(folder):
        raise InputFileError(
            f"cannot write {folder}: its {there[0]} is not of a packed policy; name a new folder."
        )


def _is_packed(folder: Path) -> bool:
    """Whether a folder holds a policy that ``pack`` wrote."""
    try:
        found = read_json(folder / "config.json", "policy")
    except InputFileError:
        return False
    versions = found.get("versions") if isinstance(found, dict) else None
    return isinstance(versions, dict) and "heterog" in versions


def pull(address: str) -> Checkpoint:
    """Read a policy's folder.

    Args:
        address: A folder, or an ``fsspec`` address: ``https://...``, ``s3://...``, ``hf://...``.

    Raises:
        InputFileError: a file is missing or damaged, or the policy does not fit this heterog.
    """
    where = f"policy {address}"
    config = parse_json(_read(address, "config.json", MAX_JSON_BYTES), where)
    stored = config.pop("weights", None) if isinstance(config, dict) else None
    if not isinstance(stored, dict) or stored.get("file") not in (SAFE, PLAIN):
        raise InputFileError(
            f"{where}: config.json names no weights; pack the policy by 'heterog policy pack'."
        )
    data = _read(address, stored["file"], MAX_FILE_BYTES)
    if hashlib.sha256(data).hexdigest() != stored.get("sha256"):
        raise InputFileError(
            f"{where}: {stored['file']} is not what config.json was written for; it is damaged or "
            "of another policy. Get the whole folder again."
        )
    config.pop("versions", None)
    weights = _weights(data, stored["file"], where)
    return checkpoint_of(config | {"weights": weights, "training": {}}, where)


def _weights(data: bytes, name: str, where: str) -> Any:
    if name == PLAIN:
        return unpacked(data, where)
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load
    except ImportError as error:
        raise HeterogError(f"{where} needs 'pip install safetensors'.") from error
    try:
        return load(data)
    except SafetensorError as error:
        raise InputFileError(f"{where}: {name} is damaged: {error}.") from error


def _read(address: str, name: str, most_bytes: int) -> bytes:
    if "://" not in address:
        return read_bytes(Path(address) / name, "policy", most_bytes)
    place = f"{address.rstrip('/')}/{name}"
    try:
        import fsspec

        with fsspec.open(place, "rb") as file:
            data: bytes = file.read(most_bytes + 1)
    except Exception as error:  # each kind of address fails in its own way
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputFileError(
            f"cannot read {shown(place)}: {reason}. Download the folder and give its path."
        ) from error
    if len(data) > most_bytes:
        raise InputFileError(f"{shown(place)} has more than {most_bytes} bytes.")
    return data


def _card(record: Mapping[str, Any]) -> str:
    provenance = record["provenance"]
    history = provenance.get("history") or [{}]
    told = {name: provenance[name] for name in _TOLD if name in provenance}
    told |= provenance.get("training_config", {})
    return _CARD.format(
        name=provenance.get("name", "policy"),
        version=heterog.__version__,
        told="\n".join(_items(told)) or "nothing was recorded",
        results="\n".join(_items(history[-1])) or "nothing was recorded",
        observation=record["observation_version"],
    )


def _items(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        told = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        yield f"- {name}: {told}"
