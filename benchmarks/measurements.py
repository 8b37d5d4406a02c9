"""Results as report.py reads them: measurements of one or several files, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from journal import Record, read

COPIES = ("copy", "copy kernel")


def is_project(provider: str) -> bool:
    return provider.startswith(("fused", "torch.ops.fused"))


def skipped(case: dict[str, Record]) -> int:
    """How many providers of a case the run's time was too short for."""
    return sum(record["status"] == "skipped" for record in case.values())


class Results:
    """Measurements by section, case and provider. Of a case that several files hold, the last file's count,
    unless time was too short there for more providers: ratios are those of one run."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.headers: list[Record] = []
        self._cases: dict[tuple[str, str], dict[str, Record]] = {}
        for path in paths:
            records = read(path)
            self.headers += [record for record in records if record["record"] == "header"]
            here: dict[tuple[str, str], dict[str, Record]] = {}
            for record in records:
                if record["record"] == "measurement":
                    here.setdefault((record["section"], record["case"]), {})[record["provider"]] = record
            for case, found in here.items():
                if case not in self._cases or skipped(found) <= skipped(self._cases[case]):
                    self._cases[case] = found

    def cases(self, section: str) -> list[str]:
        return [case for name, case in self._cases if name == section]

    def of(self, section: str, case: str) -> dict[str, Record]:
        """All records of one case, by provider, refusals among them."""
        return self._cases.get((section, case), {})

    def measured(self, section: str, case: str) -> dict[str, Record]:
        return {name: record for name, record in self.of(section, case).items() if record["status"] == "ok"}

    def get(self, section: str, case: str, provider: str) -> Record | None:
        return self.measured(section, case).get(provider)

    def __iter__(self) -> Iterator[Record]:
        for records in self._cases.values():
            yield from records.values()

    def share(self, section: str, case: str, provider: str, ceiling: str = "copy") -> float | None:
        """Bandwidth in units of the copy's in the same run."""
        record, copy = self.get(section, case, provider), self.get(section, case, ceiling)
        return gbps(record) / gbps(copy) if record and copy else None

    def multiple(self, section: str, case: str, provider: str, unit: str) -> float | None:
        """Time in units of another provider's."""
        record, other = self.get(section, case, provider), self.get(section, case, unit)
        return record["us"] / other["us"] if record and other else None


def gbps(record: Record) -> float:
    return float(record["bytes"] / record["us"] / 1e3)


def half_spread(record: Record) -> float:
    """Half of the distance between the 20th and the 80th percentile, in us."""
    return float(record["us_p80"] - record["us_p20"]) / 2
