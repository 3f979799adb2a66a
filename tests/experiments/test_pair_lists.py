"""Lists of pairs."""

import json
from pathlib import Path

import pytest

from heterog.agents.benchmark.pair_lists import read_pairs
from heterog.cluster import Cluster
from heterog.errors import InputFileError

PAIRS = Path(__file__).parents[2] / "experiments" / "pairs"
SPLITS = ("train", "validation", "test")


def test_a_line_names_a_model_and_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    (tmp_path / "c.yaml").write_text("")
    lines = (
        '{"model": "vgg19", "cluster": "c.yaml"}',
        '{"graph": "g.json", "cluster": "paper_8gpu"}',
        '["gpt2", "paper_8gpu"]',
        "# nothing",
        "gpt2 paper_8gpu",
    )
    path.write_text("\n".join(lines))
    found = [(line.model, line.cluster) for line in read_pairs(path)]
    own = str((tmp_path / "c.yaml").resolve())
    assert found[:2] == [("vgg19", own), ("g.json", "paper_8gpu")]
    assert found[2:] == [("gpt2", "paper_8gpu")] * 2
    path.write_text('{"model": "vgg19"}')
    with pytest.raises(InputFileError, match="line 1: write"):
        read_pairs(path)


def test_lists_have_no_family_and_no_cluster_in_common() -> None:
    families: dict[str, set[str]] = {}
    clusters: dict[str, set[str]] = {}
    for split in SPLITS:
        lines = [json.loads(line) for line in (PAIRS / f"{split}.jsonl").read_text().splitlines()]
        names = [line["model"].rpartition(":")[2] for line in lines]
        families[split] = {name.rpartition("_")[0] for name in names}
        clusters[split] = {line["cluster"] for line in lines}
        assert len(clusters[split]) == len(lines)
    for each in (families, clusters):
        assert sum(map(len, each.values())) == len(set().union(*each.values()))


def test_a_third_of_the_test_pairs_has_at_least_64_devices() -> None:
    sizes = [Cluster.load(line.cluster).num_devices for line in read_pairs(PAIRS / "test.jsonl")]
    assert len(sizes) == 24
    assert sum(size >= 64 for size in sizes) == 8
    assert (min(sizes), max(sizes)) == (2, 758)
