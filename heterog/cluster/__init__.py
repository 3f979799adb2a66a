"""Devices, hosts and links."""
