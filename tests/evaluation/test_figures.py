"""Figures of the pair and the head have names and units, methods have one colour, and a note is
said once.
"""

from itertools import combinations

from nde_talf.evaluation.plots import (
    LEARNED,
    OUTSIDE,
    acceptance_curves,
    line,
    loss_curves,
    position_lines,
)
from nde_talf.evaluation.report import ReportData
from nde_talf.evaluation.sections import sections, selector_intro
from nde_talf.evaluation.table import tabulate
from nde_talf.evaluation.text import count, head_rows, pair_rows, stage_rows
from tests.evaluation.example import records

PAIR = {
    "positions": 16320,
    "target_nats": 4.3699,
    "greedy_agreement": 0.76103,
    "overlap": {"1.0": 0.892463, "0.6": 0.85},
    "seconds_per_token": {"target": 0.0033789},
    "cost_ratio": 4.6737,
    "parameters": {"target": 2821248, "draft": 426368},
    "domains": {"code": {"draft_nats": 4.1}},
    "of tomorrow": 0.12345678,
}


def test_the_pairs_figures_have_names_and_units():
    assert pair_rows(PAIR) == [
        ["held-out positions", "16,320"],
        ["loss of the target", "4.370 nats a token"],
        ["positions with the same most likely token", "76.1 %"],
        ["overlap of both distributions, temperature 1", "89.2 %"],
        ["overlap of both distributions, temperature 0.6", "85.0 %"],
        ["one pass of the target, one token", "3.38 ms"],
        ["a target token costs", "4.7 draft tokens"],
        ["parameters of the target", "2.8 M"],
        ["parameters of the draft", "426 k"],
        ["code: loss of the draft", "4.100 nats a token"],
        ["of tomorrow", "0.1235"],
    ]
    assert [count(n) for n in (12, 1500, 70_553_706_496, 251e6)] == [
        "12",
        "1.5 k",
        "70.6 G",
        "251 M",
    ]
    assert stage_rows({"pair": 54.2, "latency": 3.95}) == [["pair", "54 s"], ["latency", "4.0 s"]]


def test_the_heads_figures_stand_by_drafted_token():
    figures = {
        "precision of training": "32-true",
        "roots": 512,
        "agreement": [0.67, 0.71, 0.745],
        "kl": [0.0859, 0.0657, 0.05],
    }
    figures |= {"agreement_by_rank": [[0.7, 0.6], [0.5, 0.4]], "overlap": [0.85, 0.84, 0.83, 0.82]}
    columns, rows, others = head_rows(figures)
    assert columns == ["by drafted token", "1st", "2nd", "3rd", "4th"]
    assert rows == [
        ["same most likely token", "67.0 %", "71.0 %", "74.5 %", ""],
        ["divergence (KL), nats", "0.086", "0.066", "0.050", ""],
        ["same most likely token, after the beam's no. 1", "", "70.0 %", "50.0 %", ""],
        ["same most likely token, after the beam's no. 2", "", "60.0 %", "40.0 %", ""],
        ["overlap along the head's own draws", "85.0 %", "84.0 %", "83.0 %", "82.0 %"],
    ]
    assert others == [
        ["precision of training", "32-true"],
        ["held-out positions drafted from", "512"],
    ]


METHODS = [
    "transformers assisted (6 tokens)",
    *(
        "Traversal (2, 0, 7)",
        "Traversal (2, τ−1, 7)",
        "Traversal, by entropy",
        "Traversal, by domain",
    ),
    *(
        "Traversal + selector: static (2, 0, 7)",
        "Traversal + selector (NDE)",
        "SpecInfer + selector (NDE)",
    ),
    *(
        "Traversal, TALF head (1, 0, 6)",
        "SpecInfer (2, 0, 5)",
        "BV (1, 0, 1)",
        "Naive (1, 0, 4)",
        "NaiveTree (3, 0, 2)",
    ),
    *("NSS (1, 0, 2)", "SpecTr (2, 0, 2)", "Khisti (2, 0, 2)", "GBV (2, 0, 2)"),
]


def test_a_method_has_one_colour_whatever_stands_beside_it_and_blue_is_learned():
    def drawn(*names: str) -> dict:
        figure = position_lines({"T=1": {name: [0.5, 0.25] for name in names}})
        return {
            own.get_label(): (own.get_color(), str(own.get_linestyle()))
            for own in figure.axes[0].lines
        }

    assert (
        drawn("SpecInfer (2, 0, 5)")["SpecInfer (2, 0, 5)"]
        == drawn(*METHODS)["SpecInfer (2, 0, 5)"]
    )
    assert line("SpecInfer (2, 0, 5)") == line("SpecInfer (2, 1, 5)")
    solvers = acceptance_curves({"T=1": {"specinfer": [0.5], "optimal": [1.0]}}).axes[0].lines
    assert solvers[0].get_color() == line("SpecInfer (2, 0, 5)")["color"]
    assert line(METHODS[0])["color"] == OUTSIDE and [
        m for m in METHODS if line(m)["color"] == LEARNED
    ] == [METHODS[8]]
    assert all(line(a) != line(b) for a, b in combinations(METHODS, 2))


def test_one_training_has_no_second_title_and_the_heads_losses_count_drafted_tokens():
    series = {"loss": [(0, 40.0)], "loss_depth_0": [(0, 4.0)], "loss_depth_1": [(5, 5.0)]}
    axis = loss_curves({"head": series}).axes[0]
    assert axis.get_title(loc="left") == "" and [own.get_label() for own in axis.lines] == [
        "1st drafted token",
        "2nd drafted token",
    ]
    both = loss_curves({"head": series, "draft": {"loss": [(0, 1.0)]}})
    assert [own.get_title(loc="left") for own in both.axes] == ["head", "draft"]


def test_what_all_settings_have_in_common_is_said_once(tmp_path):
    rows = next(iter(tabulate(records(tmp_path)).values()))
    same = {"T=1": {"A": "B", "C": "D"}, "T=0.6": {"A": "B", "E": "F"}}
    exports = {setting: {"X + selector (NDE)": f"static {setting}"} for setting in same}
    data = ReportData("run", {"T=1": rows, "T=0.6": rows}, same=same, exports=exports)
    notes = [
        [note.split(":")[0] for note in table.notes if "did not win" not in note]
        for table in sections(data)["speed"]
    ]
    assert notes == [["C"], ["A", "E"]]
    intro = selector_intro(data)
    assert len(intro) == 1 and intro[0].startswith(
        "At temperature 1 and temperature 0.6 a static tree"
    )
