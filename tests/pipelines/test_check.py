"""`nde check` passes a lossless rule, and finds rules that are not."""

import pytest

from nde_talf import VERIFIERS, Action, Delayed, LMDrafter, SamplingSetting, SpeculativeDecoder
from nde_talf.pipelines.commands.check import CheckConfig, check
from nde_talf.pipelines.commands.compare_texts import greedy, sampled
from nde_talf.pipelines.config.command_line import composed
from tests.decoding.pairs import prompts, tiny_pair

T1 = SamplingSetting(1.0)


def decoder(rule="specinfer"):
    target, draft = tiny_pair(20, noise=0.3)
    return SpeculativeDecoder(target, LMDrafter(draft), Delayed(Action(2, 0, 3)), rule)


@pytest.mark.slow
def test_a_lossless_rule_passes_both():
    passed, sentence = sampled(decoder(), prompts(16, 20), 64, T1, seed=0)
    assert passed and "1024 tokens of 16 texts" in sentence and "13." in sentence, sentence
    passed, sentence = greedy(decoder(), prompts(4, 20), 24)
    assert passed and "4 of 4 texts of up to 24 tokens equal" in sentence, sentence
    ending = decoder()
    ending.target.chat_ends = frozenset({3, 7})
    passed, sentence = sampled(ending, prompts(48, 20), 64, T1, seed=0)
    assert passed and int(sentence.split()[1]) < 48 * 40, sentence
    assert greedy(ending, prompts(4, 20), 24)[0]


def first_child(tree, rng):
    """Accept the first drafted token whatever the target says, and sample the next from it."""
    node = tree.children[0][0]
    return node, rng.categorical(tree.p[node])


def from_the_target(tree, rng):
    """Accept as the rule does, but sample what follows a rejection from p, not from the residual."""
    node, _ = VERIFIERS["specinfer"](tree, rng)
    return node, rng.categorical(tree.p[node])


@pytest.mark.slow
@pytest.mark.parametrize("fault", [first_child, from_the_target])
def test_a_faulty_rule_is_found(fault):
    faulty = decoder()
    faulty.verify = fault
    passed, sentence = sampled(faulty, prompts(16, 20), 64, T1, seed=0)
    assert not passed and "DO NOT FOLLOW" in sentence, sentence
    if fault is first_child:
        passed, sentence = greedy(faulty, prompts(4, 20), 24)
        assert not passed and "none elsewhere" not in sentence, sentence


@pytest.mark.slow
def test_the_shipped_pair_passes_from_the_command_line(capsys):
    check(composed(CheckConfig, "texts=8", "new_tokens=16", config="check"))
    printed = capsys.readouterr().out
    assert "1 of 1 texts" in printed and "128 tokens of 8 texts" in printed, printed
