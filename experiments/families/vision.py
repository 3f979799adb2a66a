"""Images, audio and video: library models and hand-written ones."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from families.family import BATCH, FLOAT32, Batch, Family, enter, family, sgd, trained
from families.language import NO_DROPOUT, VOCABULARY, config_of, hugging_face, tokens
from families.training import numbers
from heterog.graph.workload import Workload

SIZE = 32
LABELS = 5


def images(size: int) -> Batch:
    """Images and their classes, as the models of ``transformers`` take them."""
    return {
        "pixel_values": torch.randn(BATCH, 3, size, size, dtype=torch.float64),
        "labels": torch.randint(0, LABELS, (BATCH,)),
    }


TRANSFORMER = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "image_size": SIZE, "patch_size": 8, "num_labels": LABELS,
    "initializer_range": 0.2, "problem_type": "single_label_classification",
    **NO_DROPOUT,
}  # fmt: skip


def classifier(kind: str, *, image_size: int = SIZE, **options: Any) -> Workload:
    """An image classifier of ``transformers`` with its own loss."""
    sizes = TRANSFORMER | options | {"image_size": image_size}
    return hugging_face(
        lambda: config_of(kind, **sizes), f"{kind}ForImageClassification",
        lambda: images(image_size),
    )  # fmt: skip


@family("segformer")
def segformer() -> Workload:
    """SegFormer: a class for every pixel, BatchNorm in the head, labels that are ignored."""

    def batch() -> Batch:
        labels = torch.randint(0, LABELS, (BATCH, SIZE, SIZE))
        return {
            "pixel_values": torch.randn(BATCH, 3, SIZE, SIZE, dtype=torch.float64),
            "labels": labels,
        }

    return hugging_face(
        lambda: config_of(
            "Segformer", hidden_sizes=[8, 16], depths=[1, 1], num_encoder_blocks=2,
            sr_ratios=[2, 1],
            num_attention_heads=[1, 2], patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2],
            decoder_hidden_size=16, num_labels=LABELS, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0, drop_path_rate=0.0,
            initializer_range=0.2,
        ),
        "SegformerForSemanticSegmentation",
        batch,
    )  # fmt: skip


@family("clip")
def clip() -> Workload:
    """CLIP: every image is compared with every text of the batch; targets from ``arange``."""
    side = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "initializer_factor": 5.0}  # fmt: skip

    def batch() -> Batch:
        return {
            "input_ids": tokens(),
            "pixel_values": torch.randn(BATCH, 3, 16, 16, dtype=torch.float64),
            "return_loss": True,  # type: ignore[dict-item]
        }

    return hugging_face(
        lambda: config_of(
            "CLIP", text_config={**side, "vocab_size": VOCABULARY, "max_position_embeddings": 16,
                         "eos_token_id": VOCABULARY - 1},
            vision_config={**side, "image_size": 16, "patch_size": 8},
            projection_dim=8,
        ),
        "CLIPModel",
        batch,
    )  # fmt: skip


@family("wav2vec2_classifier")
def wav2vec2() -> Workload:
    """Wav2Vec2 on raw sound: strided convolutions, group norm, grouped positions."""
    return hugging_face(
        lambda: config_of(
            "Wav2Vec2", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3),
            num_feat_extract_layers=2, num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0,
            activation_dropout=0.0, feat_proj_dropout=0.0, layerdrop=0.0, final_dropout=0.0,
            mask_time_prob=0.0, mask_feature_prob=0.0, apply_spec_augment=False,
            num_labels=LABELS, classifier_proj_size=8, initializer_range=0.2,
        ),
        "Wav2Vec2ForSequenceClassification",
        lambda: {"input_values": numbers(400), "labels": torch.randint(0, LABELS, (BATCH,))},
    )  # fmt: skip


@family("whisper")
def whisper() -> Workload:
    """Whisper: spectrogram to text."""
    return hugging_face(
        lambda: config_of(
            "Whisper", vocab_size=VOCABULARY, num_mel_bins=8, d_model=16, encoder_layers=1,
            decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=10,
            max_target_positions=16, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
            init_std=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=3, suppress_tokens=None, begin_suppress_tokens=None,
        ),
        "WhisperForConditionalGeneration",
        lambda: {"input_features": numbers(8, 20), "labels": tokens()},
    )  # fmt: skip


class _Block(nn.Module):
    """A residual block that gets the time step."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.GroupNorm(2, channels_in), nn.GroupNorm(2, channels)
        self.conv = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(16, channels)
        self.skip = nn.Conv2d(channels_in, channels, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv(functional.silu(self.norm(x)))
        hidden = hidden + self.time(functional.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(functional.silu(self.norm2(hidden)))


@trained(
    "diffusion_unet",
    lambda: {
        "time": nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16)),
        "down": nn.ModuleList([_Block(4, 8), _Block(8, 16)]),
        "first": nn.Conv2d(3, 4, 3, padding=1),
        "attention": nn.MultiheadAttention(16, 2, batch_first=True),
        "up": nn.ModuleList([_Block(24, 8), _Block(12, 4)]),
        "last": nn.Conv2d(4, 3, 3, padding=1),
        "alphas": torch.linspace(0.99, 0.1, 20).cumprod(0),
    },
    lambda: (numbers(3, 16, 16), torch.randint(0, 20, (BATCH,)), numbers(3, 16, 16)),
)
def diffusion_unet(net: Any, image: Tensor, time: Tensor, noise: Tensor) -> Tensor:
    """Denoising diffusion: U-Net with skips, times that are looked up."""
    alpha = net.alphas[time][:, None, None, None]
    noisy = alpha.sqrt() * image + (1 - alpha).sqrt() * noise
    rates = torch.exp(-torch.arange(4, device=image.device, dtype=image.dtype))
    angles = time[:, None].to(image.dtype) * rates
    told = net.time(torch.cat([angles.sin(), angles.cos()], 1))
    x = net.first(noisy)
    kept = [x]
    for block in net.down:
        x = block(functional.avg_pool2d(x, 2), told)
        kept.append(x)
    flat = kept.pop().flatten(2).transpose(1, 2)
    x = (flat + net.attention(flat, flat, flat, need_weights=False)[0]).transpose(1, 2)
    x = x.unflatten(2, (4, 4))
    for block in net.up:
        x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
        x = block(torch.cat([x, kept.pop()], 1), told)
    return functional.mse_loss(net.last(x), noise)


