"""Layouts in files of torchtitan, DeepSpeed and Accelerate."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from heterog.errors import HeterogError, InputFileError
from heterog.strategy.layouts.fields import LayoutFile
from heterog.strategy.layouts.files import read_layout
from heterog.strategy.layouts.layout import Layout, LayoutError, Recompute, parse_layout

TORCHTITAN = """
[model]
name = "llama3"
[training]
local_batch_size = 8
global_batch_size = 256
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 2
context_parallel_degree = 1
[activation_checkpoint]
mode = "full"
"""
DEEPSPEED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW"},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
    },
}
FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: false
  fsdp_sharding_strategy: 1
  fsdp_activation_checkpointing: true
machine_rank: 0
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
MEGATRON = """
distributed_type: MEGATRON_LM
megatron_lm_config:
  megatron_lm_gradient_clipping: 1.0
  megatron_lm_num_micro_batches: 2
  megatron_lm_pp_degree: 2
  megatron_lm_recompute_activations: true
  megatron_lm_sequence_parallelism: true
  megatron_lm_tp_degree: 2
  megatron_lm_use_distributed_optimizer: true
num_processes: 8
"""


def read(folder: Path, name: str, text: str) -> LayoutFile:
    file = folder / name
    file.write_text(text)
    return read_layout(file)


def test_torchtitan(tmp_path: Path) -> None:
    found = read(tmp_path, "llama3.toml", TORCHTITAN)
    assert found.layout == Layout(
        tp=8,
        pp=4,
        micro_batch=2,
        zero=2,  # its default does not gather again beside a pipeline
        recompute=Recompute.FULL,
        schedule="interleaved",
        sequence_parallel=True,
    )
    assert found.batch_size == 256
    assert found.remarks[0].startswith("pipeline_parallel_first_ and last_stage_less_layers are 1")
    assert found.remarks[1:] == ("Not used from the file: training.seq_len.",)
    less = "".join(f"pipeline_parallel_{end}_stage_less_layers = 0\n" for end in ("first", "last"))
    again = TORCHTITAN.replace('"default"', '"always"').replace(
        "[activation", f"{less}[activation"
    )
    found = read(tmp_path, "llama3.toml", again)
    assert found.layout.zero == 3
    assert found.remarks == ("Not used from the file: training.seq_len.",)


def test_torchtitan_with_split_points_and_replicas(tmp_path: Path) -> None:
    text = """
[training]
local_batch_size = 4
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 1
pipeline_parallel_degree = 2
pipeline_parallel_split_points = ["layers.2", "layers.4", "layers.6"]
pipeline_parallel_schedule = "interleaved1f1b"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
    found = read(tmp_path, "a.toml", text)
    assert found.layout.chunks == 2
    assert found.layout.split == ("layers.2", "layers.4", "layers.6")
    assert (found.layout.dp, found.layout.zero) == (2, 0)
    assert found.layout.recompute == Recompute.OP


@pytest.mark.parametrize(("option", "every"), [('"2"', 2), ('"1"', 1), ('"0"', 1)])
def test_torchtitan_checkpoints_every_so_many_layers(
    tmp_path: Path, option: str, every: int
) -> None:
    text = f'[activation_checkpoint]\nmode = "selective"\nselective_ac_option = {option}\n'
    found = read(tmp_path, "a.toml", text)
    assert (found.layout.recompute, found.layout.recompute_every) == (Recompute.FULL, every)
    assert not any("Selective" in remark for remark in found.remarks)


def test_copies_in_slices(tmp_path: Path) -> None:
    """What torchtitan, Accelerate and FSDP call replicas of shards, or hybrid sharding."""
    mesh = "[activation_checkpoint]\nmode = 'none'\n"
    mesh += "[parallelism]\ndata_parallel_replicate_degree = 2\n"
    assert read(tmp_path, "rest.toml", mesh).layout == Layout(zero=3, dp_replicate=2)
    both = mesh + "data_parallel_shard_degree = 4\n"
    assert read(tmp_path, "both.toml", both).layout == Layout(dp=8, zero=3, dp_replicate=2)
    sizes = "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"
    sizes += "  parallelism_config_dp_shard_size: 4\n"
    found = read(tmp_path, "mesh.yaml", FSDP + sizes).layout
    assert (found.dp, found.zero, found.dp_replicate) == (8, 3, 2)
    hybrid = "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n"
    assert read(tmp_path, "hybrid.yaml", hybrid).layout == Layout(zero=3, dp_replicate=0)


