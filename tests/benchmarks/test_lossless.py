"""The tester passes engines that follow the target's law, and finds the bias of those that do not."""

from collections import Counter

import pytest
import torch
from scipy import stats

from benchmarks.lossless import main
from nde_talf.evaluation.chi_square import LEVEL, p_value, smallest_bias
from nde_talf.pipelines.commands.compare_texts import first_difference
from tests.decoding.pairs import tiny_model

HERE = "tests.evaluation.engines"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, status", [("honest", 0), ("unwarped", 1), ("repeating", 1), ("short", 2)]
)
def test_a_bias_is_found_and_no_other_engine_is_blamed(name, status, capsys):
    assert (
        main(["--engine", f"{HERE}:{name}", "--samples", "1000", "--temperature", "0.4"]) == status
    )
    said = capsys.readouterr()
    assert ("BIASED" in said.out) == (status == 1) and ("too short" in said.err) == (status == 2)


@pytest.mark.law
@pytest.mark.parametrize("engine", ["nde", "transformers"])
def test_our_loop_and_transformers_pass(engine, capsys):
    assert main(["--engine", engine, "--samples", "1500"]) == 0
    assert "as the model has it" in capsys.readouterr().out


def test_the_chi_square_is_that_of_scipy():
    law = {"a": 0.5, "b": 0.3, "c": 0.199, "d": 0.001}
    counts = Counter(a=480, b=330, c=190)
    expected = stats.chisquare([480, 330, 190], [500, 300, 200])
    assert p_value(counts, law) == pytest.approx(expected.pvalue, rel=1e-9)
    assert p_value(counts + Counter(e=1), law) == 0
    assert p_value(Counter(a=9), {"a": 1.0}) == smallest_bias(9, {"a": 1.0}) == 1


def test_a_bias_of_the_size_that_is_stated_is_found():
    law = dict.fromkeys(range(8), 1 / 8)
    bias = smallest_bias(2000, law)
    wrong = torch.tensor([1 / 8 + bias / 4] * 4 + [1 / 8 - bias / 4] * 4)
    generator = torch.Generator().manual_seed(3)
    drawn = [
        Counter(torch.multinomial(wrong, 2000, True, generator=generator).tolist())
        for _ in range(100)
    ]
    assert sum(p_value(counts, law) <= LEVEL for counts in drawn) >= 95
    right = [Counter(torch.randint(8, (2000,), generator=generator).tolist()) for _ in range(50)]
    assert min(p_value(counts, law) for counts in right) > 1e-4


def test_a_greedy_text_is_compared_token_by_token():
    model, prompt = tiny_model(20, seed=4), [1, 2, 3]
    text = model.module.generate(
        torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None
    )[0, 3:].tolist()
    assert first_difference(model, prompt, text) is None
    other = [*text[:3], (text[3] + 1) % 20, *text[4:]]
    assert first_difference(model, prompt, other) > 1e-3


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--engine sglang", "choose nde, transformers, vllm, or module:function"),
        ("--engine nde --drafts ngram", "give --engine vllm or transformers with it"),
        ("--target x", "needs both"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert message in capsys.readouterr().err
