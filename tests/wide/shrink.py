"""Tiny configurations of every family of the transformers library: widths, layers and words cut down by field name."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

WORDS, WIDTH, HEADS, INNER, POSITIONS = 67, 32, 4, 48, 64

# The first pattern that a whole name matches gives a whole number its new value; a function takes the old one.
INTEGERS: list[tuple[str, Any]] = [
    (r"pad_token_id|pad_index", 0),
    (r"bos_token_id|decoder_start_token_id|bos_index", 1),
    (r"eos_token_id|sep_token_id|eos_index|eod_token_id", 2),
    (r".*(token_id|token_index|_index|start_id|end_id)", lambda old: min(old, 5)),
    (r"chunk_size_feed_forward|n_langs|pretraining_tp", lambda old: old),
    (r"num_kv_shared_layers", 1),
    (r"hidden_size_per_layer_input", 8),
    (r".*vocab_size.*|.*vocabulary_size", lambda old: min(old, WORDS)),
    (r"num_(key_value|kv)_heads|n_kv_heads?|num_key_value_groups|kv_heads", 2),
    (r"(encoder|decoder)_layers|num_(encoder|decoder)_layers|n_(encoder|decoder)_layers?", 2),
    (r"num_hidden_layers|n_layers?|num_layers|depth|num_blocks", 4),
    (r".*(attention_heads|num_heads|n_heads?|num_attn_heads)", HEADS),
    (r"index_n_heads", 2),
    (r"qk_rope_head_dim", 4),
    (r"(v|qk_nope)_head_dim|head_dim|.*_head_dim|d_kv|kv_channels|attention_head_size", WIDTH // HEADS),
    (r"(q|kv|o)_lora_rank|.*_rank", 8),
    (r".*(intermediate_size|ffn_dim|mlp_dim|d_ff|d_inner|n_inner|ffn_hidden_size|feed_forward_size|intermediate_dim)",
     INNER),
    (r"(max|n|num|max_source|max_target|max_2d|max_seq)_?(position_embeddings|positions|ctx|len|length|seq_len)",
     lambda old: min(old, POSITIONS)),
    (r"max_sequence_length|seq_length|context_length|n_positions|n_ctx", lambda old: min(old, POSITIONS)),
    (r"sliding_window|attention_window|local_attention", lambda old: min(old, 8)),  # more than what is padded
    (r"window_size", lambda old: min(old, 4)),
    (r"num_experts_per_tok|moe_topk|moe_k|num_selected_experts|top_k", 2),
    (r"num_local_experts|num_experts|n_routed_experts|moe_num_experts|n_experts", 4),
    (r"n_group|topk_group|moe_num_shared_experts|n_shared_experts|num_shared_experts", 1),
    (r"(mamba_)?n_groups|mamba_n_groups|ssm_n_groups", lambda old: min(old, 2)),
    (r"first_k_dense_replace|num_dense_layers|first_dense_layers", 1),
    (r"image_size|img_size|input_size|pretrain_image_size", 32),
    (r"patch_size", lambda old: min(old, 8)),
    (r"num_frames", 2),
    (r"hidden_size|d_model|n_embd|.*embed_dim|hidden_dim|dim|emb_dim|embedding_size|.*hidden_size|model_dim|d_embed",
     WIDTH),
    (r"num_mel_bins|feature_size|max_len", lambda old: min(old, 16)),
    (r"num_conv_pos_embedding_groups", 2),
    (r"num_conv_pos_embeddings", 4),
    (r"mask_.*|sampling_rate|.*stride|.*kernel.*|.*factor|.*_period|.*_step|.*padding", lambda old: old),
    (r".*(dim|size|channels|width|hidden|filters|features|dims|proj|units|rank)", lambda old: min(old, WIDTH)),
    (r"num_queries|.*num_latents", 6),
]  # fmt: skip

LISTS: list[tuple[str, Any]] = [
    (r"image_size", lambda old: [32 for _ in old]),
    (r"depths|layers|num_blocks|layer_depths|num_conv_layers", lambda old: [min(one, 2) for one in old]),
    (r"conv_dim|tdnn_dim", lambda old: [16 for _ in old]),
    (r"(num|n)_(attention_)?heads", lambda old: [min(one, 2) for one in old]),
    (r".*(hidden_sizes|embed_dims?|channels|dims|widths|sizes|embed_dim)", lambda old: _narrow(old)),
    (r"attention_window", lambda old: [8 for _ in old]),
    (r"eos_token_id", lambda old: [2]),
]


def _narrow(old: list[Any]) -> list[Any]:
    """The same proportions with 8 as the smallest of the wide ones."""
    wide = [one for one in old if isinstance(one, int) and one > 8]
    if not wide:
        return list(old)
    return [max(8, one * 8 // min(wide) // 8 * 8) if isinstance(one, int) and one > 8 else one for one in old]


def smaller(name: str, old: Any) -> Any:
    """The value of a field in a tiny model."""
    if isinstance(old, bool) or old is None:
        return old
    if isinstance(old, float) or (isinstance(old, int) and re.search("drop(out)?", name)):
        off = re.search(r"drop|jitter|mask_(time|feature)_prob", name) and "dropout_schedule" not in name
        return 0.0 if off else old
    if isinstance(old, (list, tuple)) and "drop" in name:
        return type(old)(0.0 for _ in old)
    if isinstance(old, int):
        return _first(INTEGERS, name, old)
    if isinstance(old, (list, tuple)) and old and all(isinstance(one, int) for one in old):
        return type(old)(_first(LISTS, name, old))
    return old


def _first(rules: list[tuple[str, Any]], name: str, old: Any) -> Any:
    for pattern, new in rules:
        if re.fullmatch(pattern, name):
            return new(old) if callable(new) else new
    return old


def tiny(kind: type, changes: dict[str, Any]) -> Any:
    """A small configuration of this class; `changes` are this family's own fields, dicts for configurations inside."""
    return kind(**_fields(kind, changes))


def _fields(kind: type, changes: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    inner = _inner(kind)
    for field in dataclasses.fields(kind):
        if not field.init or field.name in ("transformers_version", "dtype"):
            continue
        if field.name in inner:
            model_type = getattr(inner[field.name], "model_type", "")
            fields[field.name] = {"model_type": model_type} | _fields(inner[field.name], changes.get(field.name, {}))
            continue
        old = field.default
        if old is dataclasses.MISSING:
            if field.default_factory is dataclasses.MISSING:
                continue
            old = field.default_factory()
        new = _groups(kind) if field.name == "num_key_value_heads" else smaller(field.name, old)
        if field.name == "head_dim":  # some compute it from the rest, some want it said
            new = WIDTH // HEADS
        if new != old:
            fields[field.name] = new
    changed = {name: value for name, value in changes.items() if name not in inner}
    return fields | changed


def _groups(kind: type) -> int:
    """Heads of keys and values: as many as of queries, where the family wants that."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    same = defaults["num_key_value_heads"] == defaults.get("num_attention_heads")
    return HEADS if same or "kv_lora_rank" in defaults else HEADS // 2


def _inner(kind: type) -> dict[str, type]:
    """The configurations inside: of its text, its images, its encoder."""
    classes = dict(getattr(kind, "sub_configs", None) or {})
    if any(one.__name__ == "AutoConfig" for one in classes.values()):
        whole = kind()
        classes = {name: type(getattr(whole, name, None)) for name in classes}
    return {name: one for name, one in classes.items() if dataclasses.is_dataclass(one)}
