"""What vLLM generates from targets and exported heads, in a process of its own."""

from pathlib import Path

from tests.vllm_process import in_process

VOCABULARY, DRAFTED, NEW_TOKENS = 64, 3, 48

# What vLLM writes after the prompts; with a head, also what it says of sampling as it is and once
# it is repaired.
IN_VLLM = """
import gc, json, sys
from dataclasses import asdict

import torch

from nde_talf.data.engines.vllm_speculation import sampling_fault
from nde_talf.decoding.sampling import SamplingSetting
from tests.draft_training.speculating import SpeculatingLLM

def repaired(output, values, ends, replace_from, replace_to, MAX_NUM_TOKENS=None):
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    values = torch.where(values == replace_from, torch.as_tensor(replace_to, dtype=values.dtype), values)
    output.copy_(values.repeat_interleave(counts))

def main(target, method, prompts, new_tokens):
    model = SpeculatingLLM(target, method, 128)
    results = {"greedy": [asdict(one) for one in model.generate(prompts, new_tokens, SamplingSetting(0.0))]}
    if method:
        results["fault"] = sampling_fault()
        from vllm.utils import cpu_triton_utils
        kernel, cpu_triton_utils._expand_kernel_impl = cpu_triton_utils._expand_kernel_impl, repaired
        results["fault_once_repaired"] = sampling_fault()
        cpu_triton_utils._expand_kernel_impl = kernel
    model._model.llm_engine.engine_core.shutdown()
    del model
    gc.collect()
    return results

if __name__ == "__main__":
    results = [main(**job) for job in json.load(open(sys.argv[1]))]
    json.dump(results, open(sys.argv[2], "w"))
"""


def in_vllm(folder: Path, jobs: list[tuple[Path, dict | None, list[list[int]]]]) -> list[dict]:
    """Of each job (a target's folder, vLLM's method, prompts) what vLLM found, one engine after the
    other in one process.
    """
    named = [
        {"target": str(target), "method": method, "prompts": prompts, "new_tokens": NEW_TOKENS}
        for target, method, prompts in jobs
    ]
    return in_process(IN_VLLM, named, folder)
