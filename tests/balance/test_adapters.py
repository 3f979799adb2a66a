"""Trainer and Accelerate with accumulation, a model of one's own, and ranks without data."""

import re
from pathlib import Path

import pytest

from tests.forked_python import ForkedPython
from tests.thorough import THOROUGH

HEAD = """
import os
import torch
from torch import nn
from torch.utils.data import Dataset

torch.manual_seed(0)
WORLD = int(os.environ["WORLD_SIZE"])
SHARES = [12] if WORLD == 1 else [9, 3, 0]


class Data(Dataset):
    inputs = torch.randn(50, 6)
    labels = torch.randint(0, 4, (50,))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return {"x": self.inputs[index], "labels": self.labels[index]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


data, model = Data(), Net()
"""
TRAINER = """
from transformers import TrainingArguments
from heterog.balance.for_trainer import BalancedTrainer

arguments = TrainingArguments(
    output_dir=FOLDER, use_cpu=True, num_train_epochs=3, learning_rate=0.05,
    per_device_train_batch_size=12 // WORLD, gradient_accumulation_steps=2, report_to="none",
    lr_scheduler_type="constant", disable_tqdm=True, save_steps=4, eval_strategy="epoch",
    per_device_eval_batch_size=5, logging_strategy="no",
)
trainer = BalancedTrainer(
    model, arguments, train_dataset=data, eval_dataset=data,
    balance={"shares": SHARES, "interval": 0},
)
trainer.train(resume_from_checkpoint=RESUME)
"""
ACCELERATE = """
from types import SimpleNamespace
from accelerate import Accelerator
from heterog.balance import BalanceError
from heterog.balance.for_accelerate import AcceleratedBalancer

teams = SimpleNamespace(parallelism_config=SimpleNamespace(non_data_parallel_size=2))
try:
    AcceleratedBalancer(teams, global_batch_size=12)
except BalanceError as error:
    assert "2 ranks of the accelerator's parallelism_config share samples" in str(error), error
else:
    raise AssertionError("ranks that share samples were balanced")
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
balancer = AcceleratedBalancer(accelerator, global_batch_size=12, shares=SHARES)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
loader = balancer.loader(data)
net, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for batch in loader:
        with accelerator.accumulate(net):
            accelerator.backward(balancer.weigh(net(**batch)["loss"]))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
"""
LIGHTNING = """
import pickle
from lightning import LightningModule, Trainer
from heterog.balance import BalanceError
from heterog.balance.for_lightning import LightningBalancer

class Numbered(Data):
    def __getitem__(self, index):
        return {"index": index, **super().__getitem__(index)}

class Module(LightningModule):
    seen, num_validated = [], 0

    def __init__(self):
        super().__init__()
        self.net = model

    def training_step(self, batch):
        self.seen.append(sorted(batch.pop("index").tolist()))
        return self.net(**batch)["loss"]

    def validation_step(self, batch, number):
        self.num_validated += len(batch["index"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

module, data = Module(), Numbered()
balancer = LightningBalancer(global_batch_size=12, shares=SHARES, interval=0)
lengths = [1 + index * index * 11 % 13 for index in range(len(data))]
batches = balancer.balancer.global_batches(data, lengths=lengths)
counts = [batches.num_steps(epoch) for epoch in range(2)]
given = [
    {"train_dataloaders": balancer.loader(data), "val_dataloaders": balancer.loader(data, seed=1)},
    {"datamodule": balancer.loader(data)},
    {"train_dataloaders": balancer.loader(data, lengths=lengths)},
]
def fit(limit, **options):
    Trainer(
        accelerator="cpu", devices=WORLD, strategy="ddp" if WORLD > 1 else "auto", max_epochs=2,
        callbacks=[balancer], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_train_batches=limit,
    ).fit(module, **options)

for options, limit in zip(given, (4, 4, 1.0)):
    fit(limit, **options)
plain = torch.utils.data.DataLoader(data)
for loaders, said in (([balancer.loader(data), plain], "1 of the 2"), (plain, "0 of the 1")):
    try:
        fit(4, train_dataloaders=loaders)
    except BalanceError as error:
        assert f"deals {said} loaders" in str(error), error
    else:
        raise AssertionError("a loader that is not the balancer's was taken")
copy = pickle.loads(pickle.dumps(balancer))  # as for a process that is spawned
assert copy.balancer is not balancer.balancer and copy.balancer.global_batch_size == 12
seen = module.seen
assert seen[:8] == seen[8:16]  # every fit begins with the first epoch
assert len(seen[16:]) == sum(counts) and counts[0] < counts[1], counts
assert seen[:4] != seen[4:8]
assert module.num_validated >= 1
model = module.net
"""
TRAINER_OF_TOKENS = """
import heterog.balance
from transformers import TrainingArguments
from heterog.balance.for_trainer import BalancedTrainer

seen = []
_forward = Net.forward
Net.forward = lambda self, x, labels: (seen.append(len(x)), _forward(self, x, labels))[1]
lengths = [1 + index * index * 11 % 13 for index in range(len(data))]

def new_trainer():
    arguments = TrainingArguments(
        output_dir=FOLDER, use_cpu=True, num_train_epochs=3, learning_rate=0.05,
        per_device_train_batch_size=4, report_to="none", save_steps=9, max_grad_norm=0,
        lr_scheduler_type="constant", disable_tqdm=True, logging_strategy="no",
    )
    return BalancedTrainer(
        Net(), arguments, train_dataset=data, loader={"lengths": lengths},
        balance={
            "shares": [40] if WORLD == 1 else [25, 15, 0], "global_batch_size": 40, "interval": 0,
        },
    )

trainer = new_trainer()
batches = trainer.get_train_dataloader().share_sampler._batches
counts = [batches.num_steps(epoch) for epoch in range(3)]
assert len(set(counts)) > 1, counts
trainer.train()
assert trainer.state.global_step == sum(counts), (trainer.state.global_step, counts)
if WORLD == 1:
    assert sum(seen) == 3 * len(data), sum(seen)
model = trainer.model
if WORLD > 1:
    step = 9 * (counts[0] // 9 + 1)  # inside of the second epoch
    again = new_trainer()
    again.train(resume_from_checkpoint=f"{FOLDER}/checkpoint-{step}")
    assert again.state.global_step == sum(counts), (again.state.global_step, counts)
    torch.testing.assert_close(again.model.state_dict(), model.state_dict())
try:
    BalancedTrainer(model, trainer.args, loader={"cost": len})
except heterog.balance.BalanceError as error:
    assert "give loader its lengths" in str(error), error
"""
TRAINER_OF_A_STREAM = """
from torch.utils.data import IterableDataset
from transformers import TrainingArguments
from heterog.balance.for_trainer import BalancedTrainer

class Stream(IterableDataset):
    place = 0

    def __iter__(self):
        begin, self.place = self.place, 0
        for index in range(begin, len(data)):
            self.place = index + 1
            read.append(index)
            yield {"index": index, **data[index]}
        self.place = 0

class Stateful(Stream):
    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]

def trained(stream, resumed=None):
    read.clear(), seen.clear()
    arguments = TrainingArguments(
        output_dir=FOLDER, use_cpu=True, max_steps=7, learning_rate=0.05, save_steps=2,
        per_device_train_batch_size=12 // WORLD, report_to="none", disable_tqdm=True,
        lr_scheduler_type="constant", logging_strategy="no",
    )
    torch.manual_seed(1)
    trainer = BalancedTrainer(
        Net(), arguments, train_dataset=stream, balance={"shares": SHARES, "interval": 0}
    )
    trainer.train(resume_from_checkpoint=resumed)
    return trainer.model

class Net(Net):
    def forward(self, x, labels, index=None):
        seen.extend(index.tolist() if index is not None else [])
        return super().forward(x, labels)

read, seen = [], []
kind = Stream if WORLD == 1 else Stateful  # the first is read again up to its place
model = trained(kind())
if WORLD == 1:
    assert seen == [*range(50), *range(24)], seen
for step, begin in ((6, 0),) if WORLD == 1 else ((2, 24), (6, 12)):
    state = trained(kind(), f"{FOLDER}/checkpoint-{step}").state_dict()
    torch.testing.assert_close(state, model.state_dict())
    assert read[0] == begin, read
"""
TAIL = """
if os.environ["RANK"] == "0":
    with torch.no_grad():
        print(f"loss {model(data.inputs, data.labels)['loss'].item():.7f}")
torch.distributed.barrier() if torch.distributed.is_initialized() else None
"""


