"""The check of the matrix products' machine code lets through what is meant and finds each fault.

The text is of a kernel that ptxas 13.0 made, cut to the lines that matter.
"""

import sys
from pathlib import Path

import check_sass
import pytest

ROOT = Path(__file__).resolve().parents[1]
NAME = "_ZN2pk6matmul6matmulIE"
HEAD = f"""
	code for sm_90a
	.target	sm_90a

		Function : {NAME}
	.headerflags	@"EF_CUDA_ACCELERATORS EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/                   LDC R1, c[0x0][0x28] ;            /* 0x00000a00ff017b82 */
                                                                     /* 0x000fe20000000800 */
        /*0250*/              @!P0 BRA 0x1bb0 ;
        /*0260*/                   WARPSYNC.ALL ;
        /*0270*/                   USETMAXREG.DEALLOC.CTAPOOL 0x28 ;
        /*1950*/               @P0 ELECT P1, URZ, PT ;
        /*19c0*/                   UTMALDG.2D [UR8], [UR4] ;
        /*19d0*/               @P0 BRA.U.ANY 0x1950 ;
        /*1ba0*/                   BRA 0x6430 ;
        /*1bb0*/                   WARPSYNC.ALL ;
        /*1bc0*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8 ;
        /*1bd0*/                   PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0 ;
        /*1be0*/              @!P0 BRA 0x1bb0 ;
        /*1ee0*/                   LDC R10, c[0x0][0x428] ;
"""
# The main loop: the wait for the operands, a step, the release of the last step's stage.
FULL = """\
        /*30d0*/                   S2UR UR5, SR_CgaCtaId ;
        /*3210*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R7+URZ+0x38000], R6 ;
        /*3290*/              @!P0 BRA 0x64a0 ;
        /*32a0*/                   LOP3.LUT R6, R5, 0x2000000, RZ, 0xfc, !PT ;
"""
STEP = """\
        /*3310*/                   WARPGROUP.ARRIVE ;
        /*3360*/                   R2UR UR7, R7 ;
        /*33e0*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, UP0 ;
        /*3410*/                   R2UR UR7, R7 ;
        /*3560*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*3570*/                   R2UR UR6, R6 ;
        /*3600*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*3620*/                   R2UR UR7, R7 ;
        /*3660*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
"""
RELEASE = """\
        /*3670*/              @!P0 BRA 0x36d0 ;
        /*3690*/                   WARPSYNC.ALL ;
        /*36a0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*36b0*/              @!P0 IMAD R4, R13, 0x8, R14 ;
        /*36c0*/              @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R4+URZ+0x38020], RZ ;
        /*36d0*/                   VIADD R223, R8, 0x1 ;
"""
AGAIN = """\
        /*3760*/              @!P1 BRA 0x30d0 ;
"""
# The end of a tile, the loop of the tiles, and the retries of the wait for the operands.
TAIL = """\
        /*3780*/                   WARPSYNC.ALL ;
        /*3790*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*3980*/                   STG.E.128.STRONG.GPU desc[UR10][R6.64], R24 ;
        /*3c10*/               @P0 MEMBAR.ALL.CTA ;
        /*3c20*/               @P0 MEMBAR.ALL.GPU ;
        /*6310*/                   PLOP3.LUT P0, PT, P0, P1, PT, 0xa2, 0x0 ;
        /*6380*/                   UTMASTG.2D [UR12], [UR4] ;
        /*6390*/               @P1 BRA.U.ANY 0x6310 ;
        /*63e0*/              @!P0 BRA 0x1ee0 ;
        /*6430*/                   BSYNC B0 ;
        /*6440*/                   EXIT ;
        /*64a0*/                   YIELD ;
        /*64b0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R7+URZ+0x38000], R6 ;
        /*64c0*/              @!P0 BRA 0x64a0 ;
        /*64d0*/                   BRA 0x32a0 ;
"""
GOOD = HEAD + FULL + STEP + RELEASE + AGAIN + TAIL
# With float8: a step begins with zero, is waited for and added up.
FLOAT8 = """\
        /*3310*/                   WARPGROUP.ARRIVE ;
        /*33e0*/                   QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR4], RZ, !UPT ;
        /*3560*/                   QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24 ;
        /*3600*/                   QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24 ;
        /*3660*/                   QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24, gsb0 ;
        /*3670*/              @!P0 BRA 0x36a0 ;
        /*3690*/                   WARPSYNC.ALL ;
        /*36a0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
"""
ADDED = "".join(
    f"        /*{0x36B0 + 2 * i:04x}*/              FADD R{i + 88}, R{i + 24}, R{i + 88} ;\n"
    for i in range(32)
)
GOOD_FLOAT8 = HEAD + FULL + FLOAT8 + ADDED + AGAIN + TAIL
# What ptxas makes of a loop that writes an accumulator between a step and its wait (C7514).
SERIALISED = """\
        /*33e0*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, UP0, gsb0 ;
        /*3560*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*3570*/                   WARPGROUP.ARRIVE ;
        /*3580*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*3610*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*3620*/                   WARPGROUP.ARRIVE ;
        /*3630*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*3680*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*3690*/                   WARPGROUP.ARRIVE ;
        /*36b0*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*36c0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
"""
# What it makes of an arrival with release at the scope of the cluster.
FENCE = """\
        /*3800*/              @!P0 MEMBAR.ALL.CTA ;
        /*3810*/              @!P0 MEMBAR.ALL.GPU ;
        /*3820*/              @!P0 ERRBAR;
        /*3830*/              @!P0 CGAERRBAR ;
"""
BETWEEN = "        /*3570*/                   R2UR UR6, R6 ;\n"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
RETRY = "        /*64a0*/                   YIELD ;\n"


