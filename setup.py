"""Builds fused_add_rms_norm._C: host code, CPU kernels and, where torch and nvcc allow it, CUDA kernels.

FUSED_CUDA=1 demands the CUDA kernels, FUSED_CUDA=0 leaves them out; CUDA_HOME, TORCH_CUDA_ARCH_LIST and
MAX_JOBS are torch's. FUSED_INSTRUMENT=sanitize|coverage is for `make asan` and `make coverage`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from glob import glob
from pathlib import Path

from setuptools import setup

try:
    import torch
except ModuleNotFoundError:
    sys.exit(
        "fused_add_rms_norm is compiled against the torch that you run, and there is none here, or pip's "
        "build isolation hides it. Install torch first, then: pip install --no-build-isolation ."
    )
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

DEFAULT_TARGETS = {(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)}
BYTES_PER_JOB = 2 << 30  # a file that includes the headers of torch takes the compiler 1.3 GiB
OLDEST_NVCC = "12.4"  # has __maxnreg__
INSTRUMENT = os.environ.get("FUSED_INSTRUMENT", "release")
INSTRUMENT_FLAGS = {
    "release": [],
    "sanitize": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-O1", "-g"],
    "coverage": ["--coverage", "-O0"],
}


def decide_cuda(wish: str, torch_cuda: str | None, nvcc: str | None) -> tuple[bool, str]:
    """Whether to build the CUDA kernels, and why, by FUSED_CUDA and the CUDA versions of torch and nvcc."""
    if wish not in ("", "0", "1"):
        sys.exit(f"FUSED_CUDA: expected 0, 1 or nothing, got {wish!r}")
    if wish == "0":
        return False, "FUSED_CUDA=0"
    if torch_cuda is None:
        if wish == "1":
            sys.exit("FUSED_CUDA=1 demands a torch built for CUDA, and this one is not. Install one that is.")
        return False, "this torch is not built for CUDA"
    major = torch_cuda.split(".")[0]
    oldest = OLDEST_NVCC if major == OLDEST_NVCC.split(".")[0] else major
    if nvcc is None or nvcc.split(".")[0] != major or version_of(nvcc) < version_of(oldest):
        found = f"nvcc is of CUDA {nvcc}" if nvcc else "nvcc was not found"
        sys.exit(
            f"This torch is built for CUDA {torch_cuda}, but {found} (CUDA_HOME={CUDA_HOME}). Either point "
            f"CUDA_HOME to a CUDA {major} toolkit ({oldest} or newer), or build the CPU kernels alone with "
            "FUSED_CUDA=0."
        )
    return True, f"torch is built for CUDA {torch_cuda} and nvcc {nvcc} is there"


def version_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def choose_targets(wish: str, gpus: list[tuple[int, int]], known: set[tuple[int, int]]) -> str:
    """TORCH_CUDA_ARCH_LIST: as wished, else for the GPUs in sight, else the default; of what nvcc knows."""
    if wish not in ("", "native"):
        return wish
    targets = {min(gpu, max(known)) for gpu in gpus} or DEFAULT_TARGETS & known
    return ";".join(f"{major}.{minor}" for major, minor in sorted(targets)) + "+PTX"


def limit_jobs(cpus: int, memory: int) -> int:
    """How many compilers fit into the cores and the memory."""
    return max(1, min(cpus, memory // BYTES_PER_JOB))


def memory_bytes() -> int:
    """The machine's memory, or the container's share of it."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limits.append(int(Path(path).read_text()))
    return min(limits)


def run_nvcc(option: str) -> str:
    """What nvcc prints, or nothing where there is no nvcc."""
    with suppress(OSError):
        return subprocess.check_output([f"{CUDA_HOME}/bin/nvcc", option], text=True)
    return ""


class IncrementalBuild(BuildExtension):
    """Finds the objects of the last build however it is started; pip's editable mode would start anew."""

    def finalize_options(self) -> None:
        self.build_temp = f"build/{sys.implementation.cache_tag}-{INSTRUMENT}"
        super().finalize_options()


def main() -> None:
    release = re.search(r"release (\d+\.\d+)", run_nvcc("--version"))
    nvcc = release.group(1) if release else None
    with_cuda, why = decide_cuda(os.environ.get("FUSED_CUDA", ""), torch.version.cuda, nvcc)
    folders = ["csrc", "csrc/cpu", "csrc/python"]
    facts = []
    what = "CPU kernels"
    if with_cuda:
        known = {(int(a), int(b)) for a, b in re.findall(r"sm_(\d+)(\d)\b", run_nvcc("--list-gpu-code"))}
        gpus = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
        targets = choose_targets(os.environ.get("TORCH_CUDA_ARCH_LIST", ""), gpus, known)
        os.environ["TORCH_CUDA_ARCH_LIST"] = targets
        folders.append("csrc/cuda")
        facts = [("FUSED_CUDA_VERSION", f'"{nvcc}"'), ("FUSED_CUDA_TARGETS", f'"{targets}"')]
        what = f"CPU and CUDA kernels for {targets}"
    jobs = int(os.environ.get("MAX_JOBS") or limit_jobs(len(os.sched_getaffinity(0)), memory_bytes()))
    os.environ["MAX_JOBS"] = str(jobs)
    print(f"fused_add_rms_norm: {what}, since {why}; {jobs} compiler(s) at a time", file=sys.stderr)

    # torch adds -std and the architectures, the latter only while none of nvcc's flags here contains "arch".
    flags = ["-O3", "-g0", "-fopenmp", *INSTRUMENT_FLAGS[INSTRUMENT]]
    sources = sorted(f for folder in folders for kind in ("cpp", "cu") for f in glob(f"{folder}/*.{kind}"))
    # nvcc compiles a file for one target after another, unless told to use the cores that are left. For two
    # at least, or the last file would leave a core idle.
    threads = max(min(2, jobs), jobs // max(1, sum(f.endswith(".cu") for f in sources)))
    extension = (CUDAExtension if with_cuda else CppExtension)(
        "fused_add_rms_norm._C",
        sources=sources,
        include_dirs=[os.path.abspath("csrc")],
        define_macros=facts,
        extra_compile_args={"cxx": flags, "nvcc": ["-O3", f"--threads={threads}"]},
        extra_link_args=flags,
    )
    setup(
        ext_modules=[extension],
        cmdclass={"build_ext": IncrementalBuild},
        # torch's C++ interface holds within one minor version.
        install_requires=["torch=={}.{}.*".format(*torch.__version__.split("."))],
    )


if __name__ == "__main__":
    main()
