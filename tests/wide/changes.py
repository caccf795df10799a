"""What single families need beside the rules of shrink.py: fields of their configurations."""

from __future__ import annotations

from typing import Any

CHANGES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 4},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}, "ffn_config": {"hidden_size": 32}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "topk_group": 1, "n_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "emu3": {"pad_token_id": 0},
    "esmc": {"num_key_value_heads": 4},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 3},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "minicpm3": {"num_key_value_heads": 4},
    "neomme": {"head_dim": 16},
    "perceiver": {"num_latents": 4, "num_self_attends_per_block": 2, "max_position_embeddings": 16},
    "reformer": {"axial_pos_embds": False},
    "xlstm": {"num_heads": 4, "qk_dim_factor": 0.5, "v_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
}