def problems(text: str, name: str = "matmul") -> str:
    (code,) = check_sass.parse(text).values()
    return "\n".join(check_sass.problems_of(code, name))


def test_the_good_kernel_is_good():
    assert len(check_sass.parse(GOOD)[NAME]) == GOOD.count("*/     ")
    assert problems(GOOD) == ""
    # fp16, and half the columns
    assert problems(GOOD.replace(".F32.BF16", ".F32")) == ""
    assert problems(GOOD.replace("64x256x16", "64x128x16")) == ""


def test_results_of_few_rows_leave_from_registers():
    text = GOOD.replace("UTMASTG.2D", "STG.E.128")
    assert problems(text) == "no UTMASTG" and problems(text, "matmul_few_rows") == ""
    assert problems(text.replace("UTMALDG.2D", "LDG.E"), "matmul_few_rows") == "no UTMALDG"


def test_the_loops_are_those_of_the_source():
    """Among them none from the jump back out of the retries, which lies around all the rest."""
    code = check_sass.parse(GOOD)[NAME]
    ends = [(code[min(i)].address, code[max(i)].address) for i in check_sass.loops(code)]
    retried, main, tiles = (0x64A0, 0x64C0), (0x30D0, 0x64D0), (0x1EE0, 0x64D0)
    votes = [(0x1950, 0x19D0), (0x6310, 0x6390)]
    assert sorted(ends) == sorted([*votes, (0x1BB0, 0x1BE0), retried, main, tiles])


