"""The record of a case, the bound it is held against, and the file of JSON lines that keeps it."""

import dataclasses
import datetime
import json
import pathlib
import re
from typing import Any

from pk_jax._tuning.hardware import H200, MIB

# One direction of the link, and what no captured call goes below, which is an empty captured call
# (the target's round number; host_cost measures it anew) and one trip of a flag to the peer.
LINK_BYTES_PER_US = H200.store_peak / 1e6
EMPTY_CALL_US = 2.5
FLAG_US = H200.flag_latency * 1e6
# From this size on the call's fixed cost is under 4% and the link alone is the bound.
LARGE_BYTES = 32 * MIB


@dataclasses.dataclass
class Record:
    """One case. None where a field does not apply. Times are microseconds a call."""

    id: str
    op: str
    ranks: int
    processes: int
    dtype: str | None = None
    shape: list[int] | None = None
    config: dict[str, Any] | None = None
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    bound_us: float | None = None
    compute_us: float | None = None
    link_us: float | None = None
    ratio: float | None = None
    gbps: float | None = None
    tflops: float | None = None
    baselines: dict[str, float] = dataclasses.field(default_factory=dict)
    max_rel_err: float | None = None
    sms: int | None = None
    launches: int | None = None
    extra_bytes: int | None = None
    date: str | None = None
    gpu: str | None = None
    driver: str | None = None
    cuda: str | None = None
    jax: str | None = None
    commit: str | None = None
    # Beyond the common fields: forced variants, what was left out and why, how it was timed.
    candidates: dict[str, float] = dataclasses.field(default_factory=dict)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    speedup: float | None = None
    method: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, int]:
        """What makes two records the same case."""
        return (self.id, self.ranks, self.processes)


def bound_us(link_bytes: float, bytes_per_rank: int) -> tuple[float, float]:
    """(bound, its link part): bytes received at the link's rate, and a small call's fixed cost."""
    link = link_bytes / LINK_BYTES_PER_US
    fixed = EMPTY_CALL_US + FLAG_US if bytes_per_rank < LARGE_BYTES else 0.0
    return link + fixed, link


def load(path: pathlib.Path) -> list[Record]:
    """The records of a file; fields that a newer or older version wrote are ignored or default."""
    if not path.exists():
        return []
    known = {field.name for field in dataclasses.fields(Record)}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [Record(**{k: v for k, v in row.items() if k in known}) for row in rows]


def save(path: pathlib.Path, new: list[Record]) -> None:
    """Writes the records into `path`, one line each; the newest of a case replaces the last."""
    merged = {record.key: record for record in load(path)}
    merged |= {record.key: record for record in new}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(
        "".join(json.dumps(_rounded(dataclasses.asdict(r))) + "\n" for r in merged.values())
    )
    scratch.replace(path)  # a run that is cut short leaves a whole file


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return value


def box_name(device_kind: str, platform: str, count: int) -> str:
    """'NVIDIA H200' and 2 give 'h200x2'."""
    kind = device_kind if platform == "gpu" else platform
    short = re.sub(r"[^a-z0-9]+", "-", kind.lower().replace("nvidia", "")).strip("-")
    return f"{short}x{count}"


def provenance(commit: str | None) -> dict[str, str | None]:
    """date, gpu, driver, cuda, jax and commit of this run."""
    import jax

    from pk_jax._doctor import library_versions

    versions = library_versions()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": jax.devices()[0].device_kind,
        "driver": versions["driver"],
        "cuda": versions["cuda_runtime"],
        "jax": versions["jax"],
        "commit": commit,
    }
