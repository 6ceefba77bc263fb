"""Records of benchmarks: files keep the newest of a case, fields are common, bounds hold."""

import json

import jax
import pytest

from pk_jax._bench import records
from pk_jax._tuning import hardware


def record(**fields):
    return records.Record(
        **({"id": "ag-1M", "op": "all_gather", "ranks": 2, "processes": 1} | fields)
    )


def test_the_newest_record_of_a_case_replaces_the_last(tmp_path):
    path = tmp_path / "box" / "all_gather.jsonl"
    records.save(path, [record(median_us=5.0), record(id="ag-2M", median_us=7.0)])
    records.save(path, [record(median_us=4.0), record(processes=2, median_us=6.0)])
    found = [(r.id, r.processes, r.median_us) for r in records.load(path)]
    assert found == [("ag-1M", 1, 4.0), ("ag-2M", 1, 7.0), ("ag-1M", 2, 6.0)]
    assert [p.name for p in path.parent.iterdir()] == ["all_gather.jsonl"]


def test_records_have_the_common_fields(tmp_path):
    path = tmp_path / "all_gather.jsonl"
    records.save(path, [record(median_us=1 / 3)])
    row = json.loads(path.read_text())
    common = (
        "id op ranks processes dtype shape config median_us p10_us p90_us bound_us compute_us "
        "link_us ratio gbps tflops baselines max_rel_err sms launches extra_bytes date gpu driver "
        "cuda jax commit"
    )
    assert set(common.split()) <= set(row)
    assert row["median_us"] == 0.33333
    assert row["tflops"] is None


def test_fields_of_other_versions_do_not_break_loading(tmp_path):
    path = tmp_path / "all_gather.jsonl"
    row = {"id": "a", "op": "all_gather", "ranks": 2, "processes": 1, "colour": "blue"}
    path.write_text(json.dumps(row) + "\n\n")
    assert records.load(path)[0].id == "a"


def test_box_name():
    assert records.box_name("NVIDIA H200", "gpu", 2) == "h200x2"
    assert records.box_name("NVIDIA H100 80GB HBM3", "gpu", 8) == "h100-80gb-hbm3x8"
    assert records.box_name("cpu", "cpu", 8) == "cpux8"


def test_bound_rises_with_size():
    sizes = [1 << k for k in range(10, 31)]
    bounds = [records.bound_us(size, size)[0] for size in sizes]
    assert bounds == sorted(bounds)
    assert bounds[0] == pytest.approx(3.7, abs=0.01)
    assert records.bound_us(256 << 20, 256 << 20)[0] == pytest.approx(725.5, abs=0.1)
    assert records.bound_us(7 << 20, 1 << 20)[1] == pytest.approx(7 * 2.834, abs=0.01)


def test_provenance_names_versions():
    stamp = records.provenance("abc")
    assert stamp["commit"] == "abc"
    assert stamp["jax"] == jax.__version__
    assert stamp["date"].endswith("+00:00")


def test_the_bound_is_of_the_hardware_record():
    assert hardware.H200.store_peak / 1e6 == records.LINK_BYTES_PER_US
    assert hardware.H200.flag_latency * 1e6 == records.FLAG_US
