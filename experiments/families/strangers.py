"""Families of kinds that a tour of the models of ``transformers`` found."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from families.family import BATCH, FLOAT32, Batch, family, trained
from families.found import CLASSES
from families.language import config_of, hugging_face, labels_of, small, tokens
from families.training import numbers
from heterog.graph.workload import Workload

PLACE = 4
"""The token in whose place a feature of an image is written."""


@family("llava", tolerance=FLOAT32)
def llava() -> Workload:
    """LLaVA: four features of each image are written into its text, wherever it has them."""

    def batch() -> Batch:
        words = tokens(10)
        begins = torch.randint(0, 7, (BATCH, 1))
        words = words.scatter(1, begins + torch.arange(4), PLACE)
        images = torch.randn(BATCH, 3, 16, 16, dtype=torch.float64)
        return {"input_ids": words, "pixel_values": images, "labels": labels_of(10)}

    def config() -> Any:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
                 "num_attention_heads": 2}  # fmt: skip
        return transformers.LlavaConfig(
            text_config=small("Llama", num_key_value_heads=1),
            vision_config=config_of("CLIPVision", **sizes, image_size=16, patch_size=8),
            image_token_id=PLACE,
            image_seq_length=4,
            vision_feature_layer=-1,
        )

    return hugging_face(config, "LlavaForConditionalGeneration", batch)


@trained(
    "channels_last",
    lambda: {
        "stem": nn.Conv2d(3, 8, 3, stride=2),
        "squeeze": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.Sigmoid()),
        "head": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)),
    },
    lambda: (
        numbers(3, 12, 12).to(memory_format=torch.channels_last),
        torch.randint(0, CLASSES, (BATCH,)),
    ),
    loss=functional.cross_entropy,
    is_quick=True,
)
def channels_last(net: Any, image: Tensor) -> Tensor:
    """Squeeze and excitation on images whose channels are last in memory."""
    found = functional.gelu(net.stem(image))
    return net.head(found * net.squeeze(found))


@trained(
    "spectral_loss",
    lambda: {
        "body": nn.Sequential(
            nn.Conv1d(1, 8, 5, padding=2), nn.Tanh(), nn.Conv1d(8, 1, 5, padding=2)
        ),
        "window": torch.hann_window(8),
    },
    lambda: (numbers(1, 40), numbers(1, 40)),
)
def spectral_loss(net: Any, sound: Tensor, target: Tensor) -> Tensor:
    """A vocoder whose spectra at two resolutions are compared with those of a recording."""
    made, total = net.body(sound).squeeze(1), torch.zeros((), dtype=sound.dtype)
    for size in (8, 16):
        seen, wanted = (
            torch.stft(each, size, window=net.window, win_length=8, return_complex=True)
            .abs()
            .clamp(min=1e-3)
            for each in (made, target.squeeze(1))
        )
        total = total + functional.l1_loss(seen.log(), wanted.log())
        total = total + torch.linalg.norm(seen - wanted) / torch.linalg.norm(wanted)
    return total