def loss_of(text: str, num_ranks: int, folder: Path, scripts: ForkedPython) -> float:
    script = folder / "script.py"
    script.write_text(HEAD + text + TAIL)
    found = re.search(r"^loss ([\d.]+)", scripts.run(script, num_ranks)[0], re.M)
    assert found
    return float(found[1])


@THOROUGH
@pytest.mark.slow
@pytest.mark.distributed
def test_a_trainer_accumulates_and_goes_on_like_one_process(
    tmp_path: Path, scripts: ForkedPython
) -> None:
    """Five steps in an epoch, two in an update; the last epoch again, from its middle."""
    text = f"FOLDER = {str(tmp_path / 'run')!r}\nRESUME = None\n" + TRAINER
    one = loss_of(text, 1, tmp_path, scripts)
    three = loss_of(text, 3, tmp_path, scripts)
    assert three == pytest.approx(one, rel=1e-4)
    checkpoint = str(tmp_path / "run" / "checkpoint-8")
    resumed = loss_of(
        text.replace("RESUME = None", f"RESUME = {checkpoint!r}"), 3, tmp_path, scripts
    )
    assert resumed == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_trainer_deals_tokens_like_one_process(tmp_path: Path, scripts: ForkedPython) -> None:
    """Every sample once in each epoch, also where one has a batch more than the first."""
    text = f"FOLDER = {str(tmp_path / 'run')!r}\n" + TRAINER_OF_TOKENS
    one, three = (loss_of(text, num_ranks, tmp_path, scripts) for num_ranks in (1, 3))
    assert three == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_trainer_deals_a_stream_like_one_process(tmp_path: Path, scripts: ForkedPython) -> None:
    """Every sample once, also where a run goes on in the middle of a pass; seven steps of five."""
    text = f"FOLDER = {str(tmp_path / 'run')!r}\n" + TRAINER_OF_A_STREAM
    one, three = (loss_of(text, num_ranks, tmp_path, scripts) for num_ranks in (1, 3))
    assert three == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
@pytest.mark.distributed
def test_accelerate_accumulates_and_clips_like_one_process(
    tmp_path: Path, scripts: ForkedPython
) -> None:
    one, three = (loss_of(ACCELERATE, num_ranks, tmp_path, scripts) for num_ranks in (1, 3))
    assert three == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
@pytest.mark.distributed
def test_lightning_fits_twice_and_validates_like_one_process(
    tmp_path: Path, scripts: ForkedPython
) -> None:
    """Validation is dealt, too, and Lightning leaves its last batch open."""
    one, three = (loss_of(LIGHTNING, num_ranks, tmp_path, scripts) for num_ranks in (1, 3))
    assert three == pytest.approx(one, rel=1e-4)
