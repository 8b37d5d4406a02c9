"""The results file: JSON lines, one header and one record a measurement, written as they come.

While a run lasts, the file also notes which provider is being tried and which cases are done, so that whoever
goes on after a crash knows where it was."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

Record = dict[str, Any]
PEER_PACKAGES = ("flashinfer-python", "flash-attn", "liger-kernel", "quack-kernels", "transformers", "vllm")


class Journal:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = read(path) if path.exists() else []

    def write(self, record: str, **fields: Any) -> None:
        self.records.append({"record": record, **fields})
        with self.path.open("a") as file:
            file.write(json.dumps(self.records[-1]) + "\n")

    def has(self, **fields: Any) -> bool:
        return any(fields.items() <= record.items() for record in self.records)

    def count(self, record: str) -> int:
        return sum(entry["record"] == record for entry in self.records)

    @property
    def complete(self) -> bool:
        """Whether this is what ``finish`` left."""
        return bool(self.records) and not (self.count("done") or self.count("attempt"))

    def unfinished_attempt(self) -> Record | None:
        """The provider that was being tried when the run stopped."""
        last = self.records[-1] if self.records else {}
        return {k: v for k, v in last.items() if k != "record"} if last.get("record") == "attempt" else None

    def finish(self) -> None:
        """Leaves the header and each measurement; where a crash made a case start again, its last ones."""
        kept: dict[tuple[Any, ...], Record] = {}
        for record in self.records:
            if record["record"] in ("header", "measurement"):
                kept[tuple(record.get(field) for field in ("record", "section", "case", "provider"))] = record
        self.path.write_text("".join(json.dumps(record) + "\n" for record in kept.values()))


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def environment(commit: str | None, absent: dict[str, str]) -> Record:
    """What a figure depends on, besides the code measured: the machine and the versions."""
    facts: Record = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or _output("git", "rev-parse", "HEAD"),
        "dirty": None if commit else bool(_output("git", "status", "--porcelain")),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "cpu": _cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "peers": {name: version for name in PEER_PACKAGES if (version := _version(name))},
        "absent": absent,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "sms": properties.multi_processor_count,
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    return facts


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints, or None where there is no such command or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [
            line.split(":")[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor()
