"""What this project sets itself to reach, each target checked against one run's results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import problems
from measurements import COPIES, Results, half_spread, is_project
from problems import Case


@dataclass(frozen=True)
class Verdict:
    """One target: a measured value (None where it was not measured) against its bound."""

    target: str
    value: float | None
    bound: float
    at_least: bool
    detail: str = ""

    @property
    def met(self) -> bool:
        return self.value is not None and (
            self.value >= self.bound if self.at_least else self.value <= self.bound
        )

    @property
    def margin(self) -> str:
        if self.value is None:
            return "not measured"
        return f"{'met' if self.met else 'MISSED'} by {abs(self.value - self.bound):.3f}"


FORWARD_SHARE = {cols: 0.97 if cols <= 16384 else 0.96 for cols in problems.WIDE}
BACKWARD_SHARE = {512: 0.92, 1024: 0.95, 2048: 0.96, 4096: 0.96, 5120: 0.96, 8192: 0.96}
BACKWARD_SHARE |= {16384: 0.93, 32768: 0.93, 65536: 0.88, 131072: 0.88}
SQUARE = (4096, 4096)


def share_targets() -> Iterator[tuple[str, Case, float]]:
    """Section, case, and the share of the copy to reach there."""
    for dtype in ("bf16", "fp16", "fp32", "mixed"):
        for case in problems.sweep(dtype, peers=False):
            yield "forward", case, 0.95 if dtype == "mixed" else FORWARD_SHARE[case.cols]
    for case in (*problems.ODD, *problems.ARRANGED, *problems.SHORT):
        yield "forward", case, 0.90
    for dtype in ("bf16", "fp16"):
        for case in problems.sweep(dtype, peers=False):
            yield "backward", case, 0.90 if (case.rows, case.cols) == SQUARE else BACKWARD_SHARE[case.cols]
    yield "backward", Case(16384, 4096, "fp32"), 0.98
    yield "backward", Case(16384, 4096, "mixed"), 0.95
    for case in (*problems.ODD[:2], *problems.ARRANGED):
        yield "backward", case, 0.80


def shares(results: Results) -> Iterator[Verdict]:
    """The slowest of the project's ways to call it has to reach the share."""
    for section, case, bound in share_targets():
        ours = {
            name: share
            for name in results.measured(section, case.name)
            if is_project(name) and (share := results.share(section, case.name, name)) is not None
        }
        slowest = min(ours, key=lambda name: ours[name], default="")
        yield Verdict(f"{section}, {case.name}: share of the copy", ours.get(slowest), bound, True, slowest)


def best_peer(results: Results, section: str, case: str) -> tuple[str, float, float] | None:
    """The peer that comes closest to this project: its name, its time a byte over ours, and the spread of
    that. In place is compared with in place."""
    records = results.measured(section, case)
    pairs = [
        (
            name,
            peer["us"] / peer["bytes"] * ours["bytes"] / ours["us"],
            max(half_spread(peer) / peer["us"], half_spread(ours) / ours["us"]),
        )
        for name, peer in records.items()
        if not is_project(name) and name not in COPIES
        for own, ours in records.items()
        if is_project(own) and own != "fused out=" and ours["in_place"] == peer["in_place"]
    ]
    return min(pairs, key=lambda pair: pair[1], default=None)


def against_peers(results: Results) -> Iterator[Verdict]:
    for section in ("forward", "backward"):
        for case in results.cases(section):
            closest = best_peer(results, section, case)
            if closest is None:
                continue
            name, ratio, spread = closest
            yield Verdict(f"{section}, {case}: a peer's time a byte over ours", ratio, 1 - spread, True, name)
            rows, cols = (
                results.measured(section, case)[name]["rows"],
                results.measured(section, case)[name]["cols"],
            )
            far_ahead = cols >= 16384 or (rows, cols) == SQUARE
            if section == "backward" and case.endswith("bf16") and far_ahead:
                target = f"{section}, {case}: the best peer's time a byte over ours"
                yield Verdict(target, ratio, 1.3, True, name)


def latencies(results: Results) -> Iterator[Verdict]:
    """Decode and few rows: below every peer, whether it works in place or not; decode also against both kinds
    of copy."""
    for section, cases in (("decode", problems.DECODE), ("decode-backward", problems.DECODE_BACKWARD)):
        ours = "fused in place" if section == "decode" else "fused"
        for case in cases:
            peers = {
                name: ratio
                for name in results.measured(section, case.name)
                if not is_project(name)
                and name not in COPIES
                and (ratio := results.multiple(section, case.name, ours, name)) is not None
            }
            closest = max(peers, key=lambda name: peers[name], default="")
            yield Verdict(
                f"{section}, {case.name}: time over the best peer's", peers.get(closest), 1, False, closest
            )
            for ceiling in COPIES if section == "decode" else ():
                yield Verdict(
                    f"{section}, {case.name}: time over a copy's",
                    results.multiple(section, case.name, ours, ceiling),
                    1.0 if case.rows <= 16 else 1.1,
                    False,
                    ceiling,
                )


def host(results: Results) -> Iterator[Verdict]:
    (case,) = problems.HOST
    for call, bound in (("torch.ops.fused.add_rms_norm_", 1.2), ("torch.ops.fused.add_rms_norm", 1.7)):
        value = results.multiple("host-calls", case.name, call, "torch.add")
        yield Verdict(f"host, {call}: multiples of torch.add", value, bound, False)
    value = results.multiple("host-train", case.name, "fused", "add + F.rms_norm")
    yield Verdict("host, forward + backward: time over add + F.rms_norm's", value, 1, False)


def memory(results: Results) -> Iterator[Verdict]:
    """Beyond inputs, results and gradients: rstd saved, and one fp32 row of partials a block, of which there
    are no more than rows nor than fit on the GPU at once."""
    for case in problems.MEMORY:
        record = results.get("memory", case.name, "fused")
        sms = next((header["sms"] for header in results.headers if "sms" in header), 0)
        rstd = -(-4 * case.rows // 512) * 512  # the allocator rounds to 512 bytes
        partials = 4 * case.cols * min(case.rows, 8 * sms)
        saved = record["saved_bytes"] / rstd if record else None
        workspace = record["workspace_bytes"] / partials if record else None
        yield Verdict(f"memory, {case.name}: saved, in rstd's", saved, 1, False)
        yield Verdict(f"memory, {case.name}: workspace, in partials'", workspace, 1, False)


def cpu(results: Results) -> Iterator[Verdict]:
    for case in problems.CPU:
        value = results.multiple("cpu-forward", case.name, "add + F.rms_norm", "fused")
        yield Verdict(f"CPU, {case.name}: time of add + F.rms_norm over ours", value, 1.5, True)


def check(results: Results) -> list[Verdict]:
    """Every target, in the order of the sections."""
    parts = (shares, against_peers, latencies, host, memory, cpu)
    return [verdict for part in parts for verdict in part(results)]
