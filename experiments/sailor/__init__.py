"""Sailor's scoring of training plans, and searches for plans under the same rules.

Sailor (SOSP 2025, repository eth-easl/sailor at cf2c8e3, MIT licence) plans pipelines over unlike
GPUs and scores plans with a Python simulator. ``timing`` and ``memory`` score as that simulator
does, with its traps refused and with a few additions for plans it cannot say; ``strict`` and
``columns`` search for plans.
"""
