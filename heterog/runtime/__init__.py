"""Runs plans on real devices."""
