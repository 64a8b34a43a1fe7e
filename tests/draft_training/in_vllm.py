"""What vLLM generates from a target and an exported head, in a process of its own."""

import json
import os
import subprocess
import sys

VOCABULARY, DRAFTED, NEW_TOKENS = 64, 3, 48

# What vLLM writes behind the prompts; with a head, also what it says of sampling as it is and once it is repaired.
IN_VLLM = """
import json, sys
from dataclasses import asdict

import torch

from data.engines.vllm_speculation import SpeculatingLLM, sampling_fault
from decoding.common.errors import UserError
from decoding.sampling import SamplingSetting

def repaired(output, values, ends, replace_from, replace_to, MAX_NUM_TOKENS=None):
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    values = torch.where(values == replace_from, torch.as_tensor(replace_to, dtype=values.dtype), values)
    output.copy_(values.repeat_interleave(counts))

def main(target, method, prompts, new_tokens):
    model = SpeculatingLLM(target, method, 128)
    found = {"greedy": [asdict(one) for one in model.generate(prompts, new_tokens, SamplingSetting(0.0))]}
    if method:
        found["fault"] = sampling_fault()
        try:
            model.generate(prompts[:1], 4, SamplingSetting(0.7))
        except UserError as error:
            found["refused"] = str(error)
        from vllm.utils import cpu_triton_utils
        cpu_triton_utils._expand_kernel_impl = repaired
        found["fault_once_repaired"] = sampling_fault()
    return found

if __name__ == "__main__":
    arguments = json.load(open(sys.argv[1]))
    json.dump(main(**arguments), open(sys.argv[2], "w"))
"""


def in_vllm(folder, method, prompts) -> dict:
    (folder / "in_vllm.py").write_text(IN_VLLM)
    arguments = {"target": str(folder / "target"), "method": method, "prompts": prompts, "new_tokens": NEW_TOKENS}
    (folder / "in.json").write_text(json.dumps(arguments))
    done = subprocess.run(
        [sys.executable, folder / "in_vllm.py", folder / "in.json", folder / "out.json"],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.getcwd()}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"vLLM failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads((folder / "out.json").read_text())
