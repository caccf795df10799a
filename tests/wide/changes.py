"""What single families need beside the rules of shrink.py: fields of their configurations."""

from __future__ import annotations

from typing import Any

MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
DEPTHS = {
    "backbone_config": {"out_indices": [1, 2, 3, 4], "reshape_hidden_states": False}, "neck_hidden_sizes": [16] * 4,
}  # fmt: skip

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
    "gemma4": {"text_config": MIXED},
    "gemma4_text": MIXED,
    "gemma4_unified": {"text_config": MIXED},
    "gemma4_unified_text": MIXED,
    "granite_speech5_ctc": {"encoder_config": {"num_key_value_heads": 4}},
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
    "perceiver": {"num_latents": 4, "num_self_attends_per_block": 2, "max_position_embeddings": 16, "d_latents": 32},
    "reformer": {"axial_pos_embds": False},
    "wav2vec2-bert": {"vocab_size": 32, "add_adapter": False},
    "wav2vec2-conformer": {"vocab_size": 32},
    "inkling_text": {"swa_num_key_value_heads": 2, "swa_num_attention_heads": 4, "swa_head_dim": 8},
    "qwen4_exp": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
    "bit": {"num_groups": 4, "embedding_size": 16, "hidden_sizes": [16, 16, 24, 32], "depths": [1, 1, 1, 1]},
    "swin": {"image_size": 64, "patch_size": 4, "window_size": 2, "embed_dim": 16, "depths": [1, 1, 2]},
    "donut-swin": {"image_size": 64, "patch_size": 4, "window_size": 2, "embed_dim": 16, "depths": [1, 1, 2]},
    "textnet": {"hidden_sizes": [8, 8, 16, 16, 24], "image_size": [32, 32], "stem_out_channels": 8},
    "levit": {"image_size": 64, "patch_size": 16, "hidden_sizes": [32, 48, 64]},
    "mobilevitv2": {"image_size": 64},
    "efficientnet": {
        "in_channels": [32, 16, *[24] * 5],
        "out_channels": [16, *[24] * 6],
        "hidden_dim": 1280,
        "width_coefficient": 1.0,
        "depth_coefficient": 1.0,
    },
    "hgnet_v2": {
        "stem_channels": [3, 8, 8],
        "stage_in_channels": [8, 16, 16, 16],
        "stage_mid_channels": [8] * 4,
        "stage_out_channels": [16] * 4,
        "hidden_sizes": [16] * 4,
        "stage_numb_of_layers": [2] * 4,
        "stage_num_blocks": [1] * 4,
    },
    "dpt": {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16] * 4, "fusion_hidden_size": 16},
    "depth_anything": DEPTHS,
    "prompt_depth_anything": DEPTHS,
    "tipsv2_dpt": DEPTHS,
    "zoedepth": DEPTHS,
    "chmv2": {"backbone_config": {"out_indices": [1, 2, 3, 4]}},
    "xlstm": {"hidden_size": 128},
    "xmod": {"default_language": "en_XX"},
}

# Whose forwards have no float64: they convert weights, or overflow.
SINGLE = ("led", "longformer", "mra", "nllb-moe", "switch_transformers")

# Why a family is not tried, where what it says does not tell.
UNTRIED = {
    "blt": "cuts its input into patches by a model of its own; its default configuration lacks fields",
    "chmv2": "its backbone's configuration must be written out whole",
    "cohere_compass_text": "its rotary tables must be written out whole",
    "depth_pro": "fuses three encoders whose sizes must fit each other",
    "dia": "needs words and codes of sound together",
    "fun_asr_nano": "its three configurations must fit each other",
    "gemma4": "given words alone, plain training gives NaN",
    "gemma4_assistant": "drafts for another model, whose states it needs",
    "gemma4_unified_assistant": "drafts for another model, whose states it needs",
    "kyutai_speech_to_text": "the sizes of its codec must fit each other",
    "moonshine_streaming": "its default configuration lacks fields",
    "sapiens2": "its head's configuration must be written out whole",
    "shieldgemma2": "needs words and images together",
    "upernet": "its backbone's configuration must be written out whole",
    "vibevoice": "needs words and sound together",
    "vibevoice_asr": "the sizes of its two codecs must fit each other",
    "voxtral_realtime": "needs words and sound together",
}
