import dataclasses
import math
import os
from pathlib import Path

import pytest

from heterog.cluster import Cluster, device_type
from heterog.cluster.topology import Sends
from heterog.errors import InputFileError, UnknownNameError
from heterog.units import GIB

GOOD = """\
schema_version: 1
name: lab
hosts:
  - name: A
    devices: [{type: V100-16GB, count: 2}]
    intra: nvlink_v100
    nic: {line_rate: 100 Gbit/s}
  - name: B
    devices:
      - type: T4
    nic:
      line_rate: 50 Gbit/s
"""


def load(text: str, folder: Path) -> Cluster:
    path = folder / "lab.yaml"
    path.write_text(text, encoding="utf-8")
    return Cluster.load(path)


def with_device(entry: str, folder: Path, more: str = "") -> Cluster:
    return load(
        f"schema_version: 1\nname: lab\n{more}hosts:\n- name: A\n  devices:\n  - {entry}\n", folder
    )


def test_defaults(tmp_path: Path) -> None:
    cluster = load(GOOD, tmp_path)
    assert cluster.efficiency == 0.7
    assert cluster.calibration is None
    assert [d.name for d in cluster.devices] == ["A:0", "A:1", "B:0"]
    assert [d.usable_memory_bytes // GIB for d in cluster.devices] == [15, 15, 14]
    assert [h.nic_latency_s for h in cluster.hosts] == [20e-6, 20e-6]
    assert cluster.hosts[1].intra.kind == "loopback"
    assert cluster.hosts[0].cpu_quota is None


def test_count_of_hosts_and_neighbouring_device_entries(tmp_path: Path) -> None:
    cluster = load(
        """\
schema_version: 1
name: lab
efficiency: 9e-1
reserved_memory: 0.5 GiB
hosts:
  - name: B
    count: 2
    devices: [{type: t4}, {type: a10, usable_memory: 10 GiB}]
    intra: {kind: pcie4, bandwidth: 18 GB/s, latency: 8 us, shared: true}
    nic: {line_rate: 25 Gbit/s, latency: 15 us}
""",
        tmp_path,
    )
    assert [h.name for h in cluster.hosts] == ["B0", "B1"]
    assert [d.name for d in cluster.devices] == ["B0:0", "B0:1", "B1:0", "B1:1"]
    assert [t.name for t in cluster.device_types] == ["T4", "A10"]
    assert [d.usable_memory_bytes / GIB for d in cluster.devices] == [14.5, 10, 14.5, 10]
    assert cluster.efficiency == 0.9
    assert cluster.latency_s(0, 1) == 8e-6
    assert cluster.latency_s(0, 2) == 15e-6
    assert cluster.bottleneck_bytes_per_s(0, 1) == 18e9
    assert cluster.resources[cluster.route(0, 1)[0]].name == "B0 bus"


def test_written_and_default_latencies_agree(tmp_path: Path) -> None:
    written = GOOD.replace(
        "nvlink_v100", "{kind: nvlink, bandwidth: 16 GB/s, latency: 5 us, shared: false}"
    ).replace("100 Gbit/s}", "100 Gbit/s, latency: 20 us}")
    assert load(written, tmp_path) == load(GOOD, tmp_path)


def test_overrides_make_distinct_types(tmp_path: Path) -> None:
    cluster = load(
        """\
schema_version: 1
name: lab
hosts:
  - name: A
    devices:
      - {type: V100-16GB}
      - {type: V100-16GB, peak_flops: 14 TFLOP/s}
      - {type: V100-16GB, peak_flops: {float16: 100 TFLOP/s}, launch_overhead: 5 us}
      - {type: V100-16GB, peak_flops: 1.4e+13}
      - {type: V100-16GB, memory_bandwidth: 800 GB/s, type_name: tired V100}
      - {type: V100-16GB, compute_efficiency: 0.6}
      - {type: V100-16GB, compute_efficiency: 0.5, memory_efficiency: 0.7}
    intra: pcie3
""",
        tmp_path,
    )
    base = device_type("V100-16GB")
    assert [t.name for t in cluster.device_types] == [
        "V100-16GB",
        "V100-16GB-custom",
        "V100-16GB-custom2",
        "tired V100",
        "V100-16GB-custom3",
    ]
    assert cluster.type_index == (0, 1, 2, 1, 3, 0, 4)
    first, second, tired, last = cluster.device_types[1:]
    assert dict(first.peak_flops_per_s) == dict(base.peak_flops_per_s) | {"float32": 14e12}
    assert second.peak_flops_per_s["float16"] == 100e12
    assert second.launch_overhead_s == 5e-6
    assert tired.memory_bandwidth_bytes_per_s == 800e9
    assert tired.memory_bytes == base.memory_bytes
    assert (last.compute_efficiency, last.memory_efficiency) == (0.5, 0.7)
    assert last.source == f"{base.source}; cluster file"
    cluster.save(tmp_path / "again.yaml")
    assert Cluster.load(tmp_path / "again.yaml") == cluster


def test_a_type_written_in_full(tmp_path: Path) -> None:
    cluster = with_device(
        "type: {name: NPU, peak_flops: 20 TFLOP/s, memory_bandwidth: 1 TB/s, memory: 32 GiB}",
        tmp_path,
    )
    (kind,) = cluster.device_types
    assert (kind.name, dict(kind.peak_flops_per_s)) == ("NPU", {"float32": 20e12})
    assert (kind.memory_bandwidth_bytes_per_s, kind.memory_bytes) == (1e12, 32 * GIB)
    assert (kind.compute_efficiency, kind.launch_overhead_s) == (0.6, 10e-6)


def test_quota_slows_a_catalogue_cpu_and_nothing_else(tmp_path: Path) -> None:
    text = """\
schema_version: 1
name: testbed
hosts:
  - {name: r0, devices: [{type: CPU}], nic: {line_rate: 1 Gbit/s}, testbed: {cpu_quota: 0.8}}
  - {name: r1, devices: [{type: CPU}], nic: {line_rate: 1 Gbit/s}, testbed: {cpu_quota: 0.4}}
  - {name: r2, devices: [{type: CPU}], nic: {line_rate: 1 Gbit/s}, testbed: {cpu_quota: 1}}
  - {name: r3, devices: [{type: T4}], nic: {line_rate: 1 Gbit/s}, testbed: {cpu_quota: 0.5}}
  - name: r4
    devices: [{type: CPU, compute_efficiency: 0.3}]
    nic: {line_rate: 1 Gbit/s}
    testbed: {cpu_quota: 0.4}
"""
    cluster = load(text, tmp_path)
    core = device_type("CPU")
    names = [d.type.name for d in cluster.devices]
    assert names == ["CPU@0.8", "CPU@0.4", "CPU", "T4", "CPU@0.4-custom"]
    assert [h.cpu_quota for h in cluster.hosts] == [0.8, 0.4, 1.0, 0.5, 0.4]
    slow = cluster.devices[1].type
    assert slow.peak_flops_per_s["float32"] == 0.4 * core.peak_flops_per_s["float32"]
    assert slow.memory_bandwidth_bytes_per_s == 0.4 * core.memory_bandwidth_bytes_per_s
    assert slow.launch_overhead_s == core.launch_overhead_s / 0.4
    assert cluster.devices[4].type.compute_efficiency == 0.3
    path = tmp_path / "again.yaml"
    cluster.save(path)
    assert Cluster.load(path) == cluster
    assert path.read_text().count("type: CPU,") == 3


def test_an_unthrottled_core_under_a_quota_survives_saving(tmp_path: Path) -> None:
    cluster = with_device("type: CPU", tmp_path)
    quota = dataclasses.replace(cluster.hosts[0], cpu_quota=0.5)
    by_hand = dataclasses.replace(cluster, hosts=(quota,))
    by_hand.save(tmp_path / "again.yaml")
    assert Cluster.load(tmp_path / "again.yaml") == by_hand


def test_who_executes_may_block_on_its_sends(tmp_path: Path) -> None:
    assert load(GOOD, tmp_path).sends == Sends.OVERLAPPED
    cluster = load(GOOD + "sends: blocking\n", tmp_path)
    assert cluster.sends == Sends.BLOCKING
    cluster.save(tmp_path / "again.yaml")
    assert Cluster.load(tmp_path / "again.yaml") == cluster
    record = cluster.to_dict()
    assert Cluster.from_dict(record) == cluster
    del record["sends"]  # as plans of earlier versions
    assert Cluster.from_dict(record).sends == Sends.OVERLAPPED


def test_calibration_is_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    cluster = load(GOOD + "calibration: data/lab.json\n", tmp_path)
    assert cluster.calibration == str(tmp_path / "data" / "lab.json")
    cluster.save(tmp_path / "inner" / "moved.yaml")
    assert "calibration: ../data/lab.json" in (tmp_path / "inner" / "moved.yaml").read_text()
    assert Cluster.load(tmp_path / "inner" / "moved.yaml") == cluster


def test_device_names_of_ones_own(tmp_path: Path) -> None:
    cluster = with_device("{type: T4, count: 2, names: [x, y]}\n  intra: pcie3", tmp_path)
    assert [d.name for d in cluster.devices] == ["x", "y"]
    cluster.save(tmp_path / "again.yaml")
    assert Cluster.load(tmp_path / "again.yaml") == cluster


def test_a_saved_file_is_for_people(tmp_path: Path) -> None:
    load(GOOD, tmp_path).save(tmp_path / "again.yaml")
    text = (tmp_path / "again.yaml").read_text()
    assert "- {type: V100-16GB, count: 2, usable_memory: 15 GiB}" in text
    assert "intra: nvlink_v100" in text
    assert "nic: {line_rate: 100 Gbit/s, latency: 20 us}" in text


def test_merge_keys_are_understood(tmp_path: Path) -> None:
    text = """\
schema_version: 1
name: lab
hosts:
  - &first
    name: A
    devices: [{type: T4}]
    nic: {line_rate: 50 Gbit/s}
  - <<: *first
    name: B
"""
    assert [h.name for h in load(text, tmp_path).hosts] == ["A", "B"]
    with pytest.raises(InputFileError, match=r"lab\.yaml, line 9, hosts\[1\]\.name: got 5; "):
        load(text.replace("name: B", "name: 5"), tmp_path)


ERRORS = [
    ("", "", "{path}: the file is empty; see 'heterog clusters'."),
    ("name: lab", "name: [lab", "{path}, line 3: not valid YAML: "),
    ("name: lab", "name: a\tb: c", "{path}, line 2: not valid YAML: "),
    ("name: lab", "name: a\x07", "{path}: not valid YAML: "),
    ("name: lab", "name: 2020-13-45", "{path}: not valid YAML: month must be in 1..12"),
    ("name: lab", "name: !!python/none x", "{path}, line 2: not valid YAML: could not"),
    ("name: lab", "name: lab\nname: b", "{path}, line 3, name: this field is there twice; "),
    (
        "name: lab",
        "name: lab\nsends: never",
        "{path}, line 3, sends: got 'never'; input should be 'overlapped' or 'blocking'.",
    ),
    (GOOD, "[1, 2]", "{path}, line 1: got [1, 2]; write a mapping of fields."),
    (GOOD, "--- {}\n--- {}", "{path}, line 2: not valid YAML: but found another document."),
    ("schema_version: 1\n", "", "{path}, line 1, schema_version: this field is required."),
    ("n: 1", "n: 2", "{path}, line 1, schema_version: got 2; input should be 1."),
    ("name: lab", "name: on", "{path}, line 2, name: got True; write a text, in quotes if YAML"),
    ("name: lab", "name: ''", "{path}, line 2, name: '' is empty; give it a name"),
    (
        "name: lab",
        "name: lab\neficiency: 0.7",
        "{path}, line 3, eficiency: unknown field; did you mean 'efficiency'? Known: "
        "schema_version, name, efficiency, reserved_memory, calibration, sends, execution, tf32, "
        "hosts, pairs, prices.",
    ),
    (
        "      line_rate",
        "      latancy: 5 us\n      line_rate",
        "{path}, line 12, hosts[1].nic.latancy: unknown field; did you mean 'latency'? Known: "
        "line_rate, kind, count, latency, collectives.",
    ),
    ("name: B", "2: B", "{path}, line 8, hosts[1].2: unknown field. Known: name, count, "),
    (
        "      line_rate: 50 Gbit/s",
        "      latency: 5 us",
        "{path}, line 11, hosts[1].nic: a NIC needs either its line_rate or its kind ('heterog "
        "links' lists them).",
    ),
    (
        "      line_rate: 50 Gbit/s",
        "      kind: infiniband_hrd",
        "{path}, line 11, hosts[1].nic: unknown network 'infiniband_hrd'; did you mean "
        "'infiniband_hdr'? Known: efa_p3dn, ",
    ),
    (
        "50 Gbit/s",
        "50 Gbps",
        "{path}, line 12, hosts[1].nic.line_rate: cannot read bandwidth '50 Gbps'; write a "
        "number and one of ['bit/s', ",
    ),
    ("50 Gbit/s", "0", "{path}, line 12, hosts[1].nic.line_rate: 0 is not above 0."),
    ("50 Gbit/s", "50", "hosts[1].nic.line_rate: 50 has no unit; write '10 Gbit/s', say."),
    ("50 Gbit/s", "'50'", "hosts[1].nic.line_rate: 50 has no unit; write '10 Gbit/s', say."),
    ("50 Gbit/s", "-1 GB/s", "hosts[1].nic.line_rate: '-1 GB/s' is not above 0."),
    ("50 Gbit/s", ".nan", "hosts[1].nic.line_rate: nan is not a finite number."),
    ("50 Gbit/s", ".inf", "hosts[1].nic.line_rate: inf is not a finite number."),
    ("50 Gbit/s", "1e999 B/s", "hosts[1].nic.line_rate: '1e999 B/s' is not at most 1e+24."),
    ("50 Gbit/s", "1e9999999 TB/s", "bandwidth '1e9999999 TB/s' is beyond any number; write a"),
    ("50 Gbit/s", "yes", "hosts[1].nic.line_rate: got True; write a number or a text."),
    ("50 Gbit/s", "[{x}]", "hosts[1].nic.line_rate: got [{'x': None}]; write a number or a"),
    (
        "50 Gbit/s",
        "50 Gbit/s\n      latency: -1 us",
        "{path}, line 13, hosts[1].nic.latency: '-1 us' is not at least 0.",
    ),
    ("hosts:", "efficiency: 0\nhosts:", "{path}, line 3, efficiency: 0 is not above 0."),
    ("hosts:", "efficiency: 1.5\nhosts:", "line 3, efficiency: 1.5 is not at most 1."),
    ("hosts:", "efficiency: .nan\nhosts:", "line 3, efficiency: nan is not a finite number."),
    ("hosts:", "efficiency: high\nhosts:", "line 3, efficiency: 'high' is no number"),
    ("hosts:", f"efficiency: {'a' * 9000}\nhosts:", f"line 3, efficiency: '{'a' * 56}... is no"),
    (
        "hosts:",
        "reserved_memory: 15 GiB\nhosts:",
        "{path}, line 3, reserved_memory: 15.0 GiB leaves nothing of the 15.0 GiB of T4; lower "
        "it or give that device its usable_memory.",
    ),
    (
        "hosts:",
        "reserved_memory: .inf\nhosts:",
        "{path}, line 3, reserved_memory: inf is not a finite number.",
    ),
    (
        "      - type: T4",
        "      - type: T4\n        usable_memory: 20 GiB",
        "{path}, line 11, hosts[1].devices[0].usable_memory: 20.0 GiB is more than the 15.0 GiB "
        "of T4; lower it.",
    ),
    (
        "      - type: T4",
        "      - type: T4\n        usable_memory: 0",
        "{path}, line 11, hosts[1].devices[0].usable_memory: 0 is not above 0.",
    ),
    (
        "type: T4",
        "type: T44",
        "{path}, line 10, hosts[1].devices[0].type: unknown device type 'T44'; did you mean 'T4'",
    ),
    ("type: T4", "type: 4", "hosts[1].devices[0].type: got 4; write a mapping of fields."),
    (
        "type: T4",
        "type: {name: NPU, peak_flops: 1 TFLOP/s, memory: 1 GiB}",
        "hosts[1].devices[0].type.memory_bandwidth: this field is required.",
    ),
    (
        "type: T4",
        "type: {name: NPU, peak_flops: {float16: 1e12}, memory: 1 GiB, memory_bandwidth: 1e9}",
        "{path}, line 10, hosts[1].devices[0].type: device type 'NPU' has no peak FLOP/s for "
        "float32; every type needs one.",
    ),
    (
        "type: T4",
        "type: T4\n        peak_flops: {int8: 1e12}",
        "{path}, line 11, hosts[1].devices[0].peak_flops.int8: got 'int8'; input should be "
        "'float64', 'float32', 'float16' or 'bfloat16'.",
    ),
    (
        "type: T4",
        "type: T4\n        peak_flops: fast",
        "{path}, line 11, hosts[1].devices[0].peak_flops: cannot read speed 'fast'; write a "
        "number and one of ['FLOP/s', ",
    ),
    (
        "type: T4",
        "type: T4\n        memory_bandwidth: 1 GB/s\n        type_name: V100-16GB",
        "{path}, line 12, hosts[1].devices[0].type_name: there is already a type 'V100-16GB' with "
        "other numbers; give each its own name.",
    ),
    ("type: T4", "type: T4\n        count: 0", "devices[0].count: 0 is not at least 1."),
    ("type: T4", "type: T4\n        count: .inf", "devices[0].count: inf is not a finite number."),
    ("type: T4", "type: T4\n        count: .nan", "devices[0].count: nan is not a finite number."),
    ("    nic:", "    count: .inf\n    nic:", "count: inf is not a finite number."),
    ("50 Gbit/s", "50 Gbit/s\n      count: .inf", "nic.count: inf is not a finite number."),
    (
        "type: T4",
        "type: T4\n        usable_memory: .nan",
        "devices[0].usable_memory: nan is not a finite number.",
    ),
    ("type: T4", "type: T4\n        count: 9999", "devices[0].count: 9999 is not at most 4096."),
    ("type: T4", "type: T4\n        count: two", "devices[0].count: got 'two'; input should be a"),
    (
        "type: T4",
        "type: T4\n        names: [a, b]",
        "{path}, line 11, hosts[1].devices[0].names: 2 names for a count of 1; write one per "
        "device.",
    ),
    (
        "type: T4",
        "type: T4\n        names: ['A:0']",
        "hosts[1].devices[0].names: there is already a device 'A:0'; give each its own name.",
    ),
    (
        "type: T4",
        "type: T4\n        count: 2",
        "{path}, line 8, hosts[1].intra: this field is required where a host has several "
        "devices; known names: nvlink_v100, "
        "nvlink_a100, nvlink4, ",
    ),
    (
        "nvlink_v100",
        "nvlink_v10",
        "{path}, line 6, hosts[0].intra: unknown link 'nvlink_v10'; did you mean 'nvlink_v100'?",
    ),
    (
        "nvlink_v100",
        "{kind: own, bandwidth: 0 GB/s}",
        "{path}, line 6, hosts[0].intra.bandwidth: '0 GB/s' is not above 0.",
    ),
    (
        "nvlink_v100",
        "{kind: own, bandwidth: 1 GB/s, shared: 3}",
        "{path}, line 6, hosts[0].intra.shared: got 3; input should be a valid boolean.",
    ),
    (
        "    nic: {line_rate: 100 Gbit/s}\n",
        "",
        "{path}, line 4, hosts[0].nic: this field is required where there are several hosts.",
    ),
    (
        "name: B",
        "name: A",
        "{path}, line 8, hosts[1].name: there is already a host 'A'; give each its own name.",
    ),
    (
        "name: B",
        "name: B\n    testbed: {cpu_quota: 1.5}",
        "{path}, line 9, hosts[1].testbed.cpu_quota: 1.5 is not at most 1.",
    ),
    (
        "devices: [{type: V100-16GB, count: 2}]",
        "devices: []",
        "{path}, line 5, hosts[0].devices: got []; list should have at least 1 item",
    ),
    ("devices: [{type: V100-16GB, count: 2}]", "devices: T4", "got 'T4'; write a list."),
    ("[{type: V100-16GB, count: 2}]", "[T4]", "devices[0]: got 'T4'; write a mapping of fields."),
    (
        "name: lab",
        "name: 1\nefficiency: 2\nreserved_memory: -1",
        "{path}, line 2, name: got 1; write a text, in quotes if YAML reads it as something "
        "else. (2 more after this one)",
    ),
    (
        "name: lab",
        "name: [aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa, bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb]",
        "bbbbbbbbbbbbbbb...; write a text",
    ),
]


@pytest.mark.parametrize(("old", "new", "text"), ERRORS)
def test_errors_name_file_line_and_field(old: str, new: str, text: str, tmp_path: Path) -> None:
    assert old in GOOD
    with pytest.raises(InputFileError) as caught:
        load(GOOD.replace(old, new) if old else new, tmp_path)
    said = str(caught.value)
    assert text.replace("{path}", str(tmp_path / "lab.yaml")) in said
    assert said.startswith(str(tmp_path / "lab.yaml"))
    assert "\n" not in said


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        Cluster.load("paper_8gp")
    assert "unknown cluster 'paper_8gp'; did you mean 'paper_8gpu'? Known: a100_v100_16, " in str(
        caught.value
    )


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    with pytest.raises(InputFileError) as caught:
        Cluster.load(path)
    assert f"cannot read cluster file {path}: No such file or directory. Give a YAML file" in str(
        caught.value
    )
    with pytest.raises(InputFileError, match="Is a directory"):
        Cluster.load(str(tmp_path))
    path.write_bytes(b"name: \xff")
    with pytest.raises(InputFileError, match=r"byte 6 is not UTF-8\. Give a YAML file"):
        Cluster.load(path)


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    cluster = load(GOOD, tmp_path)
    path = tmp_path / "missing" / "lab.yaml"
    with pytest.raises(InputFileError) as caught:
        cluster.save(path)
    assert str(caught.value) == (f"cannot write {path}: the folder {path.parent} does not exist.")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputFileError, match=r"cannot write .*: it is a folder"):
        cluster.save(tmp_path / "folder")
    assert sorted(os.listdir(tmp_path)) == ["folder", "lab.yaml"]


