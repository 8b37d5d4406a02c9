"""Installs a clone of the last commit in every way there is, in fresh environments, and notes what each took.

    python benchmarks/install.py --python python3.11 --python python3.12=2.11.*

An interpreter may name the torch that it gets; else that is the newest. The first tries every way, the others
the usual one; tests run against whatever was installed. The table is made by
`report.py RUN.jsonl --pages CONTRIBUTING.md`.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from journal import Journal, environment

ROOT = Path(__file__).parents[1]
OURS = ("FUSED_CUDA", "FUSED_INSTRUMENT", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "PYTHONPATH")
TOOLS = "build 'setuptools>=77' ninja uv pytest hypothesis numpy"
INSTALL = "python -m pip install --no-build-isolation "
TESTS = "python -m pytest -q " + " ".join(
    f"tests/test_{name}.py" for name in ("build", "module", "forward", "autograd")
)


@dataclass(frozen=True)
class Way:
    name: str
    command: str
    env: dict[str, str] = field(default_factory=dict)
    refusal: str = ""  # of what must not work, words that tell the user what will


CPU, ONE = {"FUSED_CUDA": "0"}, {"TORCH_CUDA_ARCH_LIST": "9.0"}
USUAL = Way("pip install --no-build-isolation .", INSTALL + ".", ONE)
WAYS = (
    USUAL,
    Way("the same for every architecture", INSTALL + "."),
    Way("FUSED_CUDA=0 pip install --no-build-isolation .", INSTALL + ".", CPU),
    Way("pip install --no-build-isolation -e .", INSTALL + "-e .", CPU),
    Way(
        "pip wheel --no-build-isolation .",
        f"python -m pip wheel -q --no-build-isolation --no-deps -w dist . && {INSTALL} dist/*.whl",
        CPU,
    ),
    Way("an sdist", f"python -m build -q --sdist --no-isolation && {INSTALL} dist/*.tar.gz", CPU),
    Way(
        "uv pip install --no-build-isolation .",
        'python -m uv pip install --python "$(which python)" --no-build-isolation .',
        CPU,
    ),
    Way("pip install .", "python -m pip install .", CPU, "pip install --no-build-isolation ."),
)


def resident_bytes(session: int) -> int:
    """Of all processes of a session."""
    pages = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[3]) == session:
            pages += int(fields[21])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run(command: str, cwd: Path, env: dict[str, str]) -> tuple[int, str, float, int]:
    """Exit status, output, seconds, and the most memory that was resident at a time."""
    start = time.perf_counter()
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    peak = 0

    def watch() -> None:
        nonlocal peak
        while process.poll() is None:
            peak = max(peak, resident_bytes(process.pid))
            time.sleep(0.2)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        output = process.communicate()[0]
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        watcher.join()
    return process.returncode, output, time.perf_counter() - start, peak


class Environment:
    """A virtual environment with a torch and what the tests need."""

    def __init__(self, folder: Path, python: str, torch: str) -> None:
        self.folder = folder
        clean = {name: value for name, value in os.environ.items() if name not in OURS}
        self.env = {**clean, "PATH": f"{folder}/venv/bin:{clean['PATH']}"}
        self.sh(f"{python} -m venv venv && python -m pip install -q --upgrade pip", folder)
        self.sh(f"python -m pip install -q 'torch=={torch}' {TOOLS}", folder)
        versions = (
            "import platform, torch; print(f'Python {platform.python_version()}, torch {torch.__version__}')"
        )
        self.name = self.sh(f'python -c "{versions}"', folder).strip()

    def sh(self, command: str, cwd: Path, **env: str) -> str:
        status, output, _, _ = run(command, cwd, {**self.env, **env})
        if status:
            raise RuntimeError(f"{command}\n{output}")
        return output

    def install(self, way: Way, commit: str) -> dict[str, object]:
        """The fields of a record."""
        clone = Path(tempfile.mkdtemp(dir=self.folder))
        self.sh(f"git clone -q '{ROOT}' . && git checkout -q {commit}", clone)
        self.sh("python -m pip uninstall -q -y fused-add-rms-norm", clone)
        status, output, seconds, peak = run(way.command, clone, {**self.env, **way.env})
        record = {"seconds": round(seconds, 1), "gib": round(peak / 2**30, 2)}
        if way.refusal and status != 0 and way.refusal in output:
            return record | {"status": "ok", "message": "refused, and says how"}
        try:
            if way.refusal or status:
                raise RuntimeError(output)
            facts = self.sh("python -m fused_add_rms_norm", self.folder)
            results = re.findall(r"(\d+ passed.*?)(?:,? \d+ warn\w+)? in ", self.sh(TESTS, clone))[-1]
        except RuntimeError as error:
            return record | {"status": "wrong", "message": str(error).replace(str(self.folder), "")[-20000:]}
        cuda = re.search(r"(CUDA \S+ for [^,]+)", facts)
        return record | {
            "status": "ok",
            "message": f"self-check ok, tests: {results}",
            "kernels": f"CPU, {cuda[1]}" if cuda else "CPU",
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", action="append", metavar="PYTHON[=TORCH]", help=f"default: {sys.executable}"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/install.jsonl")
    args = parser.parse_args()
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True, cwd=ROOT).strip()
    unfinished = args.out.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    journal = Journal(unfinished)
    journal.write("header", **environment(commit, {}))
    for number, wish in enumerate(args.python or [sys.executable]):
        python, _, torch = wish.partition("=")
        with tempfile.TemporaryDirectory() as folder:
            here = Environment(Path(folder), python, torch or "2.*")
            for way in WAYS if number == 0 else (USUAL,):
                record = here.install(way, commit)
                print(f"{here.name}: {way.name}: {record}", flush=True)
                journal.write("measurement", section="install", case=here.name, provider=way.name, **record)
    unfinished.replace(args.out)
    return any(record.get("status") == "wrong" for record in journal.records)


if __name__ == "__main__":
    sys.exit(main())
