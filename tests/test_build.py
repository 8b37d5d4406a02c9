"""What setup.py decides, and what a user reads when a build or an import cannot work."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils import cpp_extension

from fused_add_rms_norm import __main__, _load

ROOT = Path(__file__).parent.parent
PACKAGE = Path(_load.__file__).parent
KNOWN_TO_NVCC_13 = {(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (11, 0), (12, 0), (12, 1)}
KNOWN_TO_NVCC_12_6 = {(5, 0), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0)}


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_py", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_python(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **env}
    )


@pytest.mark.parametrize(
    ("wish", "torch_cuda", "nvcc", "with_cuda", "why"),
    [
        ("", "13.2", "13.2", True, "torch is built for CUDA 13.2 and nvcc 13.2 is there"),
        ("", "13.2", "13.0", True, "torch is built for CUDA 13.2 and nvcc 13.0 is there"),  # the major counts
        ("1", "13.2", "13.0", True, "torch is built for CUDA 13.2 and nvcc 13.0 is there"),
        ("", "12.8", "12.4", True, "torch is built for CUDA 12.8 and nvcc 12.4 is there"),
        ("0", "13.2", "13.0", False, "FUSED_CUDA=0"),
        ("0", "13.2", None, False, "FUSED_CUDA=0"),
        ("0", "13.2", "12.8", False, "FUSED_CUDA=0"),
        ("", None, "13.0", False, "this torch is not built for CUDA"),
        ("", None, None, False, "this torch is not built for CUDA"),
    ],
)
def test_cuda_follows_torch_and_nvcc(
    build: ModuleType, wish: str, torch_cuda: str | None, nvcc: str | None, with_cuda: bool, why: str
) -> None:
    assert build.decide_cuda(wish, torch_cuda, nvcc) == (with_cuda, why)


@pytest.mark.parametrize(
    ("wish", "torch_cuda", "nvcc", "fragments"),
    [
        ("", "13.2", None, ["CUDA 13.2", "nvcc was not found", "CUDA_HOME to a CUDA 13", "FUSED_CUDA=0"]),
        ("1", "13.2", None, ["CUDA 13.2", "nvcc was not found", "CUDA_HOME to a CUDA 13"]),
        ("", "13.2", "12.8", ["CUDA 13.2", "nvcc is of CUDA 12.8", "CUDA_HOME to a CUDA 13", "FUSED_CUDA=0"]),
        ("", "12.6", "13.0", ["CUDA 12.6", "nvcc is of CUDA 13.0", "CUDA_HOME to a CUDA 12", "FUSED_CUDA=0"]),
        ("", "12.8", "12.3", ["CUDA 12.8", "nvcc is of CUDA 12.3", "12.4 or newer", "FUSED_CUDA=0"]),
        ("1", None, "13.0", ["FUSED_CUDA=1", "torch built for CUDA"]),
        ("yes", "13.2", "13.0", ["FUSED_CUDA", "expected 0, 1 or nothing", "got 'yes'"]),
    ],
)
def test_a_build_that_cannot_be_is_refused_with_the_ways_on(
    build: ModuleType, wish: str, torch_cuda: str | None, nvcc: str | None, fragments: list[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        build.decide_cuda(wish, torch_cuda, nvcc)
    for fragment in fragments:
        assert fragment in str(refusal.value)


@pytest.mark.parametrize(
    ("wish", "gpus", "known", "targets"),
    [
        ("", [], KNOWN_TO_NVCC_13, "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"),
        ("native", [], KNOWN_TO_NVCC_13, "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"),
        ("", [], KNOWN_TO_NVCC_12_6, "7.5;8.0;8.6;8.9;9.0+PTX"),
        ("", [(9, 0)], KNOWN_TO_NVCC_13, "9.0+PTX"),
        ("", [(9, 0), (8, 0), (9, 0)], KNOWN_TO_NVCC_13, "8.0;9.0+PTX"),
        (
            "",
            [(10, 0)],
            KNOWN_TO_NVCC_12_6,
            "9.0+PTX",
        ),  # newer than nvcc: the PTX of the newest that it knows
        ("9.0a;Ampere", [(9, 0)], KNOWN_TO_NVCC_13, "9.0a;Ampere"),
    ],
)
def test_targets(
    build: ModuleType, wish: str, gpus: list[tuple[int, int]], known: set[tuple[int, int]], targets: str
) -> None:
    assert build.choose_targets(wish, gpus, known) == targets


@pytest.mark.parametrize(("cpus", "gib", "jobs"), [(2, 24, 2), (64, 16, 8), (8, 1, 1), (1, 512, 1)])
def test_compilers_fit_into_memory(build: ModuleType, cpus: int, gib: int, jobs: int) -> None:
    assert build.limit_jobs(cpus, gib << 30) == jobs


@pytest.fixture
def fake_toolkit(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """setup.py's main() with a torch for CUDA 13.2, an nvcc of 13.0, no GPU; notes what setup() is told."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "release 13.0, V13.0.1" || echo sm_80; echo sm_90\n'
    )
    nvcc.chmod(0o755)
    for module in (build, cpp_extension):
        monkeypatch.setattr(module, "CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in ("FUSED_CUDA", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.chdir(ROOT)
    passed = SimpleNamespace()
    monkeypatch.setattr(build, "setup", lambda **arguments: passed.__dict__.update(arguments))
    return passed


def test_a_cuda_build_compiles_both_backends(
    build: ModuleType, fake_toolkit: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    build.main()
    (extension,) = fake_toolkit.ext_modules
    assert {"csrc/cpu/add_rms_norm.cpp", "csrc/cuda/add_rms_norm.cpp", "csrc/cuda/forward.cu"} < set(
        extension.sources
    )
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0+PTX"
    assert ("FUSED_CUDA_TARGETS", '"8.0;9.0+PTX"') in extension.define_macros
    summary = capsys.readouterr().err
    assert "CPU and CUDA kernels for 8.0;9.0+PTX, since torch is built for CUDA 13.2" in summary
    assert summary.count("\n") == 1


def test_a_cpu_build_leaves_the_cuda_folder_out(
    build: ModuleType, fake_toolkit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSED_CUDA", "0")
    build.main()
    (extension,) = fake_toolkit.ext_modules
    assert "csrc/cpu/add_rms_norm.cpp" in extension.sources
    assert not [source for source in extension.sources if source.startswith("csrc/cuda/")]
    assert not extension.define_macros and "cudart" not in extension.libraries


def test_torch_keeps_its_own_flags(build: ModuleType, fake_toolkit: SimpleNamespace) -> None:
    build.main()
    (extension,) = fake_toolkit.ext_modules
    for flags in extension.extra_compile_args.values():
        assert not [flag for flag in flags if "arch" in flag or "-std" in flag]


def test_no_two_sources_share_an_object_file(build: ModuleType, fake_toolkit: SimpleNamespace) -> None:
    build.main()
    (extension,) = fake_toolkit.ext_modules
    objects = [str(Path(source).with_suffix(".o")) for source in extension.sources]
    assert len(objects) == len(set(objects))


@pytest.mark.skipif(
    torch.version.cuda is not None and cpp_extension.CUDA_HOME is None,
    reason="a torch built for CUDA needs the CUDA toolkit for C++ programs",
)
@pytest.mark.parametrize(
    "cmake",
    sorted(
        {
            os.path.realpath(path)
            for folder in os.get_exec_path()
            if (path := shutil.which("cmake", path=folder))
        }
    ),
)
def test_every_cmake_configures_with_its_default_generator(cmake: str, tmp_path: Path) -> None:
    """CMake 3.25 once stopped there, of its generators in that of Makefiles alone."""
    command = [cmake, "-S", ROOT, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"]
    env = {name: value for name, value in os.environ.items() if name != "CMAKE_GENERATOR"}
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_library_carries_what_it_was_built_for() -> None:
    targets = _load._C.build_info()["cuda_targets"]
    beside_triton = next(
        Path(torch.__file__).parent.parent.glob("triton/backends/nvidia/bin/cuobjdump"), None
    )
    cuobjdump = shutil.which("cuobjdump") or beside_triton
    if targets is None or cuobjdump is None:
        pytest.skip("needs a build with CUDA kernels, and cuobjdump")

    def carried(kind: str) -> set[str]:
        listing = subprocess.check_output([cuobjdump, kind, _load._C.__file__], text=True)
        return set(re.findall(r"\.sm_(\d+a?)\.", listing))

    wanted = re.findall(r"(\d+)\.(\da?)(\+PTX)?", targets)
    assert carried("--list-elf") == {major + minor for major, minor, _ in wanted}
    assert carried("--list-ptx") == {major + minor for major, minor, ptx in wanted if ptx}


def test_a_build_without_torch_says_how_to_install() -> None:
    result = run_python(
        "-c",
        "import runpy, sys; sys.modules['torch'] = None; runpy.run_path('setup.py', run_name='__main__')",
    )
    assert result.returncode == 1
    assert "pip install --no-build-isolation ." in result.stderr and "Traceback" not in result.stderr


def import_copy(folder: Path, library: dict[str, str]) -> str:
    """Imports a copy of the package whose compiled library is these files, and returns the error."""
    copy = folder / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name, text in library.items():
        (copy / name).write_text(text)
    result = run_python("-c", "import fused_add_rms_norm", PYTHONPATH=str(folder))
    assert result.returncode == 1
    return result.stderr.strip().splitlines()[-1]


def test_an_import_without_the_library_says_how_to_build(tmp_path: Path) -> None:
    error = import_copy(tmp_path, {})
    assert "is not built for Python" in error and "pip install --no-build-isolation" in error


def test_an_import_of_a_broken_library_says_what_it_was_built_for(tmp_path: Path) -> None:
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    error = import_copy(tmp_path, {f"_C{suffix}": "not a library"})
    assert f"cannot be loaded with torch {torch.__version__}" in error
    assert "pip install --no-build-isolation" in error


def test_an_import_under_another_torch_is_refused(tmp_path: Path) -> None:
    error = import_copy(tmp_path, {"_C.py": "build_info = lambda: {'torch': '1.13.1', 'cuda_targets': None}"})
    assert "compiled against torch 1.13.1" in error and f"with torch {torch.__version__}" in error
    assert "pip install --no-build-isolation" in error


@pytest.mark.parametrize(
    ("capability", "targets", "fits"),
    [
        ((9, 0), "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX", True),
        ((8, 7), "8.0;9.0", True),  # machine code runs on later minors
        ((8, 0), "8.6", False),
        ((9, 0), "8.9", False),
        ((9, 0), "8.9+PTX", True),
        ((12, 1), "7.5 9.0+PTX", True),
        ((7, 0), "7.5;9.0+PTX", False),
        ((11, 0), "10.0;12.0+PTX", False),
        ((9, 0), "9.0a", True),
        ((10, 3), "10.0a+PTX", False),  # code for one architecture alone
        ((9, 0), "Hopper", True),
    ],
)
def test_which_gpus_a_build_serves(capability: tuple[int, int], targets: str, fits: bool) -> None:
    assert _load.has_kernels(capability, targets) == fits


def test_a_gpu_without_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(9, 0), (7, 0)][index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: ["H200", "V100"][index])
    with pytest.warns(UserWarning, match=r"cuda:1 \(V100, 7.0\).*TORCH_CUDA_ARCH_LIST=7.0") as warnings:
        _load.warn_of_gpus_without_kernels("8.0;9.0")
    assert len(warnings) == 1


def test_the_report_names_versions_and_checks_every_device(capsys: pytest.CaptureFixture[str]) -> None:
    status = __main__.main()
    report = capsys.readouterr().out
    assert status == 0, report
    assert f"torch {torch.__version__}" in report
    served = torch.cuda.device_count() if _load._C.build_info()["cuda"] else 0
    assert report.count("self-check ok") == 1 + served


def test_the_report_tells_a_wrong_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(__main__, "add_rms_norm", lambda input, residual, weight: (input, residual))
    assert __main__.main() == 1
    assert "self-check FAILED: out is off by" in capsys.readouterr().out
