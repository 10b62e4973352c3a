"""The last steps of a run's timeline: when its stages were open and its processes had work."""

import json
import os
from pathlib import Path
from typing import Any


def lanes(timeline: Path, steps: int = 6, max_bytes: int = 2**20) -> dict[str, Any]:
    """Spans of the last steps by track: [name, start, length], start in seconds since the epoch."""
    try:
        with timeline.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            head = b""
            if size > max_bytes:
                file.seek(0)
                head = file.read(min(65536, size - max_bytes))
            file.seek(max(0, size - max_bytes))
            data = file.read()
    except OSError:
        return {"tracks": [], "steps": []}
    tracks: dict[int, str] = {}
    spans: list[tuple[int, str, float, float]] = []
    for line in [*head.split(b"\n"), *data.split(b"\n")]:
        try:
            event = json.loads(line.lstrip(b","))
        except ValueError:
            continue
        if not isinstance(event, dict):
            continue
        if event.get("name") == "thread_name":
            tracks[event["tid"]] = event["args"]["name"]
        elif event.get("ph") == "X":
            spans.append((event["tid"], event["name"], event["ts"] / 1e6, event["dur"] / 1e6))
    numbered = sorted(
        (start, length, name) for tid, name, start, length in spans if tracks.get(tid) == "steps"
    )
    recent = numbered[-steps:]
    if not recent:
        return {"tracks": [], "steps": []}
    begin = recent[0][0]
    found: dict[str, list[tuple[str, float, float]]] = {}
    for tid, name, start, length in spans:
        if start + length > begin and tracks.get(tid, "steps") != "steps":
            found.setdefault(tracks[tid], []).append((name, start, length))
    named = [{"name": name, "spans": sorted(each, key=lambda span: span[1])} for name, each in found.items()]
    return {"tracks": named, "steps": [(name, start, length) for start, length, name in recent]}
