"""Times a Hugging Face Llama of random weights, unpatched and patched, end to end.

    python benchmarks/hf.py                            1B and 8B shapes, every mode
    python benchmarks/hf.py --quick                    eager, fewer rounds
    python benchmarks/hf.py --only "8B eager"          what has one of these texts in its name
    python benchmarks/hf.py --report RUN.jsonl         the table and the targets of a run
    python benchmarks/hf.py --report RUN.jsonl --plot docs/plots/huggingface.svg --page docs/huggingface.md

Variants: `upstream`; `F.rms_norm`, upstream with torch's function in its norms; `Liger`, upstream with
Liger's norm patch, where that is installed; `patched`, after `hf.patch`. They are models of one set of
weights and take turns, round by round.

Modes: `eager`; `compiled`, by `torch.compile`; `CUDA graphs`, by its mode `reduce-overhead`, which is what
`generate` compiles a decode step with.

Cases: `decode`, one token without a cache; `prefill`, 4 x 2048 tokens, logits of the last; `train`, forward,
loss and backward of 2 x 2048 tokens. bf16, sdpa. Times are wall clock of steps queued one after another and
waited for at the end. Peak memory is what a step allocates on top of what is allocated before it.
"""

from __future__ import annotations

import argparse
import copy
import gc
import operator
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hf_variants import VARIANTS
from journal import Journal, Record, environment, read
from timing import Sample, quiet
from tqdm import tqdm

SHAPES: dict[str, dict[str, Any]] = {  # of Llama 3.2 1B and Llama 3.1 8B
    "1B": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings=True),
    "8B": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, tie_word_embeddings=False),
    "tiny": dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, tie_word_embeddings=True),
}
MODES = {"eager": None, "compiled": "default", "CUDA graphs": "reduce-overhead"}  # torch.compile's name


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    length: int
    train: bool = False
    steps: int = 1  # queued before one is waited for
    rounds: int = 8
    modes: tuple[str, ...] = ("eager", "compiled")

    def step(self, model: Any, call: Any, tokens: torch.Tensor) -> None:
        """`call` is the model, or what torch.compile made of it."""
        if self.train:
            call(tokens, labels=tokens, use_cache=False).loss.backward()
            model.zero_grad(set_to_none=True)
        else:
            with torch.no_grad():
                call(tokens, use_cache=False, logits_to_keep=1)


Step = Callable[[], None]

CASES = (
    Case("decode", 1, 1, steps=5, rounds=45, modes=tuple(MODES)),
    Case("prefill", 4, 2048, steps=2),
    Case("train", 2, 2048, train=True, steps=2),
)


