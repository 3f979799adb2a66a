"""Sailor's scoring of training plans, and a search for plans under the same rules.

Sailor (SOSP 2025, repository eth-easl/sailor at cf2c8e3, MIT licence) plans pipelines over unlike
GPUs and scores plans with a Python simulator. ``inputs`` reads its measurements. ``score`` scores
as that simulator does, but refuses inputs on which it would give wrong numbers. ``search`` looks
for plans as ``columns``, and ``strategies`` turns a plan of Sailor's into a strategy of heterog.
"""
