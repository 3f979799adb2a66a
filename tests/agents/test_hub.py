"""Policies as folders: what is packed is pulled again, from any address, or refused by reason."""

import json
import sys
from pathlib import Path

import pytest
import torch

from heterog import cli
from heterog.agents import hub
from heterog.agents.checkpoint import load_checkpoint
from heterog.agents.hub import PLAIN, SAFE, pack, pull
from heterog.envs.observation import OBSERVATION_VERSION
from heterog.errors import InputFileError


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    pack(load_checkpoint("default"), tmp_path / "packed")
    return tmp_path / "packed"


def changed(folder: Path, **values: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return str(folder)


@pytest.mark.parametrize("name", [SAFE, PLAIN])
def test_what_is_packed_is_pulled_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == PLAIN:
        monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    else:
        pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    cli.app(["policy", "pack", "default", "packed"], standalone_mode=False)
    cli.app(["policy", "pull", "packed", "-o", "again.pt"], standalone_mode=False)
    again, before = load_checkpoint("again.pt"), load_checkpoint("default")
    assert (tmp_path / "packed" / name).is_file()
    assert again.policy.config == before.policy.config
    weights = again.policy.state_dict()
    assert all(torch.equal(weights[key], each) for key, each in before.policy.state_dict().items())
    assert again.provenance["models"] == list(before.provenance["models"])
    card = (tmp_path / "packed" / "README.md").read_text()
    assert "- seed: 0" in card
    assert "vgg19" in card


def test_files_of_others_are_not_replaced(packed: Path, tmp_path: Path) -> None:
    pack(load_checkpoint("heldout"), packed)  # one policy after the other
    for name in ("README.md", "config.json"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(InputFileError, match=f"its {name} is not of a packed policy"):
            pack(load_checkpoint("default"), tmp_path)
        assert (tmp_path / name).read_text() == "{}"
        (tmp_path / name).unlink()


def test_nothing_is_left_of_a_folder_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise InputFileError("No space left on device")

    monkeypatch.setattr(hub, "write_json", full)
    with pytest.raises(InputFileError, match="No space"):
        pack(load_checkpoint("default"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_any_address_of_fsspec_is_read(packed: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").put(str(packed), "/hub/mine", recursive=True)
    assert pull("memory://hub/mine").policy.config == load_checkpoint("default").policy.config
    with pytest.raises(InputFileError, match=r"cannot read 'memory://none/config\.json'"):
        pull("memory://none")


def test_what_does_not_fit_says_why(packed: Path) -> None:
    with pytest.raises(InputFileError, match="trained on observations of version 99"):
        pull(changed(packed, observation_version=99))
    changed(packed, observation_version=OBSERVATION_VERSION)
    with pytest.raises(InputFileError, match="names no weights"):
        pull(changed(packed, weights={"file": "../evil.pt", "sha256": ""}))
    with pytest.raises(InputFileError, match=r"is not what config\.json was written for"):
        pull(changed(packed, weights={"file": SAFE, "sha256": "0"}))
    with pytest.raises(InputFileError, match="nowhere"):
        pull(str(packed / "nowhere"))
