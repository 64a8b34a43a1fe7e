"""A saved speculation decodes through generate(custom_generate="folder"), the one use of
`trust_remote_code=True`.
"""

import shutil

import pytest
import torch

from nde_talf import speculate
from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.draft_training.export import save_head
from nde_talf.in_transformers import Speculation
from nde_talf.saved import _loaded, load
from nde_talf.selector.network import Selector
from tests.decoding.tiny_loop import DRAFT, HEAD, PROMPT, TARGET
from tests.selector.examples import TABLE, schema

ASKED = {
    "input_ids": torch.tensor([PROMPT]),
    "max_new_tokens": 16,
    "do_sample": False,
    "eos_token_id": None,
}


class Heard:
    def __init__(self):
        self.tokens = []

    def put(self, tokens):
        self.tokens += tokens.flatten().tolist()

    def end(self):
        self.tokens.append("end")


@pytest.mark.parametrize("drafts", ["lm", "head"])
def test_a_saved_folder_decodes_after_it_was_moved(drafts, tmp_path):
    model, folder, heard = TARGET.module, tmp_path / "moved", Heard()
    DRAFT.module.save_pretrained(tmp_path / "lm")
    save_head(HEAD, tmp_path / "head")
    selector = None
    if drafts == "lm":
        selector = tmp_path / "selector"
        static = Selector(schema(16, 16, learned=False))
        static.table = TABLE
        static.save_pretrained(selector)
    speculate(tmp_path / drafts, selector).save(tmp_path / "saved")
    shutil.move(tmp_path / "saved", folder)
    for parts in ("head", "selector"):
        shutil.rmtree(tmp_path / parts, ignore_errors=True)
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(**ASKED, custom_generate=str(folder))
    out = model.generate(
        **ASKED, custom_generate=str(folder), trust_remote_code=True, streamer=heard
    )
    assert torch.equal(out, model.generate(**ASKED)) and heard.tokens == [*out[0].tolist(), "end"]
    requirements = (folder / "custom_generate" / "requirements.txt").read_text().splitlines()
    assert not [line for line in requirements if line.startswith("nde")]  # no index has that name
    assert (folder / "selector" / "config.json").exists() == bool(selector)
    shutil.rmtree(folder)
    speculate("ngram").save(folder)
    model.generate(**ASKED, custom_generate=str(folder), trust_remote_code=True)
    assert [*_loaded.values()][-1].draft == "ngram"  # what is there now


def test_speculate_that_is_not_called_says_what_to_write():
    with pytest.raises(UserError, match=r'custom_generate=speculate\("'):
        TARGET.module.generate(**ASKED, custom_generate=speculate)


def test_what_has_no_folder_is_not_saved(tmp_path):
    def fault(speculation: Speculation) -> str:
        with pytest.raises(UserError) as caught:
            speculation.save(tmp_path / "new")
        return str(caught.value)

    assert "draft is a model" in fault(speculate(DRAFT.module))
    assert "policy of this process" in fault(speculate("ngram", Delayed(Action(1, 0, 2))))
    assert "stateless" in fault(speculate("ngram", stateless=[dict]))
    speculate("ngram").save(tmp_path / "new")
    assert "there already" in fault(speculate("ngram"))
    assert load(str(tmp_path / "new")).draft == "ngram"
