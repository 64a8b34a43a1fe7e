"""What `generate` can be asked for: every policy with a verifier that fits, and why a device cannot
be used.
"""

import json
import shutil

import pytest

from nde_talf import Rng
from nde_talf.data.text.templates import load_tokenizer
from nde_talf.decoding.common.checksums import CHECKSUMS
from nde_talf.decoding.names import LABELLED
from nde_talf.decoding.registry import POLICIES, VERIFIERS
from nde_talf.decoding.verifier import check_compatible
from nde_talf.pipelines.commands.generate import GenerateConfig, TargetConfig
from nde_talf.pipelines.commands.stream import prompt_of, stream
from nde_talf.pipelines.config.policies import default_verifier, make_policy
from nde_talf.pipelines.runs.decoder import make_decoder
from nde_talf.pipelines.runs.finished import NoRun, Run
from nde_talf.pipelines.runs.run_models import pair_of


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_policy_has_a_verifier_that_is_lossless_on_its_trees(name, temperature):
    check_compatible(make_policy(name, {}).trees, VERIFIERS[default_verifier(name, temperature)])


def test_a_held_out_prompt_is_put_into_no_template_again():
    run = Run("small", "")
    tokenizer = load_tokenizer(pair_of(run).where("target"))
    tokenizer.chat_template = "<{{ messages[0].content }}>"
    text, tokens = prompt_of(GenerateConfig(), run, tokenizer)
    assert tokenizer.decode(tokens) == text


def test_options_reach_the_policy():
    assert make_policy("delayed", {"k": 3, "l1": 2, "l2": 1}).action == (3, 2, 1)
    options = {"branches": [1, 2, 2], "confident_low": 0}
    assert make_policy("dynatree", options).config.branches == (1, 2, 2)


def test_names_that_are_checked_without_torch_are_the_names_there_are():
    assert set(LABELLED) == {name for name in VERIFIERS if VERIFIERS[name].labels}


def test_a_model_without_a_run_is_decoded_by_n_grams():
    where = pair_of(Run("small", "")).where("target")
    config = GenerateConfig(prompt="x", model=TargetConfig(target=where))
    assert make_decoder(config, NoRun(where)).policy.trees == "top_k"


def test_an_answer_begins_on_a_line_of_its_own_and_its_end_is_not_shown(tmp_path, capsys):
    where = tmp_path / "target"
    shutil.copytree(pair_of(Run("small", "")).where("target"), where)
    (where / CHECKSUMS).unlink(missing_ok=True)
    tokenizer = load_tokenizer(str(where))
    tokenizer.chat_template = "{% for turn in messages %}{{ turn.content }}:{% endfor %}"
    tokenizer.save_pretrained(where)
    config = GenerateConfig(prompt="def f(x)", temperature=0.0, new_tokens=6)
    decoder = make_decoder(config, NoRun(str(where)))
    prompt = tokenizer("def f(x):")["input_ids"]
    *said, end = decoder.generate(prompt, 6, config.setting, Rng.seeded(0)).tokens
    assert end not in said
    (where / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, end]}))
    stream(config, NoRun(str(where)))
    assert capsys.readouterr().out.startswith(f"def f(x)\n{tokenizer.decode(said)}\n\nngram;")
