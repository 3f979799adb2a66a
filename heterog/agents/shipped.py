"""Models and clusters on which the two shipped policies were trained, and held-out ones."""

HELD_OUT_MODELS = ("xlnet_large_24l", "nasnet_large", "llama_1b")
HELD_OUT_CLUSTERS = ("paper_12gpu", "hap_v100_p100_16", "rtx_mixed")

TRAINING_ZOO = (
    "vgg19",
    "resnet50",
    "resnet200",
    "inception_v3",
    "mobilenet_v2",
    "vit_base",
    "transformer_6l",
    "transformer_24l",
    "bert_base",
    "bert_large_24l",
    "gpt2",
    "bert_moe",
)
"""Zoo models on which both are trained; deeper versions of held-out models are held out, too."""

TRAINING_FUNCTIONS = (
    "lm_4l",
    "lm_6l_wide",
    "lm_10l",
    "lm_14l_long",
    "lm_18l_untied",
    "lm_8l_giant",
    "lm_32l",
    "mlp",
    "vgg_wide_head",
    "resnet_shallow",
    "cells",
)
"""Functions of ``experiments/training_models.py`` on which both are trained."""

TRAINING_CLUSTERS = (
    "paper_8gpu",
    "paper_8gpu_net035",
    "paper_12gpu",
    "hap_v100_p100_16",
    "a100_v100_16",
    "rtx_mixed",
    "poplar_v100_t4",
    "poplar_a800_v100s",
    "homogeneous_8xa100",
)
"""Clusters of ``default`` beside generated ones; ``heldout`` is trained on generated ones only."""