def test_a_recursive_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="line 2: an alias stands for a part of itself"):
        load("schema_version: 1\nname: &a [*a]\nhosts: []\n", tmp_path)


def test_what_would_take_all_memory_is_refused_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 10):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]")
    with pytest.raises(InputFileError, match="its aliases stand for more values than are read"):
        load("\n".join([*lines, f"name: *a{9}"]), tmp_path)
    with pytest.raises(InputFileError, match=r"line 1: nests too deeply for a cluster file"):
        load("[" * 40 + "]" * 40, tmp_path)
    with pytest.raises(InputFileError, match=r"line 1: .*nest"):  # libyaml may have its own limit
        load("[" * 100_000, tmp_path)
    with pytest.raises(InputFileError, match="says too much for a cluster file"):
        load("- a\n" * 200_000, tmp_path)
    with pytest.raises(InputFileError, match=r"has more than 1\.0 MiB, the most that is read"):
        load("#" * (2**20 + 1), tmp_path)
    many = GOOD.replace("name: B", "count: 4096\n    name: B")
    with pytest.raises(InputFileError, match="devices are more than are planned for, 2,048"):
        load(many.replace("count: 2}", "count: 4096}"), tmp_path)


@pytest.mark.parametrize("tag", ["!!bool x", "!!timestamp x", "!!int x", "!!float x", "!!set x"])
def test_tags_that_do_not_fit_are_no_traceback(tmp_path: Path, tag: str) -> None:
    with pytest.raises(InputFileError, match="not valid YAML"):
        load(GOOD.replace("name: lab", f"name: {tag}"), tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("name: lab", "name: 'a\"b'", r"name: 'a\"b' has '\"', which names cannot have"),
        ("name: A", "name: $(reboot)", "begins with something else than a letter"),
        ("name: A", 'name: "a\\nb"', r"has '\\n', which names cannot have"),
        ("intra: nvlink_v100", "intra: {kind: '<b>', bandwidth: 1 GB/s}", "begins with"),
    ],
)
def test_names_have_an_alphabet(tmp_path: Path, old: str, new: str, wrong: str) -> None:
    assert old in GOOD
    with pytest.raises(InputFileError, match=wrong):
        load(GOOD.replace(old, new), tmp_path)


