"""Trains a small language model on texts of unequal lengths with Hugging Face's Trainer."""

import os
import time

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

EPOCHS = int(os.environ.get("EPOCHS", "4"))
BATCH = 96  # of all ranks together


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random words, as many as each text has; what follows is no label."""

    def __init__(self) -> None:
        self.words = torch.randint(0, 100, (1000, 64))
        self.labels = self.words.clone()
        self.labels[torch.arange(64) >= torch.randint(4, 65, (1000, 1))] = -100

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


class Clock(TrainerCallback):
    """Prints how long each epoch took."""

    def on_epoch_begin(self, args, state, control, **kwargs):
        """An epoch begins."""
        self.begin = time.perf_counter()

    def on_epoch_end(self, args, state, control, **kwargs):
        """An epoch ends."""
        if state.is_world_process_zero:
            seconds = time.perf_counter() - self.begin
            print(f"epoch {round(state.epoch) - 1} {seconds:.3f} s", flush=True)


def main() -> None:
    """Train and validate."""
    torch.manual_seed(0)
    data = Texts()
    config = GPT2Config(
        vocab_size=100, n_positions=64, n_embd=96, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir="/tmp", use_cpu=True, num_train_epochs=EPOCHS, learning_rate=1e-3,
        per_device_train_batch_size=BATCH // int(os.environ.get("WORLD_SIZE", "1")),
        lr_scheduler_type="constant", save_strategy="no", report_to="none", disable_tqdm=True,
        logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Clock()])
    trainer.train()
    with torch.no_grad():
        loss = model(input_ids=data.words[:200], labels=data.labels[:200]).loss
    if trainer.is_world_process_zero():
        print(f"validation loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
