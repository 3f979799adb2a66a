"""Layouts: what people run today, in the words of Megatron and FSDP, as strategies."""