def test_deepspeed(tmp_path: Path) -> None:
    found = read(tmp_path, "ds.json", json.dumps(DEEPSPEED))
    assert found.layout == Layout(micro_batch=4, zero=2)
    assert found.batch_size == 64
    assert found.remarks == (
        "offload_optimizer to cpu is not modelled: everything stays on the devices.",
    )


def test_accelerate(tmp_path: Path) -> None:
    found = read(tmp_path, "fsdp.yaml", FSDP)
    assert found.layout == Layout(dp=8, zero=3, recompute=Recompute.FULL)
    assert not found.remarks
    found = read(tmp_path, "megatron.yml", MEGATRON)
    plain = Layout(tp=2, pp=2, dp=2, num_micro=2, zero=1, sequence_parallel=True)
    assert found.layout == replace(plain, recompute=Recompute.SELECTIVE)
    assert not found.remarks  # what becomes of it depends on the model
    mesh = FSDP + "parallelism_config:\n  parallelism_config_tp_size: 2\n"
    mesh += "  parallelism_config_dp_shard_size: 4\n"
    found = read(tmp_path, "mesh.yaml", mesh)
    assert (found.layout.tp, found.layout.dp, found.layout.zero) == (2, 4, 3)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.toml", "[parallelism]\ntensor_parallel_degree = '2'", "must be a whole number"),
        ("a.toml", "[parallelism]\ntensor_parallel_degree = true", "must be a whole number"),
        ("a.toml", "parallelism = 3", "must be a section"),
        ("a.toml", "[parallelism", "not valid TOML"),
        (
            "a.toml",
            "[parallelism]\nexpert_parallel_degree = 3\ntensor_parallel_degree = 2",
            "expert_parallel_degree 3 must be a multiple of the 2 devices of a replica",
        ),
        ("a.json", "[]", "not fields with names"),
        ("a.json", '{"zero_optimization": {"stage": 7}}', "stages of ZeRO"),
        ("a.json", '{"zero_optimization": {"stage": "x"}}', "must be a whole number"),
        ("a.yaml", "distributed_type: TPU", "cannot be said"),
        ("a.yaml", "distributed_type: FSDP\nnum_processes: 0x", "must be a whole number"),
        ("a.yaml", MEGATRON.replace("num_processes: 8", "num_processes: 6"), "times a number"),
        (
            "a.yaml",
            "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json",
            "give that file",
        ),
        (
            "a.yaml",
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARDS",
            "did you mean 'hybrid_shard'",
        ),
        ("a.yaml", "a: 1\na: 2", "there twice"),
        ("a.yaml", "", "the file is empty"),
        ("a.ini", "", "cannot tell what"),
        ("a.sh", "echo hello", "has no options"),
        ("a.sh", "echo 'hello", "is no command line"),
        ("a.txt", "--tensor-model-parallel-size $1", r"is '\$1'; it must be a whole number"),
        ("a.txt", "--micro-batch-size 2 --micro-batch-size 4", "as 2 and as 4"),
        (
            "a.yaml",
            "model: {tensor_model_parallel_size: 2}\nb: {micro_batch_size: 1}\n"
            "c: {micro_batch_size: 2}",
            "sections say 'micro_batch_size' as 1 and as 2",
        ),
        (
            "a.yaml",
            "{tensor_model_parallel_size: 2, trainer: {num_nodes: 1, devices: 3}}",
            "3 devices are not tp 2",
        ),
        (
            "a.yaml",
            "{pipeline_model_parallel_size: 2, pipeline_model_parallel_layout: Et|tm}",
            "pipeline_model_parallel_layout .* only decoder layers on each of a multiple of 2",
        ),
        (
            "a.json",
            '{"train_batch_size": 8, "moe": {"ep_size": 8}, "x": {"inference_tp_size": 2}}',
            "moe.ep_size is 8; only 1 can be said",
        ),
        (
            "a.txt",
            "--expert-model-parallel-size 6 --tensor-model-parallel-size 4 "
            "--expert-tensor-parallel-size 1",
            "expert_model_parallel_size 6 must be a multiple of the 4 devices",
        ),
        (
            "a.sh",
            "if x; then TP=2; else TP=8; fi; a.py --tensor-model-parallel-size $TP",
            "depends on a condition, as 2 and as 8",
        ),
        ("a.sh", "N=1; for N in 2 4; do a.py --tensor-model-parallel-size $N; done", "'.N'; it"),
        ("a.sh", "torchrun --nproc_per_node 8 a.py --per_device_batch 2", "another program"),
        ("a.yaml", "{micro_batch_size: 2, gradient_accumulation_steps: 4}", "another program"),
        (
            "a.toml",
            "[activation_checkpoint]\nmode = 'memory_budget'",
            "checkpoint.mode is 'memory",
        ),
        ("a.toml", "[parallelism]\nmodule_fqns_per_model_part = ['a']", "list of lists"),
        (
            "a.yaml",
            "{tensor_model_parallel_size: 2, fsdp: true, fsdp_sharding_strategy: half}",
            "fsdp_sharding_strategy 'half' is none",
        ),
        ("a.txt", "--ds-sequence-parallel-size 4", "ds_sequence_parallel_size is 4"),
        ("a.json", '{"sequence_parallel_size": 4}', "sequence_parallel_size is 4; Ulysses"),
        (
            "a.yaml",
            "distributed_type: FSDP\nparallelism_config: {parallelism_config_sp_size: 2}",
            "sp_size is 2",
        ),
        ("a.yaml", "model: {tensor_parallel: 2}", r"\(model\) .* another program.*tp=2"),
        ("a.json", '{"tensor_model_parallel_size": 2}', "another program"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    with pytest.raises((InputFileError, LayoutError), match=problem) as refused:
        read(tmp_path, name, text)
    assert len(str(refused.value).splitlines()) == 1
    assert str(tmp_path / name) in str(refused.value)


SCRIPT = """#!/bin/bash
# --tensor-model-parallel-size 64 in a comment
GPUS_PER_NODE=8
TP=${TP:-8}
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes 32
)
MODEL_ARGS=(
    --num-layers 96
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size 16 --num-layers-per-virtual-pipeline-stage 2
)
TRAINING_ARGS=" --micro-batch-size 1 \\
    --global-batch-size 1536 --sequence-parallel --use-distributed-optimizer "
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} $TRAINING_ARGS \\
    --recompute-granularity=selective --new-parallel-thing 3 --lr 1e-4
"""
NEMO = """
trainer: {devices: 8, num_nodes: 4, precision: bf16}
model:
  micro_batch_size: 1
  global_batch_size: 256
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 4
  virtual_pipeline_model_parallel_size: null
  activations_checkpoint_granularity: full
  activations_checkpoint_method: block
  activations_checkpoint_num_layers: 2
  optim: {name: distributed_fused_adam, lr: 6e-4}
"""
BRIDGE = """
model: {_target_: a.B, tensor_model_parallel_size: 2, sequence_parallel: true, num_layers: 30,
        pipeline_model_parallel_size: 4, decoder_first_pipeline_num_layers: 6}
train: {global_batch_size: 128, micro_batch_size: 1}
ddp: {use_megatron_fsdp: true, data_parallel_sharding_strategy: optim_grads}
"""


GPT3_175B = """#!/bin/bash
GPUS_PER_NODE=8
# Change for multinode config
NUM_NODES=1
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
DATA_PATH=$5 #<Specify path and file prefix>_text_document
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
GPT_MODEL_ARGS=(
    --num-layers 96
    --attention-backend auto # Can use (flash/fused/unfused/local)
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
)
MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size 8
	--pipeline-model-parallel-size 16
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${GPT_MODEL_ARGS[@]} ${TRAINING_ARGS[@]}
"""
MIXTRAL = """#!/bin/bash
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"1"}
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES)
MOE_ARGS=(
    --num-experts 8
    --moe-token-dispatcher-type alltoall
    --overlap-param-gather
)
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size 256 --bf16)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8
    --use-distributed-optimizer
    --sequence-parallel
)
"""


@pytest.mark.parametrize(
    ("name", "text", "layout", "batch"),
    [
        (
            "a.sh",
            SCRIPT,
            "tp=8,pp=16,dp=2,micro_batch=1,zero=1,recompute=selective,schedule=interleaved,chunks=3,"
            "sequence_parallel=true",
            1536,
        ),
        ("a.yaml", NEMO, "tp=4,pp=4,dp=2,micro_batch=1,zero=1,recompute=full", 256),
        (
            "a.yml",
            BRIDGE,
            "tp=2,pp=4,micro_batch=1,zero=2,layers=6-8-8-8,sequence_parallel=true",
            128,
        ),
        (
            "a.sh",
            GPT3_175B,
            "tp=8,pp=16,micro_batch=1",
            1536,
        ),
        ("a.sh", MIXTRAL, "tp=1,pp=4,ep=8,micro_batch=1,zero=1,sequence_parallel=true", 256),
        (
            "a.txt",
            "--nproc_per_node 8 --nnodes 32 --tensor-model-parallel-size 8 --num-layers 64 "
            "--expert-tensor-parallel-size 1 --expert-model-parallel-size 64 "
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 15 "
            "--decoder-last-pipeline-num-layers 17 --micro-batch-size 1 "
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "tp=8,pp=4,dp=8,ep=8,dispatch=allgather,micro_batch=1,recompute=full,"
            "layers=15-16-16-17",
            0,
        ),
        (
            "a.sh",
            "NNODES=$SLURM_NNODES\nARGS=' --nnodes $NNODES --nproc_per_node 8 --zero-stage 2 "
            "--tensor-model-parallel-size 4 --deepspeed-activation-checkpointing '",
            "tp=4,zero=2,recompute=full",
            0,
        ),
        (
            "a.yaml",
            "{distributed_type: TP, tp_config: {tp_size: 4}, num_processes: 8}",
            "tp=4,dp=2",
            0,
        ),
        (
            "a.sh",
            "ARGS=(--micro-batch-size 2)\nARGS+=(--tensor-model-parallel-size 2 --use-distributed-"
            "optimizer)\nARGS+=' --pipeline-model-parallel-size 4 '",
            "tp=2,pp=4,micro_batch=2,zero=1",
            0,
        ),
        (
            "a.yaml",
            "{distributed_type: FSDP, num_processes: 16, fsdp_config: {fsdp_version: 2}, "
            "parallelism_config: {parallelism_config_dp_replicate_size: 2, "
            "parallelism_config_dp_shard_size: 4, parallelism_config_cp_size: 2}}",
            "cp=2,dp=8,zero=3,dp_replicate=2",
            0,
        ),
        (
            "a.sh",
            "x.py --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout "
            r"Et\|\(tt\|\)*2,tL",
            "tp=1,pp=2,chunks=2,schedule=interleaved,layers=1-2-2-1",
            0,
        ),
        (
            "a.yaml",
            "{pipeline_model_parallel_size: 2, pipeline_model_parallel_layout: "
            "[[embedding, decoder], [decoder, decoder, loss]]}",
            "pp=2,layers=1-2",
            0,
        ),
        (
            "a.json",
            '{"zero_optimization": {"stage": 2}, "expert_parallel": {"enabled": true, '
            '"autoep_size": 4, "preset_model": "mixtral"}}',
            "ep=4,zero=2",
            0,
        ),
        (
            "a.yaml",
            "{distributed_type: MEGATRON_LM, megatron_lm_config: {megatron_lm_tp_degree: 2, "
            "megatron_lm_pp_degree: 2, megatron_lm_expert_model_parallel_size: 4, "
            "megatron_lm_num_micro_batches: 4, megatron_lm_recompute_granularity: full}}",
            "tp=2,pp=2,ep=4,num_micro=4,recompute=full",
            0,
        ),
        ("a.toml", "[parallelism]\ntensor_parallel_degree = 2\nenable_sequence_parallel = false\n"
         "[activation_checkpoint]\nmode = 'none'", "tp=2,zero=3", 0),
        ("a.toml", "[experimental]\npipeline_parallel_degree = 4", "tp=1,pp=4,micro_batch=1,"
         "zero=2,recompute=full,recompute_every=2,schedule=1f1b", 0),
    ],
)  # fmt: skip
def test_the_family_of_megatron(
    tmp_path: Path, name: str, text: str, layout: str, batch: int
) -> None:
    found = read(tmp_path, name, text)
    assert (found.layout, found.batch_size) == (parse_layout(layout), batch)


def test_a_script_is_read_as_a_shell_would(tmp_path: Path) -> None:
    script = """set -e
: "${TP:=4}"
PP=${PP:-$((2 + 2))}; MBS=${1:-"2"}
GBS=$((MBS * 64)) NOTHING=
NNODES=${NNODES:-${SLURM_NNODES:-2}}
if [ -n "$DIST" ]; then
    ARGS+=(--use-distributed-optimizer)
fi
RECOMPUTE="--recompute-activations"
[[ $FP8 == 1 ]] && RECOMPUTE="$RECOMPUTE --fp8"
cmd="python -u a#b.py --tensor-model-parallel-size ${TP} --num-layers=32"
ulimit -n 4; torchrun --nnodes ${NNODES} --nproc_per_node 8 a.py \\
    --pipeline-model-parallel-size $PP `# stages` \\
    --global-batch-size "$[MBS*64]" --micro-batch-size $MBS $RECOMPUTE 2>&1 \\
    --sequence-parallel $NOTHING $MORE "${ARGS[@]}" "$@" | tee log
"""
    found = read(tmp_path, "a.sh", script)
    wanted = "tp=4,pp=4,dp=1,micro_batch=2,zero=1,recompute=selective,sequence_parallel=true"
    assert (found.layout, found.batch_size) == (parse_layout(wanted), 128)
    assert found.remarks == (
        "Stands under a condition of the script, which is taken to hold: "
        "use_distributed_optimizer, fp8.",
        "Only a shell can say what stands for: $MORE, $@.",
        "Not used from the file: fp8.",
    )
    again = read(tmp_path, "b.sh", script.replace("\n", "\r\n"))
    assert again.layout == found.layout


SOURCED = """#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=8
source "$(dirname "$0")/env.sh"
. ./missing.sh
cat <<EOF > $CONFIG
{"train_micro_batch_size_per_gpu": $MBS, "zero_optimization": {"stage": 2, "allgather_partitions":
 true}, "it's": "no quote"}
EOF
srun python pretrain_gpt.py --tensor-model-parallel-size $TP --deepspeed_config ./ds.json \\
    --micro-batch-size 2
"""


def test_files_that_a_script_reads_and_writes_are_read_with_it(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("TP=4; MBS=2\nCONFIG=ds.json\nsource env.sh\n")
    found = read(tmp_path, "a.sh", SOURCED)
    assert found.layout == parse_layout("tp=4,dp=8,zero=2,micro_batch=2")
    missing, unused = found.remarks
    assert "beside the script: env.sh, ./missing.sh." in missing
    assert unused.startswith(
        "Not used from the file: deepspeed_config.zero_optimization.allgather"
    )
    with pytest.raises(LayoutError, match="say micro_batch_size as 3 and as 2"):
        read(tmp_path, "a.sh", SOURCED.replace("size 2", "size 3"))


OVERRIDES = """torchrun --nproc_per_node=8 megatron_gpt_pretraining.py trainer.num_nodes=2 \
  trainer.devices=8 model.tensor_model_parallel_size=4 ++model.sequence_parallel=True \
  model.optim.name=distributed_fused_adam
"""
FINETUNING = """
trainer: {devices: 8, num_nodes: '${oc.env:NODES,2}'}
model:
  tensor_model_parallel_size: 2
  micro_batch_size: 4
  fsdp: true
  fsdp_sharding_strategy: grad
  data:
    train_ds: {micro_batch_size: '${model.micro_batch_size}', global_batch_size: 64}
    validation_ds: {micro_batch_size: 1}
  optim: {lr: '${..micro_batch_size}', _target_: a.B}
"""


@pytest.mark.parametrize(
    ("name", "text", "layout", "remark"),
    [
        ("a.sh", OVERRIDES, "tp=4,dp=4,zero=1,sequence_parallel=true", ""),
        (
            "a.yaml",
            FINETUNING,
            "tp=2,dp=8,micro_batch=4,zero=2",
            "model.data.validation_ds.micro_batch_size, lr",
        ),
        ("a.yaml", "{model: {context_parallel_size: 4}}", "cp=4", ""),
        (
            "a.yaml",
            "{pipeline_model_parallel_size: 2, num_layers: 9, num_layers_in_first_pipeline_stage: "
            "4}",
            "pp=2,layers=4-5",
            "",
        ),
        (
            "a.sh",
            "x.py --expert-model-parallel-size 2 --fancy-rank-mapping",
            "ep=2,dispatch=allgather",
            "fancy_rank_mapping",
        ),
        (
            "a.toml",
            '[parallelism]\npipeline_parallel_degree = 2\nmodule_fqns_per_model_part = [["emb", '
            '"a.0"], ["a.1"]]\n[comm]\nspeed = 1',
            "pp=2,micro_batch=1,zero=2,recompute=full,recompute_every=2,schedule=1f1b,split=a.1",
            "comm.speed",
        ),
        (
            "a.toml",
            "[training]\ntensor_parallel_degree = 2\nbatch_size = 3",
            "tp=2,micro_batch=3,zero=3,recompute=full,recompute_every=2,sequence_parallel=true",
            "",
        ),
        (
            "a.json",
            '{"optimizer": {"type": "OneBitAdam", "params": {}}, "train_batch_size": 8}',
            "tp=1",
            "OneBitAdam",
        ),
        ("a.yaml", "{distributed_type: MULTI_GPU, new_config: {x: 1}}", "tp=1", "new_config.x"),
    ],
)
def test_files_in_other_manners(
    tmp_path: Path, name: str, text: str, layout: str, remark: str
) -> None:
    found = read(tmp_path, name, text)
    assert found.layout == parse_layout(layout)
    assert remark in " ".join(found.remarks)
    assert bool(remark) == bool(found.remarks)


def test_what_speaks_of_parallelism_is_named_before_the_rest(tmp_path: Path) -> None:
    (remark,) = read(tmp_path, "a.sh", SCRIPT).remarks
    assert remark == "Not used from the file: new_parallel_thing, lr."
    assert any("every layer" in each for each in read(tmp_path, "a.yaml", NEMO).remarks)
    few = read(tmp_path, "a.sh", GPT3_175B).remarks
    assert few[0].startswith("The 8 devices that the launcher is told of are fewer than 128")
    assert few[1] == "rampup_batch_size is not modelled."
    mics = '{"zero_optimization": {"mics_shard_size": 8, "zero_quantized_weights": true}}'
    assert [each.split()[0] for each in read(tmp_path, "a.json", mics).remarks] == [
        "mics_shard_size", "zero_quantized_weights",
    ]  # fmt: skip
    text = "[training]\nlocal_batch_size = 1\n[new]\nslice_parallel_thing = 4\n"
    (remark,) = read(tmp_path, "a.toml", text).remarks
    assert "new.slice_parallel_thing" in remark


def test_a_field_that_nobody_knows_is_named(tmp_path: Path) -> None:
    text = "[parallelism]\nmagic_degree = 4\n"
    found = read(tmp_path, "a.toml", text)
    assert any("parallelism.magic_degree" in remark for remark in found.remarks)


def test_damaged_files_are_refused_in_a_line_or_read(tmp_path: Path) -> None:
    random = Random(20)
    samples = [("a.toml", TORCHTITAN), ("a.json", json.dumps(DEEPSPEED)), ("a.yaml", FSDP),
               ("b.yaml", MEGATRON), ("c.sh", SCRIPT), ("c.yaml", NEMO)]  # fmt: skip
    pieces = ["[", "{", "}", '"', "\n", "= -1", ": null", "é", "\x00", "1e999", "- ", "&a *a",
              "true", "!!python/object", "0" * 30, "'"]  # fmt: skip
    accepted = 0
    problems: list[str] = []
    for _ in range(400):
        name, text = random.choice(samples)
        for _ in range(random.randint(1, 4)):
            at, length = random.randrange(len(text)), random.choice((0, 0, 1, 5, 40))
            text = text[:at] + random.choice([*pieces, ""]) + text[at + length :]
        try:
            read(tmp_path, name, text)
            accepted += 1
        except HeterogError as error:
            problems.append(str(error))
    assert accepted > 20
    assert len(problems) > 100
    assert {len(problem.splitlines()) for problem in problems} == {1}


@pytest.mark.parametrize(("each", "replicas"), [(1, 2), (2, 4)])
def test_torchtitan_counts_devices_that_share_experts(
    tmp_path: Path, each: int, replicas: int
) -> None:
    """Both of a team of two, unless they split every expert."""
    text = (
        "[parallelism]\nexpert_parallel_degree = 4\ntensor_parallel_degree = 2\n"
        f"expert_tensor_parallel_degree = {each}\n"
    )
    layout = read(tmp_path, "experts.toml", text).layout
    assert (layout.ep, layout.tp) == (replicas, 2)
