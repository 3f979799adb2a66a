"""Sailor's scoring of training plans, and a search for plans under the same rules.

Sailor (SOSP 2025, repository eth-easl/sailor at cf2c8e3, MIT licence) plans pipelines over unlike
GPUs and scores plans with a Python simulator. ``inputs`` reads what it measured, ``score`` scores
as that simulator does, with its traps refused; ``search`` looks for plans as ``columns``, and
``strategies`` makes a plan of Sailor's a strategy of heterog.
"""
