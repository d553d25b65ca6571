"""Our Qwen3 beside transformers' on the same directories, and its serving form beside the plain one."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402

import workloads  # noqa: E402
from systems.model.config import ModelConfig, ModelConfigError, config_json, load_config  # noqa: E402
from systems.model.engine import Engine, Request  # noqa: E402
from systems.model.qwen3 import Qwen3  # noqa: E402
from systems.model.sampling import Sampler  # noqa: E402
from systems.model.serving import ServingModel  # noqa: E402
from systems.model.weights import (  # noqa: E402
    WEIGHTS_FILE,
    digest,
    load_model,
    load_standard,
    save_model,
    to_standard,
)
from workloads.hops import demonstrations as demo  # noqa: E402
from workloads.hops import task  # noqa: E402

MODELS = Path(workloads.__file__).parent / "hops" / "models"
SHIPPED = ("dense", "moe", "judge")
LONGEST = 521  # prompt 56, response 224, mark 1 and critique 240: what the judge's positions come to
FP32_TOLERANCE = 1e-4  # largest difference of a logit
FP64_TOLERANCE = 1e-10

transformers.utils.logging.disable_progress_bar()


@lru_cache
def theirs(name: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(MODELS / name).eval()


@lru_cache
def ours(name: str) -> Qwen3:
    return load_model(MODELS / name)


@lru_cache
def serving(name: str) -> ServingModel:
    return ServingModel(ours(name).config, to_standard(ours(name)))


def problem_text(seed: int, length: int) -> str:
    """Problems, responses and critiques one after another, cut at `length` characters."""
    rng, text = random.Random(seed), ""
    while len(text) < length:
        context, completion = demo.judge_pair(rng)
        text += context + completion
    return text[:length]


def real_ids(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.tensor([task.encode(problem_text(seed + row, length)) for row in range(rows)])


def largest_difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def random_model(config: ModelConfig, seed: int) -> Qwen3:
    """Weights of about unit gain, norm weights that are not 1."""
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3(config)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * drawn if parameter.dim() == 1 else drawn * parameter.shape[-1] ** -0.5)
    return model


# ----------------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize("length", [60, 200, LONGEST])
@pytest.mark.parametrize("name", SHIPPED)
def test_fp32_logits_equal_transformers(name: str, length: int) -> None:
    ids = real_ids(2, length)
    with torch.inference_mode():
        expected, found = theirs(name)(ids).logits, ours(name)(ids)
    assert found.dtype == torch.float32
    assert found.shape == (2, length, 80)
    assert float(expected.std()) > 1  # a model that says nothing would agree with anything
    assert largest_difference(found, expected) <= FP32_TOLERANCE


@pytest.mark.parametrize("name", SHIPPED)
def test_greedy_generation_equals_transformers(name: str) -> None:
    rng = random.Random(5)
    problems = [task.make_problem(rng, hops) for hops in (2, 5, 12)]
    texts = [problem.prompt for problem in problems]
    if name == "judge":
        texts = [p.prompt + demo.flawed(p, rng) + task.JUDGE_MARK for p in problems]
    engine = Engine(serving(name), Sampler(task.VOCAB, 0.0), task.STOP)
    requests = [Request(i, i, task.encode(text), 70) for i, text in enumerate(texts)]
    engine.run(requests)
    for request in requests:
        prompt = torch.tensor([request.prompt])
        whole = theirs(name).generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=70
        )
        assert request.tokens == whole[0, len(request.prompt) :].tolist()
    assert max(len(request.tokens) for request in requests) > 10


@st.composite
def tiny_configs(draw: st.DrawFn, moe: bool) -> ModelConfig:
    kv_heads = draw(st.integers(1, 2))
    experts = draw(st.integers(2, 5)) if moe else 0
    return ModelConfig(
        vocab=draw(st.sampled_from([17, 32])),
        hidden=4 * draw(st.integers(2, 8)),
        layers=draw(st.integers(1, 3)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=4 * draw(st.integers(1, 4)),
        ffn=4 * draw(st.integers(2, 10)),
        max_positions=64,
        rope_theta=draw(st.sampled_from([1e4, 1e6])),
        rms_eps=draw(st.sampled_from([1e-6, 1e-5])),
        experts=experts,
        experts_per_token=draw(st.integers(1, experts)) if moe else 0,
        expert_ffn=4 * draw(st.integers(1, 6)) if moe else 0,
        router_aux_coef=0.01 if moe else 0.0,
        eos_id=1,
    )


def check_tiny(config: ModelConfig, seed: int) -> None:
    """transformers, the plain forward and the serving form agree on a random model."""
    model = random_model(config, seed)
    ids = torch.randint(config.vocab, (2, 20), generator=torch.Generator().manual_seed(seed + 1))
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder))
        loaded = load_model(Path(folder))
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert loaded.config == config
    served = ServingModel(config, to_standard(loaded))
    with torch.inference_mode():
        expected, found = reference(ids).logits, loaded(ids)
        last, _ = served.prefill(ids, torch.tensor([20, 13]))
    assert largest_difference(found, expected) <= FP32_TOLERANCE
    assert largest_difference(last, torch.stack([expected[0, 19], expected[1, 12]])) <= FP32_TOLERANCE


@settings(max_examples=20, deadline=None, derandomize=True)
@given(tiny_configs(moe=False), st.integers(0, 1000))
def test_tiny_dense_shapes_equal_transformers(config: ModelConfig, seed: int) -> None:
    check_tiny(config, seed)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(tiny_configs(moe=True), st.integers(0, 1000))
def test_tiny_moe_shapes_equal_transformers(config: ModelConfig, seed: int) -> None:
    check_tiny(config, seed)


# ----------------------------------------------------------------------------------- the serving form


@lru_cache
def plain_fp64(name: str) -> Qwen3:
    return load_model(MODELS / name).double()


@pytest.mark.parametrize("name", SHIPPED)
def test_prefill_equals_the_plain_forward_in_double(name: str) -> None:
    ids = real_ids(4, 150)
    lengths = torch.tensor([150, 1, 77, 149])
    with torch.inference_mode():
        expected = plain_fp64(name)(ids)[torch.arange(4), lengths - 1]
        found, caches = serving(name).prefill(ids, lengths)
    assert found.dtype == torch.float64
    assert largest_difference(found, expected) <= FP64_TOLERANCE
    assert [tuple(cache.shape) for cache in caches] == 3 * [(2, 4, 2, 150, 32)]


@pytest.mark.parametrize("name", SHIPPED)
def test_prefill_and_decode_equal_the_plain_forward_in_double(name: str) -> None:
    """Rows of different lengths, continued with given tokens in one ragged batch."""
    ids, lengths, steps = real_ids(3, 120), [100, 1, 37], 20
    model = serving(name)
    cache = model.new_cache(3, 128)
    with torch.inference_mode():
        expected = plain_fp64(name)(ids)
        for row, length in enumerate(lengths):
            _, part = model.prefill(ids[row : row + 1, :length], torch.tensor([length]))
            for stored, entry in zip(cache, part, strict=True):
                stored[:, row : row + 1, :, :length] = entry
        for step in range(steps):
            position = torch.tensor(lengths) + step
            rows = torch.arange(3)
            found = model.decode(ids[rows, position], position, cache, int(position.max()) + 1)
            assert largest_difference(found, expected[rows, position]) <= FP64_TOLERANCE


def test_padding_and_later_tokens_do_not_reach_earlier_ones() -> None:
    ids, other = real_ids(1, 60), real_ids(1, 60, seed=9)
    mixed = torch.cat([ids[:, :40], other[:, 40:]], 1)
    with torch.inference_mode():
        for name in ("dense", "moe"):
            before, after = plain_fp64(name)(ids), plain_fp64(name)(mixed)
            assert largest_difference(before[:, :40], after[:, :40]) <= FP64_TOLERANCE
            assert largest_difference(before[:, 45:], after[:, 45:]) > 0.1


def test_the_router_loss_is_that_of_a_uniform_router_at_least() -> None:
    """Switch form: 1 a layer for a balanced router, at most experts / k."""
    model = load_model(MODELS / "moe")
    model(real_ids(4, 60))
    assert 3 * 0.99 <= float(model.aux_loss().detach()) <= 3 * 4
    dense = load_model(MODELS / "dense")
    dense(real_ids(1, 10))
    assert float(dense.aux_loss().detach()) == 0.0


# ----------------------------------------------------------------------------------------- directories


@pytest.mark.parametrize("name", SHIPPED)
def test_the_tokenizer_directory_is_the_tasks_encoding(name: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS / name)
    for text in (problem_text(1, 300), task.CHARACTERS, "#9.", ".."):
        assert tokenizer(text)["input_ids"] == list(task.encode(text))
    text = problem_text(2, 300)
    assert tokenizer.decode(task.encode(text)) == text
    assert tokenizer.eos_token_id == task.STOP == load_config(MODELS / name).eos_id
    assert tokenizer.pad_token_id == task.PAD == load_config(MODELS / name).pad_id
    assert len(tokenizer) == load_config(MODELS / name).vocab


@pytest.mark.parametrize("name", SHIPPED)
def test_a_saved_model_is_the_same_model(name: str, tmp_path: Path) -> None:
    model = ours(name)
    save_model(model, tmp_path / "deep" / "copy")
    again = load_model(tmp_path / "deep" / "copy")
    assert again.config == model.config
    assert digest(to_standard(again)) == digest(to_standard(model))
    assert digest(load_file(MODELS / name / WEIGHTS_FILE)) == digest(to_standard(model))
    ids = real_ids(1, 20)
    with torch.inference_mode():
        assert torch.equal(again(ids), model(ids))


def test_a_digest_notices_every_difference() -> None:
    state = to_standard(load_model(MODELS / "dense"))
    whole = digest(state)
    assert digest(dict(reversed(state.items()))) == whole
    assert digest({name: tensor.double() for name, tensor in state.items()}) == whole
    names = sorted(state)
    swapped = {**state, names[0]: state[names[1]], names[1]: state[names[0]]}
    assert digest(swapped) != whole
    assert digest({**state, names[0]: state[names[0]].reshape(-1)}) != whole
    assert digest({name: state[name] for name in names[1:]}) != whole
    norm = state["model.norm.weight"].clone()
    norm[3] = torch.nextafter(norm[3], torch.tensor(torch.inf))
    assert digest({**state, "model.norm.weight": norm}) != whole


def test_standard_weights_are_views_of_the_fused_ones() -> None:
    """The trainer publishes by copying them, so they must follow the parameters."""
    model = load_model(MODELS / "moe")
    state = to_standard(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    assert all(bool((tensor == 7.0).all()) for tensor in state.values())
    assert sum(tensor.numel() for tensor in state.values()) == 528_512


def edited(tmp_path: Path, name: str, edit: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a shipped directory with another config.json."""
    shutil.copytree(MODELS / name, tmp_path / name)
    path = tmp_path / name / "config.json"
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))
    return tmp_path / name


FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "max_position_embeddings", "rms_norm_eps", "eos_token_id",
)  # fmt: skip
MOE_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


@pytest.mark.parametrize(
    ("name", "key"), [("dense", key) for key in FIELDS] + [("moe", key) for key in MOE_FIELDS]
)
def test_a_missing_field_is_named(tmp_path: Path, name: str, key: str) -> None:
    directory = edited(tmp_path, name, lambda raw: raw.pop(key))
    with pytest.raises(ModelConfigError, match=rf"config\.json.*'{key}' is missing"):
        load_config(directory)


def drop_rope(raw: dict[str, Any]) -> None:
    raw.pop("rope_theta", None)
    raw.pop("rope_parameters", None)


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("dense", drop_rope, "'rope_theta' is missing"),
        ("dense", lambda raw: raw.update(architectures=["LlamaForCausalLM"]), "LlamaForCausalLM is not one"),
        ("dense", lambda raw: raw.pop("architectures"), r"\(none\) is not one"),
        ("dense", lambda raw: raw.update(tie_word_embeddings=True), "tied embeddings"),
        ("moe", lambda raw: raw.update(norm_topk_prob=False), "norm_topk_prob"),
    ],
)
def test_an_unsupported_config_is_refused_by_name(
    tmp_path: Path, name: str, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(ModelConfigError, match=rf"config\.json.*{message}"):
        load_config(edited(tmp_path, name, edit))


@pytest.mark.parametrize("content", [None, "{not json"])
def test_an_unreadable_config_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelConfigError, match=r"config\.json: cannot be read"):
        load_config(tmp_path)