def test_bandwidth_of_a_device_to_itself_is_infinite(tmp_path: Path) -> None:
    cluster = with_device("type: T4", tmp_path)
    assert cluster.num_hosts == cluster.num_devices == 1
    assert cluster.bottleneck_bytes_per_s(0, 0) == math.inf


def test_networks_by_name_and_number_of_ports(tmp_path: Path) -> None:
    for nic, gbit in (
        ("infiniband_hdr", 200.0),
        ("{kind: NDR, count: 8}", 3200.0),
        ("{line_rate: 25 Gbit/s, count: 2}", 50.0),
    ):
        cluster = load(
            "schema_version: 1\nname: lab\nhosts:\n"
            "  - {name: a, count: 2, devices: [{type: NVIDIA H100 80GB HBM3, count: 8}],\n"
            f"     intra: nvlink_h100, nic: {nic}}}\n",
            tmp_path,
        )
        host = cluster.hosts[0]
        assert host.nic_line_rate_bytes_per_s * host.num_nics * 8e-9 == pytest.approx(gbit)
        assert cluster.nic_bandwidth_bytes_per_s[0] == pytest.approx(0.7 * gbit * 1.25e8)
        assert cluster.devices[0].type.name == "H100"
        cluster.save(tmp_path / "again.yaml")
        assert "intra: nvlink4" in (tmp_path / "again.yaml").read_text()
        assert Cluster.load(tmp_path / "again.yaml") == cluster
