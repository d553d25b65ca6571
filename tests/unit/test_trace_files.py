"""Traces as people have them: small examples of public traces, benchmarks and rollout dumps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from workloads.groups import Lengths
from workloads.synthetic import SyntheticWorkload
from workloads.traces import Trace, TraceError, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16,396,109\n"
BURST = """Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type
5,1,ChatGPT,472,18,490,Conversation log
45,1,ChatGPT,1087,0,1087,API log
118,2,GPT-4,417,276,693,Conversation log
"""
VLLM = {
    "backend": "openai", "num_prompts": 3, "duration": 3.9, "completed": 2, "input_lens": [374, 396, 22],
    "output_lens": [4, 5, 0], "ttfts": [0.1, 0.1, 0.0], "errors": ["", "", "Timeout"],
}  # fmt: skip
SHAREGPT = [
    {"id": "a_0", "conversations": [
        {"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 400},
        {"from": "human", "value": "z" * 8}, {"from": "gpt", "value": "w" * 4},
    ]},
]  # fmt: skip
VERL = [
    {"input": "user\nWhat is 6*7?", "output": "a" * 40, "score": 1.0, "step": step, "gts": "42"}
    for step in (1, 1, 2)
]
SLIME = {"rollout_id": 7, "samples": [
    {"group_index": group, "index": index, "tokens": list(range(50)), "response": "x", "response_length":
    length,
     "status": status}
    for group, index, length, status in ((0, 0, 20, "completed"), (0, 1, 30, "truncated"), (1, 2, 40,
    "aborted"))
]}  # fmt: skip
AREAL = {"task_id": 17, "sample_idx": 0, "seqlen": 151, "prompt_len": 40, "prompt": "p", "completion": "c"}
NEMO = {"content": [["q", "a"]], "input_lengths": [5], "token_loss_mask": [[0, 0, 0, 1, 1, 0, 0, 0]]}
SERVEGEN = "request_id,timestamp,input_tokens,output_tokens,reason_ratio\n0,0.01,812,2310,0.78\n"
SPLITWISE = (
    "request_id,request_type,arrival_timestamp,batch_size,prompt_size,token_size\n0,2,0.009,1,374,44\n"
)
MOONCAKE = {"timestamp": 0, "input_length": 1400, "output_length": 500, "hash_ids": [0, 1, 2]}


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("text", "inputs", "outputs", "dropped"),
    [
        pytest.param(AZURE, (374, 396), (44, 109), 0, id="Azure 2023 and 2024"),
        pytest.param(BURST, (472, 417), (18, 276), 1, id="BurstGPT, with a request that failed"),
        pytest.param(SERVEGEN, (812,), (2310,), 0, id="ServeGen"),
        pytest.param(SPLITWISE, (374,), (44,), 0, id="Splitwise"),
        pytest.param(json.dumps(SHAREGPT, indent=1), (10, 112), (100, 1), 0, id="ShareGPT"),
        pytest.param(json.dumps(VLLM), (374, 396), (4, 5), 1, id="vLLM's benchmark"),
        pytest.param(lines(VLLM, VLLM), (374, 396, 374, 396), (4, 5, 4, 5), 2, id="SGLang's benchmark"),
        pytest.param(lines(*VERL), (5, 5, 5), (10, 10, 10), 0, id="verl"),
        pytest.param(json.dumps(SLIME), (30, 20), (20, 30), 1, id="slime, saved as JSON"),
        pytest.param(lines(AREAL), (40,), (111,), 0, id="AReaL"),
        pytest.param(lines(NEMO), (3,), (2,), 0, id="NeMo-RL"),
        pytest.param(lines(MOONCAKE), (1400,), (500,), 0, id="Mooncake"),
        pytest.param(json.dumps([MOONCAKE, MOONCAKE]), (1400,) * 2, (500,) * 2, 0, id="a JSON list"),
        pytest.param("Output Tokens\tPROMPT-TOKENS\n7\t9\n", (9,), (7,), 0, id="tabs, capitals, spaces"),
        pytest.param("output_len;input_len\n7;9\n", (9,), (7,), 0, id="semicolons"),
        pytest.param("\ufeffoutput_tokens\n7\n", (200,), (7,), 0, id="a byte order mark, no inputs"),
    ],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_a_format_is_read(
    text: str, inputs: tuple[int, ...], outputs: tuple[int, ...], dropped: int, packed: bool, tmp_path: Path
) -> None:
    path = tmp_path / f"whatever.{'gz' if packed else 'trace'}"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    trace = read_trace(path)
    assert (trace.inputs, trace.outputs, trace.dropped) == (inputs, outputs, dropped)


def test_lengths_of_text_are_said_to_be_estimates(tmp_path: Path) -> None:
    path = tmp_path / "verl.jsonl"
    path.write_text(lines(*VERL))
    assert "estimated: 4 characters a token" in read_trace(path).describe()


def test_a_parquet_file_of_chats(tmp_path: Path) -> None:
    path = tmp_path / "chats.parquet"
    turns = [{"role": "user", "content": "x" * 8}, {"role": "assistant", "content": "y" * 12}]
    pd.DataFrame({"conversation": [turns]}).to_parquet(path)
    assert (read_trace(path).inputs, read_trace(path).outputs) == ((2,), (3,))


def test_a_folder_of_steps_is_one_trace(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        row = {"input": "p" * 8, "output": "r" * 4 * step, "step": step}
        (tmp_path / f"{step}.jsonl").write_text(lines(row, row))
    trace = read_trace(tmp_path)
    assert (trace.steps, trace.groups) == ((0, 0, 1, 1, 2, 2), (0,) * 6)
    assert trace.outputs == (1, 1, 2, 2, 10, 10), "the tenth step comes after the second"


def drawn(trace: Trace, groups: range, samples: int = 2) -> list[tuple[int, list[int], list[list[int]]]]:
    workload = SyntheticWorkload(Lengths(), 0, samples=samples, judge_calls=1, prompts=4, trace=trace)
    return [workload.lengths_of(group) for group in groups]


def test_groups_of_a_trace_stay_together(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "group_id,input_tokens,output_tokens\n" + "".join(f"{g},{g},{g}{s}\n" for g in (1, 2) for s in "1234")
    )
    for prompt, responses, _ in drawn(read_trace(path), range(40)):
        assert {length // 10 for length in responses} == {prompt}
        assert len(set(responses)) == 2, "without repetition, as long as the group is large enough"


def test_steps_of_a_trace_are_those_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("step,output_tokens\n10,100\n10,101\n20,200\n20,201\n")
    found = drawn(read_trace(path), range(16))
    assert all(length < 200 for _, responses, _ in found[:4] for length in responses)
    assert all(length >= 200 for _, responses, _ in found[4:] for length in responses), "the last one goes on"


def test_judgements_are_as_long_as_the_trace_says(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("output_tokens,judge_tokens\n10,1000\n20,2000\n")
    trace = read_trace(path)
    assert "judgements from the trace" in trace.describe()
    for _, responses, judged in drawn(trace, range(20)):
        assert judged == [[100 * length] for length in responses]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("output_tokens\n0\n", "all 1 requests failed or have no response"),
        ("output_tokens,group_id\n5,a\n6,\n", "row 2: has no group_id, and others have"),
        ("output_tokens,step\n5,first\n", "row 1: its step is 'first', not a number"),
        ("[[1]]", "entry 1 is no object"),
    ],
)
def test_what_cannot_be_used_is_one_line(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_failed_requests_are_refused_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(BURST)
    with pytest.raises(TraceError, match=r"row 2: the response has no token \(--trace-failed drop"):
        read_trace(path, refuse_failed=True)


def test_what_torch_saved_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "data_0.pt"
    path.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(TraceError, match="can run code when it is read"):
        read_trace(path)
    path.write_bytes(b"\x1f\x8b\x08 not whole")
    with pytest.raises(TraceError, match="not a whole gzip file"):
        read_trace(path)
