"""Random calls of the collectives against jax.lax: results, types and errors.

`make fuzz` draws more of them. A difference is printed with the program that reproduces it, for
`python -m fuzz --program`, in this folder.
"""

import importlib.util
import sys
from pathlib import Path

import jax
import pytest

import pk_jax as pk

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fuzz import cases, compare, generate, model, operands, runner, sources
from fuzz.draws import RandomDraw


def test_collectives_do_what_lax_does():
    devices = jax.devices("cpu")
    if importlib.util.find_spec("hypothesis"):
        report = sources.run_hypothesis(100, None, devices, shrink=False)
    else:
        # One thread: JAX's cache of compiled programs (conftest.py) is read while it is written.
        report = sources.run_random(100, 0, devices, threads=1)
    assert not report.differences, "\n".join(map(str, report.differences))
    # Most cases are there to be run, and no op is left out.
    assert report.counts["results"] >= 50
    assert all(report.counts[op] for op in cases.OPS)


@pytest.mark.needs_gpus(2)
def test_collectives_do_what_lax_does_on_gpus():
    """A share of what `make fuzz GPUS=1` draws."""
    report = sources.run_random(400, 0, jax.devices("cuda"), size=16, strict=True)
    assert not report.differences, "\n".join(map(str, report.differences))
    assert report.counts["results"] >= 200
    # The kernels were what ran.
    missing = [op for op in cases.OPS if report.calls[_call(op)] < 4]
    assert not missing, report.calls


def _call(op):
    """The custom call that an op ends up as."""
    return "psum" if op in ("pmax", "pmin", "pmean") else op


def test_a_program_survives_printing():
    machine = sources.Machine()
    for seed in range(20):
        program = generate.program(RandomDraw(str(seed)), machine, 4)
        assert str(cases.parse(str(program))) == str(program)


def program_of(**fields):
    case = cases.Case(axis_name="a", varying=("a",), seed=1, **fields)
    return cases.Program((("a", 4),), (3, 1, 0, 2), False, [case])


@pytest.mark.parametrize(
    "fields, faulty",
    (
        ({"op": "psum", "shapes": ((5,),)}, lambda x, *a, **k: jax.lax.psum(x, *a, **k) + 1),
        (
            {"op": "ppermute", "shapes": ((5,),), "kwargs": {"perm": [(0, 2), (2, 0)]}},
            lambda x, axis, perm: jax.lax.ppermute(x, axis, [(0, 2), (2, 1)]),
        ),
        (
            {"op": "psum", "shapes": ((9,),), "dtypes": ("float32",), "data": "normal"},
            lambda x, *a: jax.lax.psum(x.astype("bfloat16"), *a).astype("float32"),
        ),
        ({"op": "pmax", "shapes": ((3,),)}, lambda x, *a: jax.lax.pcast(x, "a", to="varying")),
        ({"op": "psum", "shapes": ((3,),)}, lambda x, *a: jax.lax.all_gather(x, "a").sum(0)),
        ({"op": "psum", "shapes": ((3,),)}, lambda *a: 1 / 0),
    ),
    ids=("values", "receivers", "precision", "no-sum", "type", "error"),
)
def test_a_fault_is_found(fields, faulty, monkeypatch):
    program = program_of(**fields)
    assert not runner.check(program, jax.devices("cpu")).differences
    monkeypatch.setattr(pk, fields["op"], faulty)
    (difference,) = runner.check(program, jax.devices("cpu")).differences
    text = str(difference).split("--program ")[1]
    assert cases.parse(text[1:-1]).cases == program.cases


UNTYPED = {"check_vma": False}
RAGGED = {
    "op": "ragged_all_to_all",
    "shapes": ((6,), (9,)),
    "dtypes": ("float32", "float32"),
    "options": {"updates": 2, "group": 4, "index": "int32"},
}


@pytest.mark.parametrize(
    "fields, axes",
    (
        (RAGGED, (("a", 4), ("b", 2))),
        ({"op": "all_gather", "kwargs": {"to": "invarying"}} | UNTYPED, (("a", 4),)),
        ({"op": "psum", "axis_name": ["a"]}, (("a", 4),)),
        (
            {
                "op": "all_to_all",
                "kwargs": {
                    "split_axis": 0,
                    "concat_axis": 0,
                    "axis_index_groups": [[0, 2], [3, 1]],
                    "tiled": True,
                },
                "shapes": ((4,),),
                "transform": "vmap",
                "options": {"in_axis": 0, "out_axis": 0, "size": 2},
            }
            | UNTYPED,
            (("a", 4),),
        ),
    ),
    ids=("ragged", "untyped-gather", "list-of-axes", "mapped-groups"),
)
def test_a_fault_is_found_beside_a_known_difference(fields, axes, monkeypatch):
    case = cases.Case(
        **{"axis_name": "a", "varying": ("a",), "seed": 1, "shapes": ((4,),)} | fields
    )
    order = tuple(range(8 if len(axes) == 2 else 4))
    program = cases.Program(axes, order, False, [case])
    report = runner.check(program, jax.devices("cpu"))
    assert not report.differences
    right = getattr(pk, case.op)
    monkeypatch.setattr(pk, case.op, lambda *args, **kwargs: right(*args, **kwargs) + 1)
    assert runner.check(program, jax.devices("cpu")).differences


def test_the_model_of_ragged_all_to_all():
    """The example of lax's documentation."""
    case = cases.Case(
        "ragged_all_to_all", "a", shapes=((3,), (4,)), dtypes=("int32",) * 2, varying=("a",)
    )
    program = cases.Program((("a", 2),), (0, 1), False, [case])
    import numpy as np

    arrays = [
        np.array(rows)
        for rows in (
            [[1, 2, 2], [3, 4, 0]],
            [[0, 0, 0, 0], [0, 0, 0, 0]],
            [[0, 1], [0, 1]],
            [[1, 2], [1, 1]],
            [[0, 0], [1, 2]],
            [[1, 1], [2, 1]],
        )
    ]
    (result,) = model.ragged(program, case, arrays)
    np.testing.assert_array_equal(result, [[1, 3, 0, 0], [2, 2, 4, 0]])


def test_errors_are_compared_by_class():
    differ = compare.errors_differ
    assert differ(ValueError(), TypeError()) and differ(ValueError(), None)
    assert differ(None, ValueError()) and differ(AssertionError(), ZeroDivisionError())
    assert not differ(ValueError("a"), ValueError("b"))
    assert not differ(AssertionError(), NotImplementedError())


def test_slices_fit_and_do_not_overlap():
    machine = sources.Machine()
    seen = 0
    for seed in range(300):
        program = generate.program(RandomDraw(str(seed)), machine, 4)
        for case in program.cases:
            groups = model.groups_of(program, case)
            if case.op != "ragged_all_to_all" or case.transform != "plain" or groups is None:
                continue
            arrays = operands.operands(program, case)
            taken = set()
            for _, receiver, rows, place in model._moved(groups, arrays[2:]):
                assert rows.stop <= case.shapes[0][0] and place.stop <= case.shapes[1][0]
                places = {(receiver, i) for i in range(place.start, place.stop)}
                assert not taken & places
                taken |= places
                seen += len(places)
    assert seen
