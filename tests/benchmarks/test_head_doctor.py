"""The head doctor reads an engine's counters and names the fault that explains them."""

from benchmarks.head_doctor import HEALTHY, diagnose, read_counters

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="x"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="x"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="1"} 1.0
"""


def test_counters_are_read_from_json_and_from_vllms_metrics(tmp_path):
    (tmp_path / "json").write_text('{"drafts": 10, "accepted": [7, 5]}')
    (tmp_path / "metrics").write_text(METRICS)
    assert read_counters(tmp_path / "json") == [10, 7, 5]
    assert read_counters(tmp_path / "metrics") == [14, 7, 3]


def test_the_most_likely_fault_is_named_and_chance_is_not():
    ours = {HEALTHY: [1000, 700, 500], "norm": [1000, 400, 100], "late": [1000, 700, 200]}
    assert diagnose([500, 345, 255], ours) == HEALTHY
    assert diagnose([500, 352, 95], ours) == "late"
    assert diagnose([500, 210, 40], ours) == "norm"