class _Causal(nn.Module):
    """A dilated causal convolution with weight norm, and a residual."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.padding = dilation * 2
        convolution = nn.Conv1d(channels, channels, 3, dilation=dilation)
        self.convolution = nn.utils.parametrizations.weight_norm(convolution)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.leaky_relu(self.convolution(functional.pad(x, (self.padding, 0))))


@trained(
    "tcn_weight_norm",
    lambda: {
        "first": nn.Conv1d(2, 8, 1),
        "blocks": nn.Sequential(*(_Causal(8, 2**i) for i in range(3))),
        "last": nn.Conv1d(8, 2, 1),
    },
    lambda: (numbers(2, 20),),
)
def tcn(net: Any, signal: Tensor) -> Tensor:
    """A temporal convolutional network: each step predicts the next sample."""
    found = net.last(net.blocks(net.first(signal)))
    return functional.smooth_l1_loss(found[:, :, :-1], signal[:, :, 1:])


@trained(
    "instance_norm_style",
    lambda: {
        "encode": nn.Sequential(
            nn.ReflectionPad2d(1),
            nn.Conv2d(3, 6, 3, stride=2),
            nn.InstanceNorm2d(6, affine=True),
            nn.ReLU(),
        ),
        "decode": nn.Sequential(nn.ConvTranspose2d(6, 3, 4, stride=2, padding=1), nn.Tanh()),
    },
    lambda: (numbers(3, 16, 16), numbers(3, 16, 16)),
)
def instance_norm_style(net: Any, image: Tensor, style: Tensor) -> Tensor:
    """Style transfer: instance norm, reflection, transposed convolution, a Gram loss."""
    changed = net.decode(net.encode(image))
    grams = [torch.einsum("bchw,bdhw->bcd", each, each) / 256 for each in (changed, style)]
    smooth = (changed[..., 1:] - changed[..., :-1]).abs().mean()
    return functional.mse_loss(grams[0], grams[1]) + 0.1 * smooth


@trained(
    "autocast_cnn",
    lambda: {
        "body": nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.GELU()
        ),
        "head": nn.Linear(8, LABELS),
    },
    lambda: (torch.randn(BATCH, 3, 8, 8), torch.randint(0, LABELS, (BATCH,))),
    loss=functional.cross_entropy,
    tolerance=0.15,
    dtype=None,
)
def autocast_cnn(net: Any, image: Tensor) -> Tensor:
    """Convolutions under autocast in bf16, the loss in single precision."""
    with torch.autocast("cpu", torch.bfloat16):
        found = net.head(net.body(image).mean((2, 3)))
    return found.float()


def _hybrid_parts() -> dict[str, nn.Module | Tensor]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True)
    return {
        "stem": nn.Conv2d(3, 16, 4, stride=4),
        "encoder": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        "place": nn.Parameter(torch.randn(1, 16, 16) * 0.1),
        "head": nn.Linear(16, LABELS),
    }


@trained(
    "vision_hybrid_float32",
    _hybrid_parts,
    lambda: (torch.randn(BATCH, 3, 16, 16), torch.randint(0, LABELS, (BATCH,))),
    loss=functional.cross_entropy,
    tolerance=FLOAT32,
    dtype=None,
)
def vision_hybrid(net: Any, image: Tensor) -> Tensor:
    """A stem of convolutions and a transformer encoder of torch, in single precision."""
    x = net.stem(image).flatten(2).transpose(1, 2) + net.place
    return net.head(net.encoder(x).amax(1))


enter(
    Family("vit", "ViT: a class token before the patches.", lambda: classifier("ViT")),
    Family("deit", "DeiT: a distillation token, too.", lambda: classifier("DeiT")),
    Family(
        "swin",
        "Swin: attention inside shifted windows.",
        lambda: classifier(
            "Swin",
            num_attention_heads=[2, 2],
            embed_dim=8,
            depths=[2, 2],
            window_size=2,
            patch_size=4,
            mlp_ratio=2.0,
            drop_path_rate=0.0,
        ),
    ),
    Family(
        "convnext",
        "ConvNeXt: depthwise convolutions, layer norm over channels, scaled residuals.",
        lambda: classifier(
            "ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, drop_path_rate=0.0
        ),
    ),
    Family(
        "resnet_hf",
        "ResNet of ``transformers``: BatchNorm.",
        lambda: classifier(
            "ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
        ),
    ),
    Family(
        "mobilevit",
        "MobileViT: convolutions with BatchNorm around attention over unfolded patches.",
        lambda: classifier(
            "MobileViT",
            hidden_sizes=[8, 12, 16],
            neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 16],
            patch_size=2,
            image_size=64,
            mlp_ratio=2.0,
        ),
    ),
    Family(
        "cnn_3d",
        "Video: three-dimensional convolutions, pooling and BatchNorm.",
        lambda: sgd(
            lambda: nn.Sequential(
                nn.Conv3d(2, 4, 3, padding=1),
                nn.BatchNorm3d(4),
                nn.ReLU(),
                nn.MaxPool3d(2),
                nn.Conv3d(4, 8, 3, padding=1, groups=2),
                nn.GELU(),
                nn.AdaptiveAvgPool3d(1),
                nn.Flatten(),
                nn.Linear(8, LABELS),
            ).double(),
            lambda: (numbers(2, 4, 8, 8), torch.randint(0, LABELS, (BATCH,))),
            loss=functional.cross_entropy,
        ),
        is_quick=True,
    ),
)
