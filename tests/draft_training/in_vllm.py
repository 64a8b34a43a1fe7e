"""What vLLM generates from targets and exported heads, in a process of its own."""

from nde_talf import SamplingSetting
from nde_talf.data.engines.vllm import sampling_params
from tests.vllm_process import in_process

VOCABULARY, DRAFTED, NEW_TOKENS = 64, 3, 48

# What vLLM writes after the prompts; with a head, also what it says of sampling as it is and once
# it is repaired.
IN_VLLM = """
import gc, json, sys

import torch

from nde_talf.data.engines.vllm import open_llm
from nde_talf.data.engines.vllm_speculation import sampling_fault
from tests.draft_training.in_vllm import greedy

def repaired(output, values, ends, replace_from, replace_to, MAX_NUM_TOKENS=None):
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    values = torch.where(values == replace_from, torch.as_tensor(replace_to, dtype=values.dtype), values)
    output.copy_(values.repeat_interleave(counts))

def main(target, method, prompts):
    counted = {"disable_log_stats": False, "enable_prefix_caching": False}
    model = open_llm(target, "float32", 128, speculative_config=method, **counted)
    results = {"greedy": [greedy(model, prompt) for prompt in prompts]}
    if method:
        results["fault"] = sampling_fault()
        from vllm.utils import cpu_triton_utils
        kernel, cpu_triton_utils._expand_kernel_impl = cpu_triton_utils._expand_kernel_impl, repaired
        results["fault_once_repaired"] = sampling_fault()
        cpu_triton_utils._expand_kernel_impl = kernel
    model.llm_engine.engine_core.shutdown()
    del model
    gc.collect()
    return results

if __name__ == "__main__":
    results = [main(**job) for job in json.load(open(sys.argv[1]))]
    json.dump(results, open(sys.argv[2], "w"))
"""


def greedy(model, prompt):
    """The text after a prompt, how many drafts were verified, and how many of their tokens were
    accepted by position.
    """
    before = _counts(model)
    sampling = sampling_params(SamplingSetting(0.0), NEW_TOKENS, None)
    (output,) = model.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    drafts, *accepted = (b - a for a, b in zip(before, _counts(model), strict=True))
    return {"tokens": [*output.outputs[0].token_ids], "drafts": drafts, "accepted": accepted}


def _counts(model):
    """So far: drafts, then accepted tokens at each position; vLLM counts by process."""
    metrics = {metric.name.removeprefix("vllm:"): metric for metric in model.get_metrics()}
    if "spec_decode_num_drafts" not in metrics:
        return [0]
    accepted = metrics["spec_decode_num_accepted_tokens_per_pos"].values
    return [metrics["spec_decode_num_drafts"].value, *accepted]


def in_vllm(folder, jobs):
    """Of each job (a target's folder, vLLM's method, prompts) what vLLM found, one engine after the
    other in one process.
    """
    named = [
        {"target": str(target), "method": method, "prompts": prompts}
        for target, method, prompts in jobs
    ]
    return in_process(IN_VLLM, named, folder)
