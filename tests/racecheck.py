"""What compute-sanitizer's racecheck prints, and which of it is no race."""

import re

# A flag in shared memory: one warp writes it as a release, others poll it as an acquire, and what
# it guards is in global memory. Racecheck knows barriers, and takes any other pair for a race.
FLAG = {"pk::ptx::ld_acquire_cta", "pk::ptx::st_release_cta"}

_RECORD = re.compile(r"^=+ (?:Error|Warning): *(.*(?:\n=+ +and .*)*)", re.MULTILINE)
_ACCESS = re.compile(r"(?:between|and) \w+ access at ([\w:]+)")
_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")


def unexpected(text: str) -> list[str]:
    """The records of a run that are not the flag's, and what shows that records are missing."""
    records = _RECORD.findall(text)
    found = []
    for record in records:
        accesses = _ACCESS.findall(record)
        if not record.startswith("Race reported") or len(accesses) < 2 or set(accesses) - FLAG:
            found.append(record)
    summary = _SUMMARY.search(text)
    if summary is None or int(summary[1]) != len(records):
        found.append(f"{len(records)} records and {summary and summary[0]!r}")
    return found
