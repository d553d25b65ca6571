"""Weights: standard Hugging Face names on disk, fused parameters in memory, one digest for both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from systems.machine.files import replace_file
from systems.model.config import ModelConfig, ModelConfigError, config_json, load_config
from systems.model.qwen3 import MoeFfn, Qwen3

WEIGHTS_FILE = "model.safetensors"


def to_standard(model: Qwen3) -> dict[str, Tensor]:
    """Hugging Face state dict (views of the fused parameters, fp32 or fp64 as they are)."""
    config = model.config
    state: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embedding,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.head,
    }
    widths = [config.heads * config.head_dim] + 2 * [config.kv_heads * config.head_dim]
    for index, block in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        state[prefix + "input_layernorm.weight"] = block.norm_attention.weight
        state[prefix + "post_attention_layernorm.weight"] = block.norm_ffn.weight
        state[prefix + "self_attn.q_norm.weight"] = block.norm_q.weight
        state[prefix + "self_attn.k_norm.weight"] = block.norm_k.weight
        for name, part in zip("qkv", torch.split(block.qkv, widths), strict=True):
            state[f"{prefix}self_attn.{name}_proj.weight"] = part
        state[prefix + "self_attn.o_proj.weight"] = block.out
        ffn = block.ffn
        if isinstance(ffn, MoeFfn):
            state[prefix + "mlp.gate.weight"] = ffn.router
            for expert in range(config.experts):
                _ffn(state, f"{prefix}mlp.experts.{expert}.", ffn.gate_up[expert], ffn.down[expert])
        else:
            _ffn(state, prefix + "mlp.", ffn.gate_up, ffn.down)
    return {name: tensor.detach() for name, tensor in state.items()}


def _ffn(state: dict[str, Tensor], prefix: str, gate_up: Tensor, down: Tensor) -> None:
    gate, up = gate_up.chunk(2)
    state[prefix + "gate_proj.weight"] = gate
    state[prefix + "up_proj.weight"] = up
    state[prefix + "down_proj.weight"] = down


@torch.no_grad()
def load_standard(model: Qwen3, state: Mapping[str, Tensor]) -> Qwen3:
    """Copy a Hugging Face state dict into the fused parameters; refuses missing or extra names."""
    targets = to_standard(model)
    missing = sorted(targets.keys() - state.keys())
    extra = sorted(state.keys() - targets.keys())
    if missing or extra:
        wrong = f"missing {missing[0]}" if missing else f"unexpected {extra[0]}"
        raise ModelConfigError(f"weights do not fit the architecture: {wrong}")
    for name, target in targets.items():
        if target.shape != state[name].shape:
            raise ModelConfigError(
                f"weights do not fit the architecture: {name} is {tuple(state[name].shape)}, "
                f"not {tuple(target.shape)}"
            )
        target.copy_(state[name])
    return model


def load_model(directory: Path) -> Qwen3:
    """A model from a Hugging Face directory (`config.json` and `model.safetensors`)."""
    return load_standard(Qwen3(load_config(directory)), load_file(directory / WEIGHTS_FILE))


def save_model(model: Qwen3, directory: Path) -> None:
    save_standard(model.config, to_standard(model), directory)


def save_standard(config: ModelConfig, state: Mapping[str, Tensor], directory: Path) -> None:
    """Write a directory that transformers and vLLM load as well. Raises `OSError` naming the file."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.float().contiguous().clone() for name, tensor in state.items()}
    # By way of bytes: the library itself opens no path that is not UTF-8, and has errors of its own.
    replace_file(directory / WEIGHTS_FILE, save(tensors, metadata={"format": "pt"}))
    replace_file(directory / "config.json", json.dumps(config_json(config), indent=1) + "\n")


def digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, shapes and fp32 bytes in name order: two equal digests are equal weights."""
    sha = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].float().contiguous()
        sha.update(f"{name}{tuple(tensor.shape)}".encode())
        sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()
