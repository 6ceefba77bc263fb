"""Turns a valid case into one that lax refuses, or takes with a shrug."""

import copy

from .cases import REDUCTIONS, Case
from .draws import Draw


def spoiled(draw: Draw, case: Case, n: int) -> Case:
    """The case with one argument changed.

    Args:
        draw: the choices.
        case: a valid case.
        n: ranks in a group.
    """
    case = copy.deepcopy(case)
    case.run, case.transform, case.constant = False, "plain", None
    if case.op == "ragged_all_to_all":
        case.axis_name = draw.choice(("nowhere", None))
        return case
    changes = ["name", "dimension" if case.op not in (*REDUCTIONS, "ppermute") else "name"]
    changes += ["perm"] if case.op == "ppermute" else ["groups"]
    if case.op in ("psum_scatter", "all_to_all"):
        changes += ["size"]
    match draw.choice(changes):
        case "name":
            names = case.axis_name if isinstance(case.axis_name, tuple) else (case.axis_name,)
            case.axis_name = draw.choice(
                ("nowhere", (*names, "nowhere"), (*names, names[0]), None, 1.5, list(names), ())
            )
        case "dimension":
            keys = ("axis", "scatter_dimension", "split_axis", "concat_axis")
            key = draw.choice([key for key in keys if key in case.kwargs])
            case.kwargs[key] = draw.choice((7, -7, 1.0, "0", None))
        case "size":
            at = case.kwargs.get("split_axis", case.kwargs.get("scatter_dimension"))
            shape = list(case.shapes[0])
            shape[at] += 1
            case.shapes = (tuple(shape),) * len(case.shapes)
        case "groups":
            ranks = list(range(n))
            case.kwargs["axis_index_groups"] = draw.choice(
                ([ranks, ranks], [[n]], [], [[]], 3, [ranks[:-1]], [[0], ranks[1:]])
            )
        case "perm":
            case.kwargs["perm"] = draw.choice(
                ([(0, 0), (0, 0)], [(0, n)], [(0,)], 5, [(0, -1)], "0", [0], [(0.5, 0)])
            )
    return case
