"""Records of decoded prompts with times that tests choose."""

from nde_talf.evaluation.benchmark import Record


def record(method, prompt, tokens, seconds, number=0, kind="code"):
    times = {"cpu_seconds": 2 * seconds, "pass_": number}
    return Record("T=1", method, f"p{prompt}", kind, tokens, tokens, tokens, seconds, **times)
