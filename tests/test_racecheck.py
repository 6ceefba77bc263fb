"""The reading of racecheck's output lets through the flag's pair and nothing else."""

import pytest
from racecheck import unexpected

READ = (
    "========= Error: Race reported between Read access at "
    "pk::ptx::ld_acquire_cta(const unsigned int *)+0x94a0 in ptx.cuh:27"
)
WRITE = (
    "=========     and Write access at "
    "pk::ptx::st_release_cta(unsigned int *, unsigned int)+0x2c390 in ptx.cuh:32 [240 hazards]"
)
THIRD = "=========     and Write access at pk::combine(float *)+0x10 in combine.cuh:9 [2 hazards]"
SUMMARY = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, 0 warnings)"


def text(*records):
    count = sum("Error" in line for line in records)
    return "\n".join(("========= COMPUTE-SANITIZER", *records, SUMMARY.format(count, count), ""))


def test_the_flag_is_no_race():
    assert unexpected(text()) == []
    assert unexpected(text(READ, WRITE, "========= ", READ, WRITE)) == []


@pytest.mark.parametrize(
    "records",
    [
        (READ, WRITE, THIRD),
        (READ, THIRD),
        (READ,),
        (READ, WRITE, "========= Error: Invalid __shared__ write of size 4 bytes"),
        (READ, WRITE, "========= Warning: Maximum number of hazards reached"),
    ],
)
def test_anything_else_is(records):
    assert unexpected(text(*records))


def test_a_cut_output_is_noticed():
    whole = text(READ, WRITE, READ, WRITE)
    assert unexpected(whole.replace(READ + "\n" + WRITE, "", 1))
    assert unexpected(whole.partition("========= RACECHECK")[0])