def test_steps_may_stand_before_the_loop():
    ahead = "        /*2f80*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;\n"
    assert problems(HEAD + STEP + STEP + ahead + FULL + STEP + RELEASE + AGAIN + TAIL) == ""
    found = problems(HEAD + SERIALISED + FULL + STEP + RELEASE + AGAIN + TAIL)
    assert found.count("a step of 1 HGMMA") == 4 and "main loop" not in found


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (STEP, SERIALISED, "a step of 1 HGMMA, not 4: 0x33e0"),
        (STEP, SERIALISED, "the main loop waits for all steps: 0x36c0"),
        (STEP, "", "no loop with HGMMA"),
        (AGAIN, "", "the main loop waits for all steps: 0x3790"),
        (STEP, "", "HGMMA of the shapes []"),
        ("F32.BF16 R24, gdesc[UR4], R24, UP0", "F16 R24, gdesc[UR4], R24, UP0", "of the shapes"),
        ("HGMMA.64x256x16", "HGMMA.64x32x16", "HGMMA of the shapes ['HGMMA.64x32x16.F32.BF16']"),
        (", gsb0 ;", " ;", "never committed: 0x3660"),
        (BETWEEN, BETWEEN.replace("R2UR UR6, R6", WAIT), "a wait or fence inside a step: 0x3570"),
        (BETWEEN, BETWEEN.replace("R2UR UR6, R6", "FADD R24, R24, R24"), "used inside a step"),
        (BETWEEN, BETWEEN.replace("R2UR UR6, R6", "MOV R2, R151"), "used inside a step: 0x3570"),
        (WAIT, WAIT.replace("0x1", "0x0"), "the main loop waits for all steps: 0x36a0"),
        (RELEASE, "        /*35f0*/  FADD R24, R24, R24 ;\n" + RELEASE, "used in the main loop"),
        (RELEASE, FENCE + RELEASE, "the main loop waits for memory: 0x3810 @!P0 MEMBAR.ALL.GPU"),
        (RELEASE, FENCE.replace("ALL.GPU", "SC.SYS") + RELEASE, "MEMBAR.SC.SYS"),
        (RETRY, RETRY + FENCE, "the main loop waits for memory: 0x3810"),
        (RETRY, RETRY + "        /*64a8*/  LDL.64 R26, [R1+0x8] ;\n", "1 accesses of local memory"),
        (RETRY, RETRY + "        /*64a8*/  STL [R1+0x8], R26 ;\n", "1 accesses of local memory"),
        ("USETMAXREG.DEALLOC.CTAPOOL 0x28", "NOP", "USETMAXREG.DEALLOC not of 40: []"),
        (
            "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8",
            "NOP",
            "USETMAXREG.TRY_ALLOC not of 232 or 160: []",
        ),
        ("UP0, 0xe8", "UP0, 0xf0", "USETMAXREG.TRY_ALLOC not of 232 or 160: ['0x1bc0 USETMAXREG"),
        ("UTMALDG.2D", "UBLKCP", "no UTMALDG"),
        ("UTMASTG.2D", "UBLKCP", "no UTMASTG"),
    ],
)
def test_each_fault_is_found(old: str, new: str, message: str):
    assert old in GOOD
    assert message in problems(GOOD.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", ""),
        (", RZ, !UPT ;", ", R24, UP0 ;", "a step of float8 does not begin with zero: 0x33e0"),
        ("FADD R90, R26, R90", "NOP", "1 of 32 accumulators are not added up in fp32"),
        ("gsb0, 0x0", "gsb0, 0x1", "an accumulator is used in the main loop: 0x36b0 FADD R88"),
        ("WARPSYNC.ALL ;\n        /*36a0*/", "MOV R2, R30 ;\n        /*36a0*/", "used in the main"),
        ("LOP3.LUT R6, R5,", "LOP3.LUT R30, R5,", ""),  # nothing is in flight
        ("QGMMA.64x64x32", "QGMMA.64x32x32", "HGMMA of the shapes ['QGMMA.64x32x32"),
    ],
)
def test_each_fault_of_float8_is_found(old: str, new: str, message: str):
    assert old in GOOD_FLOAT8
    found = problems(GOOD_FLOAT8.replace(old, new))
    assert message in found and bool(message) == bool(found)


def test_a_build_folder_is_checked(tmp_path: Path, monkeypatch, capsys):
    def check(text: str) -> int:
        monkeypatch.setattr(check_sass, "disassemble", lambda path: check_sass.parse(text))
        monkeypatch.setattr(sys, "argv", ["check_sass.py", str(tmp_path)])
        return check_sass.main()

    assert check(GOOD) == 1
    assert "no matrix products" in capsys.readouterr().out
    log = tmp_path / "pk_cuda.dir/cuda/kernels/matmul_bfloat16.cu.o.ptxas"
    log.parent.mkdir(parents=True)
    log.write_text(f"ptxas info    : Compiling entry function '{NAME}' for 'sm_90a'\n")
    assert check(GOOD) == 0
    assert "1 matrix products" in capsys.readouterr().out
    assert check(GOOD.replace(STEP, SERIALISED)) == 1
    assert "a step of 1 HGMMA" in capsys.readouterr().out
    # One that the disassembly lacks was not checked.
    assert check(GOOD.replace(NAME, "_Zother")) == 1


def test_the_numbers_are_those_of_the_sources():
    roles = (ROOT / "cuda/schedule/roles.cuh").read_text()
    (mover,), (of_two, of_one) = check_sass.SETMAXREG.values()
    assert f"int kMoverRegisters = {mover}>" in roles
    assert f"kConsumer = kConsumers == 1 ? {of_one} : kLeft;" in roles
    at_launch = 65536 // 384 // 8 * 8
    assert (3 * at_launch - mover) // 2 // 8 * 8 == of_two
    tile = (ROOT / "cuda/tile/shared_tile.cuh").read_text()
    assert "kBlockK = 64;" in tile and "kWgmmaK = 16;" in tile and check_sass.STEP == 64 // 16