# --- Measuring ------------------------------------------------------------------------------------


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.journal = Journal(args.out)
        self.cuda = args.device == "cuda"

    def run(self) -> None:
        self.journal.write("header", **environment(self.args.commit, absent={}))
        for mode in self.args.modes:
            for shape in self.args.models:
                cases = [case for case in CASES if self.wanted(shape, mode, case)]
                if cases:
                    model = build(shape, self.args.device)
                    for case in cases:
                        self.measure(shape, mode, case, model)
                    del model
        self.journal.finish()

    def wanted(self, shape: str, mode: str, case: Case) -> bool:
        name = f"{shape} {mode} {case.name}"
        return mode in case.modes and (not self.args.only or any(text in name for text in self.args.only))

    def measure(self, shape: str, mode: str, case: Case, model: Any) -> None:
        batch, length = (case.batch, case.length) if self.cuda else (1, min(case.length, 64))
        tokens = torch.randint(0, model.config.vocab_size, (batch, length), device=self.args.device)
        model.train(case.train)
        variants = self.args.variants
        rounds = 3 if self.args.quick else case.rounds

        steps: dict[str, Step] = {}
        facts: dict[str, Record] = {}
        times: dict[str, list[float]] = {}
        total = len(variants) * (rounds + 1)
        with quiet(), tqdm(total=total, desc=f"{shape} {mode}, {case.name}", file=sys.stderr) as progress:
            for variant in variants:
                progress.set_postfix_str(variant)
                try:
                    steps[variant] = prepared(variant, mode, case, model, tokens)
                    facts[variant] = {"status": "ok", **self.first(steps[variant])}
                    times[variant] = []
                except Exception as error:
                    message = f"{type(error).__name__}: {error}"[:300]
                    facts[variant] = {"status": "refused", "message": message}
                progress.update()
            for _ in range(rounds):
                for variant, found in times.items():
                    progress.set_postfix_str(variant)
                    steps[variant]()  # the caches and the allocator's blocks are this variant's again
                    found.append(self.timed(case, steps[variant]))
                    progress.update()
        for variant, found in times.items():
            facts[variant] |= vars(Sample.of(found)) | {"rounds_us": [round(us, 4) for us in found]}
        for variant, fields in facts.items():
            self.journal.write(
                "measurement", section=f"{shape} {mode}", case=case.name, provider=variant, **fields
            )
        del steps
        torch._dynamo.reset()
        gc.collect()

    def first(self, step: Step) -> Record:
        """Compiles and warms up; the peak memory of a step, above what is allocated before it."""
        start = time.monotonic()
        for _ in range(3):
            step()
        self.synchronize()
        seconds = round(time.monotonic() - start, 1)
        if not self.cuda:
            return {"first_steps_s": seconds, "peak_bytes": None}
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        self.synchronize()
        return {"first_steps_s": seconds, "peak_bytes": torch.cuda.max_memory_allocated() - before}

    def timed(self, case: Case, step: Step) -> float:
        """Microseconds a step."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(case.steps):
            step()
        self.synchronize()
        return (time.perf_counter() - start) / case.steps * 1e6

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def prepared(variant: str, mode: str, case: Case, model: Any, tokens: torch.Tensor) -> Step:
    """A step of a model of its own, but with `model`'s weights."""
    weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    own = copy.deepcopy(model, weights)
    VARIANTS[variant](own)
    compiler = MODES[mode]
    call = torch.compile(own, fullgraph=True, dynamic=False, mode=compiler) if compiler else own
    return lambda: case.step(own, call, tokens)


