"""Builds the package with its CUDA kernels, emulated, in the place of the CPU's: `make emulate`.

python tests/emulation/build.py FOLDER TARGET && PYTHONPATH=FOLDER python -m pytest tests/test_forward.py

TARGET: 90, or 75 for the code of GPUs before sm_90.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from torch.utils import cpp_extension

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def main() -> None:
    folder, target = Path(sys.argv[1]).resolve(), sys.argv[2]
    package = folder / "fused_add_rms_norm"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for stale in package.rglob("*.py"):
        stale.unlink()
    shutil.copytree(ROOT / "python/fused_add_rms_norm", package, ignore=ignored, dirs_exist_ok=True)

    sources = [HERE / "emulation.cpp", *ROOT.glob("csrc/*.cpp"), *ROOT.glob("csrc/python/*.cpp")]
    for source in [*ROOT.glob("csrc/cuda/*.cpp"), *ROOT.glob("csrc/cuda/*.cu")]:
        wrapper = folder / f"cuda_{source.name}.cpp"  # g++ takes a .cu file for a linker script
        if not wrapper.exists():
            wrapper.write_text(f'#include "emulation.h"\n#include "{source.relative_to(ROOT / "csrc")}"\n')
        sources.append(wrapper)
    if cpp_extension.CUDA_HOME is None:
        sys.exit("expected a CUDA toolkit (CUDA_HOME), whose headers the emulation takes; got none")
    cpp_extension.load(
        name="_C",
        sources=[str(source) for source in sources],
        build_directory=str(package),
        extra_include_paths=[str(HERE), str(ROOT / "csrc"), f"{cpp_extension.CUDA_HOME}/include"],
        # No fused multiply-add but where the kernels ask for one; no check that a longjmp goes up the stack,
        # which a fiber's does not.
        extra_cflags=[
            *("-O1", "-g0", "-ffp-contract=off", "-Wno-attributes", "-U_FORTIFY_SOURCE"),
            f"-DFUSED_EMULATED_TARGET={target}",
        ],
    )


if __name__ == "__main__":
    main()