def test_theta_is_read_from_either_place(tmp_path: Path) -> None:
    old = edited(tmp_path / "a", "dense", lambda raw: raw.pop("rope_parameters"))
    new = edited(tmp_path / "b", "dense", lambda raw: raw.pop("rope_theta", None))
    assert load_config(old) == load_config(new) == load_config(MODELS / "dense")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_written_config_is_read_back(name: str, tmp_path: Path) -> None:
    config = replace(load_config(MODELS / name), layers=2, rope_theta=123.0, rms_eps=1e-5, pad_id=3)
    (tmp_path / "config.json").write_text(json.dumps(config_json(config)))
    assert load_config(tmp_path) == config


def rewritten(tmp_path: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of the shipped MoE directory with other weights."""
    shutil.copytree(MODELS / "moe", tmp_path / "moe")
    path = tmp_path / "moe" / WEIGHTS_FILE
    state = {key: value.clone() for key, value in load_file(path).items()}
    edit(state)
    save_file(state, path, metadata={"format": "pt"})
    return tmp_path / "moe"


EXPERT = "model.layers.1.mlp.experts.7.up_proj.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda state: state.pop(EXPERT), f"missing {EXPERT}"),
        (lambda state: state.pop("lm_head.weight"), "missing lm_head.weight"),
        (lambda state: state.update({"model.extra": torch.zeros(1)}), "unexpected model.extra"),
        (lambda state: state.update({EXPERT: torch.zeros(9, 64)}), rf"{EXPERT} is \(9, 64\), not \(96, 64\)"),
        (lambda state: state.update({EXPERT: torch.zeros(96 * 64)}), rf"{EXPERT} is \(6144,\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    tmp_path: Path, edit: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    with pytest.raises(ModelConfigError, match=message):
        load_model(rewritten(tmp_path, edit))


def test_weights_of_another_architecture_do_not_fit() -> None:
    with pytest.raises(ModelConfigError, match=r"missing model\.layers.0\.mlp\.down_proj\.weight"):
        load_standard(Qwen3(load_config(MODELS / "dense")), to_standard(ours("moe")))


def test_a_missing_weights_file_is_named(tmp_path: Path) -> None:
    shutil.copy(MODELS / "dense" / "config.json", tmp_path)
    with pytest.raises((ModelConfigError, OSError), match=WEIGHTS_FILE):
        load_model(tmp_path)