def build(shape: str, device: str) -> Any:
    """A Llama of random weights, made where it runs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = dict(num_attention_heads=32, num_key_value_heads=8, vocab_size=128256)
    if shape == "tiny":
        heads = dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=256)
    config = LlamaConfig(
        **SHAPES[shape], **heads, max_position_embeddings=8192, rms_norm_eps=1e-5, attn_implementation="sdpa"
    )
    torch.manual_seed(0)
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(former)


# --- Report ---------------------------------------------------------------------------------------


def measurements(path: Path) -> dict[tuple[str, str], dict[str, Record]]:
    """(section, case) -> variant -> record."""
    found: dict[tuple[str, str], dict[str, Record]] = {}
    for record in read(path):
        if record["record"] == "measurement":
            found.setdefault((record["section"], record["case"]), {})[record["provider"]] = record
    return found


def table(found: dict[tuple[str, str], dict[str, Record]]) -> list[list[str]]:
    """Milliseconds, half the spread of 60 % of the rounds, and the peak above the weights."""

    def cell(record: Record | None) -> str:
        if record is None:
            return ""
        if record["status"] != "ok":
            return record["message"].partition(":")[0]
        text = f"{record['us'] / 1e3:.2f} ± {(record['us_p80'] - record['us_p20']) / 2e3:.2f}"
        return text + (f", {record['peak_bytes'] / 2**30:.2f} GiB" if record["peak_bytes"] else "")

    rows = [["ms a step, peak memory", *VARIANTS]]
    for (section, case), records in found.items():
        rows.append([f"{section}, {case}", *[cell(records.get(name)) for name in VARIANTS]])
    return rows


def targets(found: dict[tuple[str, str], dict[str, Record]]) -> Iterator[tuple[str, float, float]]:
    """What the drop-in sets itself to reach: the claim, the value, and what it must not exceed."""

    def ratio(section: str, case: str, field: str, other: str) -> float | None:
        records = found.get((section, case), {})
        ours, theirs = (records.get(name, {}) for name in ("patched", other))
        if field == "us" and "rounds_us" in ours and "rounds_us" in theirs:
            # They took turns: what slows the machine down for a while slows both.
            return statistics.median(map(operator.truediv, ours["rounds_us"], theirs["rounds_us"]))
        return ours[field] / theirs[field] if ours.get(field) and theirs.get(field) else None

    claims = [
        *[(f"{shape} eager", "decode", "us", "F.rms_norm", 1.0) for shape in ("1B", "8B")],
        *[
            (f"{shape} eager", case, "us", "Liger", 1.0)
            for shape in ("1B", "8B")
            for case in ("prefill", "train")
        ],
        ("1B eager", "train", "us", "upstream", 1 / 1.15),
        ("8B eager", "train", "peak_bytes", "Liger", 1.0),
        *[(f"{shape} eager", "prefill", "peak_bytes", "upstream", 1.0) for shape in ("1B", "8B")],
        *[
            (f"{shape} {mode}", case.name, "us", "upstream", 1.0)
            for shape in ("1B", "8B")
            for case in CASES
            for mode in case.modes
            if mode != "eager"
        ],
    ]
    for section, case, field, other, factor in claims:
        if (value := ratio(section, case, field, other)) is not None:
            what = "peak memory" if field == "peak_bytes" else "time"
            yield f"{section}, {case}: {what} against {other}", value, factor


def report(args: argparse.Namespace) -> None:
    found = measurements(args.report)
    rows = table(found)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    for claim, value, bound in targets(found):
        print(f"{'met   ' if value <= bound else 'MISSED'} {claim}: {value:.3f}, at most {bound:.3f}")
    if args.plot:
        plot(found, args.plot)
    if args.page:
        from report import fill_page

        args.page.write_text(
            fill_page(args.page.read_text(), {"huggingface": ("", rows)}, Path("docs/plots"))
        )


def plot(found: dict[tuple[str, str], dict[str, Record]], path: Path) -> None:
    """Time in units of upstream's, a group of bars for each case."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    for offset, name in enumerate(VARIANTS):
        bars = {
            position: records[name]["us"] / records["upstream"]["us"]
            for position, records in enumerate(found.values())
            if "us" in records.get(name, {}) and "us" in records.get("upstream", {})
        }
        colour = "black" if name == "patched" else f"C{offset}"
        axes.bar(
            [position + 0.2 * offset - 0.3 for position in bars],
            bars.values(),
            0.19,
            label=name,
            color=colour,
        )
    axes.set_xticks(range(len(found)), [f"{section}\n{case}" for section, case in found], fontsize="small")
    axes.set(ylabel="time in units of upstream's", ylim=(0, None))
    axes.legend(fontsize="small", ncols=len(VARIANTS), loc="lower center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("hf.jsonl"), help="the file to write")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["1B", "8B"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--only", nargs="+", help="texts, one of which is in the name, as in '8B eager decode'"
    )
    parser.add_argument("--quick", action="store_true", help="eager, three rounds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", help="the commit measured, where git cannot say")
    parser.add_argument("--report", type=Path, metavar="FILE", help="measure nothing, show this file")
    parser.add_argument("--page", type=Path, help="with --report: put the table between its markers there")
    parser.add_argument("--plot", type=Path, help="with --report: draw there")
    args = parser.parse_args()
    if args.quick:
        args.modes = ["eager"]
    if args.report is None:
        if args.out.exists():
            parser.error(f"{args.out} is there already")
        Bench(args).run()
        args.report = args.out
    report(args)


if __name__ == "__main__":
    main()
