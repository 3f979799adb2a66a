"""The fingerprint of a cluster's record, and where two records differ."""

import hashlib
import json
from typing import Any


def identity(record: dict[str, Any]) -> dict[str, Any]:
    """What of a cluster's record the fingerprint covers; devices have their type in full."""
    types = [{k: v for k, v in t.items() if k != "source"} for t in record["device_types"]]
    devices = [
        {
            "name": d["name"],
            "host": record["hosts"][d["host_index"]]["name"],
            "type": types[d["type_index"]],
            "usable_memory_bytes": d["usable_memory_bytes"],
        }
        for d in record["devices"]
    ]
    # Clusters without limits keep their fingerprint from before there were any.
    pairs = {"pairs": record["pairs"]} if "pairs" in record else {}
    seen = {"efficiency": record["efficiency"], "hosts": record["hosts"], "devices": devices}
    return seen | pairs


def fingerprint_of(record: dict[str, Any]) -> str:
    """First 16 hex digits of the SHA-256 of the canonical JSON of ``identity``."""
    text = json.dumps(identity(record), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def difference(record: dict[str, Any], other: dict[str, Any]) -> str | None:
    """The first host or device in which the records of two clusters differ, in words."""
    mine, theirs = identity(record), identity(other)
    if mine == theirs:
        return None
    for what, plural in (("host", "hosts"), ("device", "devices")):
        for here, there in zip(mine[plural], theirs[plural], strict=False):
            if here != there:
                return _describe_pair(what, here, there)
        if len(mine[plural]) != len(theirs[plural]):
            return _describe_count(what, mine[plural], theirs[plural])
    if mine["efficiency"] != theirs["efficiency"]:
        return f"NIC efficiency is {mine['efficiency']:g}, not {theirs['efficiency']:g}"
    return "what lies between hosts (pairs) differs"


def _describe_pair(what: str, here: dict[str, Any], there: dict[str, Any]) -> str:
    if here["name"] != there["name"]:
        return f"{what} '{here['name']}' is in the place of {what} '{there['name']}'"
    one = {"num_nics": 1}  # the only field that may be left out
    here, there = one | here, one | there
    key = next(k for k in here if here[k] != there[k])
    a, b = here[key], there[key]
    if isinstance(a, dict) and a.get("name") == b.get("name"):
        inner = next(k for k in a if a[k] != b[k])
        key, a, b = f"{key} {inner}", a[inner], b[inner]
    elif isinstance(a, dict):
        a, b = a["name"], b["name"]
    return f"{what} '{here['name']}': {key.replace('_', ' ')} is {a}, not {b}"


def _describe_count(what: str, here: list[dict[str, Any]], there: list[dict[str, Any]]) -> str:
    longer, where = (here, "this") if len(here) > len(there) else (there, "the other")
    extra = longer[min(len(here), len(there))]["name"]
    return f"{len(here)} {what}s, not {len(there)}: {what} '{extra}' is only in {where} cluster"
