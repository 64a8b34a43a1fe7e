"""What is recommended to engines without a selector, where the best is known by hand."""

import json
from dataclasses import replace

import pytest
import torch

from nde_talf import Action, LatencyTable, SamplingSetting
from nde_talf.data.engines.vllm_speculation import draft_method
from nde_talf.decoding.actions import TREES
from nde_talf.evaluation.recommendation import (
    NONE,
    one_traffic,
    recommend,
    vllm_config,
)
from tests.evaluation import labelled
from tests.refusal import refusal
from tests.vllm_process import in_process

# A pass over 1, 4 and 17 rows takes 1 s, and a draft pass 0.1 s.
TABLE = LatencyTable([1, 100], [1, 4, 17], [1, 4], [[1.0, 1.0, 1.0]] * 2, [[0.1, 0.1]] * 2)
DEAR = replace(TABLE, target=[[1.0, 8.0, 40.0]] * 2)
DEPTHS = torch.tensor([tree.depth for tree in TREES])
SAMPLED = [SamplingSetting(0.6)]


def roots(count=80, lengths=(3, 3)):
    """As many tokens of every draft are accepted as `lengths` says, for the two kinds of prompt in
    turn.
    """
    kinds = [("even", "odd")[at // 4 % 2] for at in range(count)]
    accepted = torch.tensor([lengths[kind == "odd"] for kind in kinds])
    tokens = 1.0 + torch.minimum(DEPTHS, accepted[:, None])
    return replace(
        labelled.roots({"naivetree": Action(1, 0, 1)}, count),
        kind=kinds,
        samples={"naivetree": tokens[:, None]},
    )


def test_the_best_length_is_the_one_that_pays():
    """By hand: 4 tokens in 1.3 s; where 4 rows take 8 s, plain decoding is faster."""
    best = recommend(roots(), roots(40, (2, 2)), TABLE)
    assert best.tree == Action(1, 0, 3)
    # Of three tokens on even prompts and none on odd ones, 2 drafted are best for both: (1.2 / 3 +
    # 1.2) / 2 = 0.8 s a token.
    uneven = recommend(roots(lengths=(3, 0)), roots(), TABLE)
    assert uneven.tree == Action(1, 0, 2)
    # on the other roots, of which two tokens are accepted
    assert best.block_efficiency == pytest.approx(3)
    assert best.tokens_per_second == best.speedup == pytest.approx([3 / 1.3] * 3)
    plain = recommend(roots(), roots(), DEAR)
    assert plain.tree == NONE and plain.tokens_per_second == plain.speedup == [1, 1, 1]


def test_settings_are_one_traffic_and_labels_that_are_not_there_are_named():
    both = replace(roots(), settings=[(0.6, 1.0), (1.0, 1.0)], setting=torch.arange(80) % 2)
    assert len(one_traffic(both, ["t0.6"])) == 40 and len(one_traffic(both, ["t1.0", "t0.6"])) == 80
    assert int(one_traffic(both, ["t1.0"]).setting.max()) == 0
    with refusal("the traces hold no labels of naivetree or specinfer"):
        recommend(replace(roots(), samples={}), roots(), TABLE)


METHOD = draft_method("draft", 1)
PROBABILISTIC = {"draft_sample_method": "probabilistic"}


@pytest.mark.parametrize(
    ("length", "setting", "added"),
    [
        (3, 0.6, {"num_speculative_tokens": 3} | PROBABILISTIC),
        (2, 0.0, {"num_speculative_tokens": 2}),
    ],
)
def test_vllms_configuration(length, setting, added):
    assert vllm_config(METHOD, length, [SamplingSetting(setting)]) == METHOD | added
    assert vllm_config(METHOD, 0, SAMPLED) is None


IN_VLLM = """
import json, sys
from pathlib import Path

from benchmarks.lossless import tiny_pair
from nde_talf.data.engines.vllm import open_llm, sampling_params
from nde_talf.decoding.sampling.sampling_setting import SamplingSetting

if __name__ == "__main__":
    config = json.load(open(sys.argv[1]))
    target, config["model"] = tiny_pair(Path(sys.argv[1]).parent, 0)
    llm = open_llm(target, "float32", 128, speculative_config=config, disable_log_stats=False)
    texts, drafts = [], []
    for count in (1, 4):
        prompts = [{"prompt_token_ids": [at, 1, 2, 3]} for at in range(count)]
        greedy = sampling_params(SamplingSetting(0.0), 24, None)
        texts.append([list(output.outputs[0].token_ids) for output in llm.generate(prompts, greedy, use_tqdm=False)])
        counted = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:spec_decode_num_draft_tokens"]
        drafts.append(sum(counted))
    llm.llm_engine.engine_core.shutdown()
    json.dump({"texts": texts, "drafts": drafts}, open(sys.argv[2], "w"))
"""


@pytest.mark.vllm
def test_vllm_takes_the_configuration_as_it_is(tmp_path):
    """Alone and beside three others a request gets the same greedy text, with drafts."""
    pytest.importorskip("vllm")
    vllm = vllm_config(draft_method("", 1), 3, SAMPLED)
    loaded = in_process(IN_VLLM, json.loads(json.dumps(vllm)), tmp_path)
    assert loaded["texts"][1][0] == loaded["texts"][0][0]
    assert 0 < loaded["drafts"][0] < loaded["drafts"][1]
