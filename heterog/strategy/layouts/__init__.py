"""Layouts: today's uniform parallelism, in the terms of Megatron and FSDP, as strategies."""
