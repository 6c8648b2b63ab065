"""Facts of real models and Macs, written down by hand: config numbers, published sizes, published decode rates.

Config numbers are those of the models' config.json, as far as sizes depend on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]

_BF16: Config = {"torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False}
_WINDOWS = ["sliding_attention", "full_attention"]
_GPT_OSS: Config = {
    **_BF16, "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128,
    "max_position_embeddings": 131072, "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ]},
}  # fmt: skip
_DEEPSEEK: Config = {
    **_BF16, "first_k_dense_replace": 1, "moe_layer_freq": 1, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840, "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip

CONFIGS: dict[str, Config] = {
    "OLMoE-1B-7B": {
        **_BF16, "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
        "vocab_size": 50304, "max_position_embeddings": 4096,
    },
    "DeepSeek-V2-Lite": {
        **_DEEPSEEK, "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "q_lora_rank": None,
        "vocab_size": 102400, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "routed_scaling_factor": 1.0,
    },
    "DeepSeek-V3": {
        **_DEEPSEEK, "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "q_lora_rank": 1536, "vocab_size": 129280, "n_group": 8, "topk_group": 4,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    },
    "Qwen3-30B-A3B": {
        **_BF16, "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 40960,
    },
    "Mixtral-8x7B": {
        **_BF16, "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 32000, "max_position_embeddings": 32768,
    },
    "GLM-4.5-Air": {
        **_BF16, "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 1, "vocab_size": 151552, "max_position_embeddings": 131072, "attention_bias": True,
        "partial_rotary_factor": 0.5, "use_qk_norm": False, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "rope_scaling": None,
    },
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32, "layer_types": _WINDOWS * 12},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128, "layer_types": _WINDOWS * 18},
    "Qwen3.5-35B-A3B": {
        "model_type": "qwen3_5_moe", "tie_word_embeddings": False, "text_config": {
            **_BF16, "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40,
            "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_value_head_dim": 128, "num_experts": 256,
            "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "mlp_only_layers": [], "vocab_size": 248320, "max_position_embeddings": 262144,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
    },
    "Qwen3-Next-80B-A3B": {
        **_BF16, "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
        "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "num_experts": 512, "num_experts_per_tok": 10,
        "decoder_sparse_step": 1, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "mlp_only_layers": [], "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 262144,
        "rope_theta": 1e7, "partial_rotary_factor": 0.25,
    },
    "MiniMax-M2.5": {
        **_BF16, "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256,
        "num_experts_per_tok": 8, "vocab_size": 200064, "max_position_embeddings": 196608, "rotary_dim": 64,
        "scoring_func": "sigmoid", "use_qk_norm": True, "shared_intermediate_size": 0,
    },
    "Llama-4-Scout": {
        "model_type": "llama4", "text_config": {
            **_BF16, "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192,
            "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1, "vocab_size": 202048, "max_position_embeddings": 10485760,
            "attention_bias": False, "attention_chunk_size": 8192, "use_qk_norm": True, "rope_scaling": None,
        },
    },
}  # fmt: skip

# Sizes of 4-bit checkpoints on the hub, as published. Of Qwen3-30B-A3B it is that of the experts.
WEIGHT_BYTES = {
    "OLMoE-1B-7B": 3.9e9,
    "DeepSeek-V2-Lite": 8.8e9,
    "Mixtral-8x7B": 26.3e9,
    "GLM-4.5-Air": 60.2e9,
    "gpt-oss-120b": 59.0 * 2**30,
}
EXPERT_BYTES = {"Qwen3-30B-A3B": 16.3e9, "gpt-oss-120b": 56.8 * 2**30}

# Bytes a token of the caches that grow without bound, 2 bytes an item:
# grouped attention: 2 (keys and values) x layers x KV heads x head width;
# latent attention: layers x (latent width + width of the rotated part); but mlx-lm's deepseek_v2 keeps the keys and
# values that are made of it: layers x heads x (key width + value width);
# windows, chunks, linear attention: the layers that attend to everything only.
KV_BYTES_PER_TOKEN = {
    "OLMoE-1B-7B": 2 * 16 * 16 * 128 * 2,
    "Qwen3-30B-A3B": 2 * 48 * 4 * 128 * 2,
    "Mixtral-8x7B": 2 * 32 * 8 * 128 * 2,
    "GLM-4.5-Air": 2 * 46 * 8 * 128 * 2,
    "MiniMax-M2.5": 2 * 62 * 8 * 128 * 2,
    "DeepSeek-V2-Lite": 27 * 16 * ((128 + 64) + 128) * 2,
    "DeepSeek-V3": 61 * (512 + 64) * 2,
    "gpt-oss-20b": 2 * 12 * 8 * 64 * 2,
    "gpt-oss-120b": 2 * 18 * 8 * 64 * 2,
    "Qwen3.5-35B-A3B": 2 * (40 // 4) * 2 * 256 * 2,
    "Llama-4-Scout": 2 * (48 // 4) * 8 * 128 * 2,
}


@dataclass(frozen=True)
class PublishedDecode:
    """A decode rate that somebody published. `slots_bytes`: of experts, None where all were in memory.

    `miss_rate`: as published with it. `bits`: of what the config leaves unquantised.
    """

    model: str
    machine: str
    bandwidth_bytes_per_s: float
    tokens_per_s: float
    slots_bytes: int | None = None
    miss_rate: float | None = None
    bits: int = 4


# Sources: the reports named in this project's issue "The tuner" (M4: a 35B-A3B of 22.1 GB in 4 bits on 32 GB, SSD 2.4
# GB/s; gpt-oss-20b; Mixtral), Rapid-MLX pull request 1065 (M2 Max) and Mac-MLX issue 24 (M5 Max). The report on
# Mixtral names no chip: one with 200 GB/s is assumed. gpt-oss-20b: attention and head in 8 bits, as it is spread.
PUBLISHED = (
    PublishedDecode("Qwen3.5-35B-A3B", "M4 32 GB, resident", 120e9, 33.0),
    PublishedDecode("Qwen3.5-35B-A3B", "M4 32 GB, 16 GiB of experts", 120e9, 15.9, 16 * 2**30, 0.036),
    PublishedDecode("Qwen3.5-35B-A3B", "M4 32 GB, 8 GiB of experts", 120e9, 7.2, 8 * 2**30, 0.083),
    PublishedDecode("Qwen3.5-35B-A3B", "M2 Max, resident", 400e9, 79.8),
    PublishedDecode("Qwen3.5-35B-A3B", "M5 Max, resident", 614e9, 133.0),
    PublishedDecode("gpt-oss-20b", "M2 Pro, resident", 200e9, 44.0, bits=8),
    PublishedDecode("gpt-oss-20b", "M2 Max, resident", 400e9, 91.0, bits=8),
    PublishedDecode("Mixtral-8x7B", "32 GB, resident, 200 GB/s assumed", 200e9, 14.8),
)


@dataclass(frozen=True)
class PublishedTogether:
    """Decode rates of all replies together that somebody published, by how many there were, all experts in memory."""

    model: str
    machine: str
    bandwidth_bytes_per_s: float
    flops_per_s: float
    bits: int
    context: int
    tokens_per_s: dict[int, float]


# Issue 1783 of jundot/omlx: Qwen3-Coder-Next in 6 bits, prompts of 1024 tokens and replies of 128, all begun at once.
PUBLISHED_TOGETHER = (
    PublishedTogether(
        "Qwen3-Next-80B-A3B", "M4 Max 128 GB", 546e9, 18.4e12, 6, 1152, {1: 78.4, 2: 96.9, 4: 139.9, 8: 180.2}
    ),
)
