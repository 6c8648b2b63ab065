"""A tiny config for every mlx-lm definition with routed experts, each with that definition's own traits switched on.

`DEFINITIONS` has one entry a model file, named by the file; `ALIASES` the other model types that lead to one of
these files; `REFUSED` the files whose experts cannot stream, with the reason. Together the first and the last are
`moe_model_files()`, which walks the installed mlx-lm: a new release shows what is missing. muse_spark is written in
Metal kernels alone: elsewhere it runs with `MUSE_SPARK_KERNELS` in their place.

Widths differ where mlx-lm lets them (hidden 64, dense 96, expert 32), so that a mix-up of axes cannot go unseen, and
32 divides them, so that they can be quantised. Windows, sparse attention and chunks are shorter than 40 tokens.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import MODEL_REMAPPING, _get_classes

Config = dict[str, Any]

# What nearly every definition asks for.
_BASE: Config = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 2048,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip

# Experts as Qwen's configs spell them.
_QWEN: Config = {
    **_BASE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip

# Experts as DeepSeek's configs spell them: four groups, two of which a token may use, and a dense first layer.
_GROUPS: Config = {"n_group": 4, "topk_group": 2}
_DEEPSEEK: Config = {
    **_BASE, **_GROUPS, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "attention_bias": False,
}  # fmt: skip

# Latent attention.
_MLA: Config = {
    "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
_YARN: Config = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
_DEEPSEEK_V3: Config = {**_DEEPSEEK, **_MLA, "rope_scaling": _YARN}
_INDEXER: Config = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 8}

# Experts as the Bailing (Ling, Ring) configs spell them.
_BAILING: Config = {
    **_BASE, **_GROUPS, "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "num_shared_experts": 1, "moe_shared_expert_intermediate_size": 64,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "use_qk_norm": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5,
}  # fmt: skip

# Layers that alternate between a window of 16 tokens and all of them.
_SLIDING: Config = {
    "num_hidden_layers": 4, "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip

# Kimi's delta attention in layers 1 and 3 (counted from 1), latent attention in the others.
_KIMI_LINEAR: Config = {
    **_BASE, **_MLA, "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_token": 2,
    "moe_intermediate_size": 32, "num_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "routed_scaling_factor": 2.5,
    "use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2, "mla_use_nope": True,
    "linear_attn_config": {
        "kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4,
    },
}  # fmt: skip

# Gated delta rule in the layers that are not each second one.
_GATED_DELTA: Config = {
    "num_hidden_layers": 4, "full_attention_interval": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 64, "partial_rotary_factor": 0.25,
}  # fmt: skip
_QWEN3_5: Config = {**_QWEN, **_GATED_DELTA}

_GEMMA4: Config = {
    **_BASE, **_SLIDING, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32,
    "global_head_dim": 64, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 2048, "use_double_wide_mlp": True,
    "tie_word_embeddings": True,
}  # fmt: skip

_LLAMA4: Config = {
    **_BASE, "model_type": "llama4_text", "num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 1,
    "intermediate_size": 32, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2, "attention_bias": True,
    "attention_chunk_size": 16, "attn_temperature_tuning": True, "floor_scale": 8, "rope_scaling": None,
    "use_qk_norm": True,
}  # fmt: skip

_LONGCAT: Config = {
    **_BASE, **_MLA, "attention_method": "MLA", "num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32,
    "n_routed_experts": 8, "zero_expert_num": 4, "zero_expert_type": "identity", "moe_topk": 3,
    "routed_scaling_factor": 2.0, "norm_topk_prob": True, "router_bias": True, "attention_bias": True,
    "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
}  # fmt: skip

_MISTRAL4: Config = {
    **_DEEPSEEK, **_MLA, "model_type": "mistral4", "rope_interleave": True,
    "rope_parameters": {**_YARN, "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1},
}  # fmt: skip

# The compressed, shared and sparse attention of DeepSeek V4.1; layers 1 to 3 read what layer 1 compressed.
_DEEPSEEK_V41: Config = {
    **_BASE, "num_hidden_layers": 4, "q_lora_rank": 32, "qk_rope_head_dim": 16, "o_groups": 2, "o_lora_rank": 32,
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "scoring_func": "sqrtsoftplus",
    "gate_temp": 0.5, "sliding_window": 16, "compress_ratios": [0, 2, 2, 2], "kv_source_layer_ids": [1],
    "index_source_layer_ids": [1, 2], "candidate_source_layer_id": 1, "candidate_topk_blocks": 4,
    "candidate_block_size": 2, **_INDEXER, "index_topk": 4, "hc_mult": 2, "hc_sinkhorn_iters": 3,
}  # fmt: skip

_MAMBA2: Config = {"num_hidden_layers": 4, "mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True}

_TABLE: dict[str, Config] = {
    # shared experts beside the routed ones, and a mixing weight between the two; a dense layer; attention biases
    "Klear": {**_QWEN, "attention_bias": True, "n_shared_experts": 1, "mlp_only_layers": [0]},
    # groups of experts, a bias on the choice, a gate on attention, windows without rope in the full layers
    "afmoe": {**_QWEN, **_SLIDING, **_GROUPS, "num_shared_experts": 1, "num_dense_layers": 1, "mup_enabled": True},
    # lightning attention and latent attention by turns; a layer for the token after next, which mlx-lm drops
    "bailing_hybrid": {
        **_BAILING, **_MLA, "layer_group_size": 2, "group_norm_size": 2, "use_bias": True,
        "num_nextn_predict_layers": 1,
    },
    # biases on everything, the experts too; a head that is normalised when it is loaded
    "bailing_moe": {**_BAILING, "use_bias": True, "norm_head": True, "tie_word_embeddings": False},
    # linear attention by a loop over tokens
    "bailing_moe_linear": {**_BAILING, "use_bias": True, "layer_group_size": 2, "group_norm_size": 2},
    # delta attention with short convolutions; config.json says bailing_hybrid and another architecture
    "bailing_moe_v3": {
        **_BAILING, **_MLA, "model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"],
        "layer_group_size": 2, "short_conv_kernel_size": 4,
    },
    # the first of its kind: softmax routing, shared experts, a dense first layer
    "deepseek": {**_DEEPSEEK, "attention_bias": True},
    # latent attention; groups chosen by their best expert
    "deepseek_v2": {**_DEEPSEEK_V3, "topk_method": "group_limited_greedy"},
    # latent attention in absorbed form; groups chosen by their two best experts after a bias
    "deepseek_v3": _DEEPSEEK_V3,
    # attention to the 8 best positions; two caches a layer
    "deepseek_v32": {**_DEEPSEEK_V3, **_INDEXER},
    # several residual streams, compressed attention, flattened tokens, a cache class of its own
    "deepseek_v41": {"text_config": _DEEPSEEK_V41},
    # query and key norms around DeepSeek's routing
    "dots1": {**_DEEPSEEK, "attention_bias": True, "mlp_bias": True},
    # experts with biases from layer 1 on
    "ernie4_5_moe": {
        **_BASE, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "use_bias": True,
    },
    # a list that says which layers have experts; windows
    "exaone_moe": {
        **_QWEN, **_SLIDING, **_GROUPS, "num_shared_experts": 1, "is_moe_layer": [False, True, True, True],
    },
    # the wrapper of gemma4_text
    "gemma4": {"vocab_size": 2048, "text_config": {**_GEMMA4, "model_type": "gemma4_text"}},
    # experts beside a dense block, the routing made outside the experts' module; two layers without a cache
    "gemma4_text": _GEMMA4,
    # groups, a bias on the choice, part of each head rotated
    "glm4_moe": {
        **_DEEPSEEK, "rope_scaling": None, "use_qk_norm": True, "partial_rotary_factor": 0.5, "attention_bias": True,
    },
    # latent attention and a head for several tokens that goes
    "glm4_moe_lite": {**_DEEPSEEK_V3, "num_nextn_predict_layers": 1},
    # deepseek_v32 with other rotations
    "glm_moe_dsa": {
        **_DEEPSEEK_V3, **_INDEXER, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "indexer_rope_interleave": True,
    },
    # experts with biases and a clipped activation, attention sinks, windows
    "gpt_oss": {
        **_BASE, **_SLIDING, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_scaling": _YARN,
    },
    # multipliers on embeddings, residuals and logits; down projections that stay at 8 bits in larger groups
    "granitemoe": {
        **_BASE, "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "attention_bias": True,
        "logits_scaling": 4.0, "attention_multiplier": 0.2, "embedding_multiplier": 6.0, "residual_multiplier": 0.3,
    },
    # Mamba 2 in three layers of four, experts in all, and a shared block
    "granitemoehybrid": {
        **_BASE, **_MAMBA2, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 64,
        "layer_types": ["mamba", "attention", "mamba", "mamba"], "mamba_n_heads": 4, "mamba_d_head": 32,
        "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 2, "mamba_conv_bias": True,
        "logits_scaling": 4.0, "attention_multiplier": 0.2, "embedding_multiplier": 6.0, "residual_multiplier": 0.3,
    },
    # another top_k and another expert size in each layer; keys and values shared by two layers
    "hunyuan": {
        **_BASE, "num_hidden_layers": 4, "num_experts": 8, "moe_topk": [2, 1, 3, 2],
        "moe_intermediate_size": [32, 64, 32, 96], "use_mixed_mlp_moe": True, "num_shared_expert": [1, 1, 2, 1],
        "use_qk_norm": True, "attention_bias": True, "use_cla": True, "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "alpha": 100.0, "factor": 1.0},
    },
    # Mamba and attention by turns, experts in every second layer
    "jamba": {
        **_BASE, "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "attn_layer_offset": 1,
        "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2, "mamba_d_conv": 4,
        "mamba_d_state": 16, "mamba_expand": 2,
    },
    # the wrapper of deepseek_v3, whole
    "kimi_k25": {"text_config": _DEEPSEEK_V3},
    # experts of a narrower width than the model, delta attention, residuals over blocks of layers
    "kimi_k3": {
        "text_config": {
            **_KIMI_LINEAR, "hidden_act": "situ", "activation_situ_beta": 1.5, "activation_situ_linear_beta": 2.0,
            "attn_res_block_size": 2, "mla_use_output_gate": True, "routed_expert_hidden_size": 32,
            "moe_intermediate_size": 64, "latent_moe_use_norm": True,
        },
    },
    # delta attention and latent attention by turns; config.json names the length model_max_length
    "kimi_linear": {**_KIMI_LINEAR, "model_max_length": 512},
    # the wrapper of deepseek_v3 with a sanitize of its own
    "kimi_vl": {"text_config": _DEEPSEEK_V3},
    # a head count for each layer, a cap on the router's logits, a shared expert, windows
    "laguna": {
        **_QWEN, **_SLIDING, "shared_expert_intermediate_size": 64, "num_attention_heads_per_layer": [2, 4, 2, 4],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "moe_routed_scaling_factor": 2.0,
        "moe_router_logit_softcapping": 5.0, "qkv_bias": True, "partial_rotary_factor": 0.5,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
    # short convolutions and attention by turns, a bias on the choice, a dense first layer
    "lfm2_moe": {
        **_QWEN, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_dense_layers": 1, "use_expert_bias": True, "routed_scaling_factor": 1.5, "norm_eps": 1e-6,
        "conv_bias": True, "conv_L_cache": 3,
    },
    # one expert a token, chunked attention in three layers of four, experts in every second layer
    "llama4": {"text_config": _LLAMA4},
    # experts that do nothing, which are sent to expert 0; two attentions a layer
    "longcat_flash": _LONGCAT,
    # longcat_flash behind embeddings of several tokens, which have a cache of their own
    "longcat_flash_ngram": {**_LONGCAT, "ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3, "emb_split_num": 1},
    # windows, and a rotation for each kind of layer
    "mellum": {
        **_QWEN, **_SLIDING, "rope_parameters": {
            "full_attention": {**_YARN, "rope_type": "yarn", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
    # windows with sinks and head counts of their own; values narrower than keys
    "mimo_v2_flash": {
        **_DEEPSEEK, "num_hidden_layers": 4, "hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "sliding_window_size": 16,
        "layernorm_epsilon": 1e-6, "swa_rope_theta": 1000.0, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "v_head_dim": 16, "swa_head_dim": 32, "swa_v_head_dim": 16,
        "partial_rotary_factor": 0.5, "attention_value_scale": 0.7,
    },
    # a bias on the choice, the router in float32
    "minimax": {
        **_BASE, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0, "rotary_dim": 16,
        "intermediate_size": 32,
    },
    # attention to the best blocks of keys, flattened tokens, a shared expert, a clipped activation
    "minimax_m3_vl": {
        "text_config": {
            **_BASE, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32,
            "dense_intermediate_size": 96, "shared_intermediate_size": 64, "moe_layer_freq": [0, 1, 1],
            "sparse_attention_config": {
                "sparse_num_index_heads": 1, "sparse_index_dim": 32, "sparse_block_size": 4, "sparse_topk_blocks": 3,
                "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1],
            },
        },
    },
    # the wrapper of mistral4 among others
    "mistral3": {"text_config": _MISTRAL4},
    # latent attention whose queries grow with the position
    "mistral4": _MISTRAL4,
    # the plain one
    "mixtral": {**_BASE, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    # experts of a narrower width with a norm inside their module, a bfloat16 stream, windows
    "muse_spark": {
        "audio_config": {"out_hidden_size": 64},  # transformers, which makes the tokenizer, wants it to fit
        "text_config": {
            **_BASE, **_SLIDING, "post_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 10000.0},
            "layer_rope_theta": [10000.0, 0, 10000.0, 0], "final_logit_softcapping": 20.0, "output_multiplier": 0.5,
            "num_local_experts": 8, "num_experts_per_tok": 2, "moe_hidden_size": 32, "moe_intermediate_size": 64,
            "routed_scaling_factor": 2.0,
        },
    },
    # SwitchMLP of a latent width, Mamba 2, attention, experts and a dense block, each a layer; caches for two of them
    "nemotron_h": {
        **_DEEPSEEK, **_MAMBA2, "hybrid_override_pattern": ["M", "E", "*", "E", "-"], "mamba_num_heads": 4,
        "mamba_head_dim": 32, "ssm_state_size": 16, "conv_kernel": 4, "n_groups": 2, "layer_norm_epsilon": 1e-6,
        "use_bias": True, "use_conv_bias": True, "moe_latent_size": 32, "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 96, "time_step_limit": [0.001, 100.0],
    },
    # flattened tokens
    "olmoe": {**_QWEN, "intermediate_size": 32, "attention_bias": True},
    # long rotations, biases, a layer norm
    "phimoe": {
        **_BASE, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32,
        "original_max_position_embeddings": 128, "rope_scaling": {
            "type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "short_mscale": 1.1,
            "long_mscale": 1.2,
        },
    },
    # SwitchMLP with biases; none of the usual names in its config
    "phixtral": {
        "num_vocab": 2048, "model_dim": 64, "num_heads": 2, "num_layers": 3, "rotary_dim": 16, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    # Qwen3.5 whose linear layers are packed in 2 bits behind a Hadamard rotation; the experts are not
    "prism_hadamard_qwen35": {
        "schema_version": 1, "tensor_namespace": "mlx-lm-text",
        "text_config": {**_QWEN3_5, "hidden_size": 128},
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": "model.embed_tokens", "embedding": True, "dtype": "float16", "block": 0},
            {"path": "model.layers.0.linear_attn.out_proj", "embedding": False, "dtype": "float16", "block": 0},
        ],
    },
    # a shared expert with a gate of its own
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 64},
    # gated delta rule in every second layer, experts where config.json says so
    "qwen3_5": {"text_config": {**_QWEN3_5, "model_type": "qwen3_5_text"}},
    # the same, with a sanitize of its own
    "qwen3_5_moe": {"text_config": {**_QWEN3_5, "model_type": "qwen3_5_moe_text"}},
    # a dense layer in the middle, tied embeddings
    "qwen3_moe": {**_QWEN, "mlp_only_layers": [1], "tie_word_embeddings": True},
    # gated delta rule in every second layer, a shared expert with a gate
    "qwen3_next": {**_QWEN, **_GATED_DELTA, "mlp_only_layers": [1]},
    # the wrapper of qwen3_moe
    "qwen3_vl_moe": {"text_config": {**_QWEN, "model_type": "qwen3_moe"}},
    # glm4_moe by another name
    "solar_open": {**_DEEPSEEK, "partial_rotary_factor": 0.5, "use_qk_norm": True},
    # another cap on the activation in each layer, windows with head counts of their own, a gate on each head
    "step3p5": {
        **_BASE, **_SLIDING, "num_attention_groups": 1, "moe_num_experts": 8, "moe_top_k": 2,
        "moe_intermediate_size": 32, "share_expert_dim": 64, "moe_layers_enum": "1,2,3",
        "swiglu_limits": [0.0, 0.0, 7.0, 1.0], "swiglu_limits_shared": [0.0, 0.0, 16.0, 1.0],
        "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
        "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0], "norm_expert_weight": True,
    },
}  # fmt: skip

DEFINITIONS: dict[str, Config] = {name: {"model_type": name, **config} for name, config in _TABLE.items()}

REFUSED: dict[str, str] = {
    "dbrx": "its experts are a Python list of MLPs, called one by one: there is no stack to keep a part of",
}


def _alias(alias: str, config: Config) -> Config:
    """`config` as another model type would have it: a text model has no wrapper around it.

    The rotation's scaling goes: transformers, which reads config.json for the tokenizer, cannot place it in a type
    that it does not know.
    """
    config = config["text_config"] if alias.endswith("_text") else config
    return {**{key: value for key, value in config.items() if key != "rope_scaling"}, "model_type": alias}


# The other model types that lead to one of the files above.
ALIASES: dict[str, Config] = {
    alias: _alias(alias, DEFINITIONS[name]) for alias, name in MODEL_REMAPPING.items() if name in DEFINITIONS
}


def definition_file(config: Config) -> str:
    """The model file that mlx-lm takes for `config`."""
    return str(_get_classes(config)[1].__module__).rpartition(".")[2]


def moe_model_files() -> set[str]:
    """Every model file of the installed mlx-lm that has to do with experts, by name.

    That is each file with a `Model` that mentions experts at all (so one that keeps them in no SwitchGLU is found
    too), and each that imports from such a file, however far: wrappers need not name what they wrap. Read as syntax
    trees, not imported: what a file needs to be imported is no reason to miss it. It rather finds too much: a file
    that only borrows a helper from a definition with experts belongs in REFUSED, with that reason.
    """
    spec = importlib.util.find_spec("mlx_lm.models")
    assert spec is not None, "mlx-lm is a dependency"
    assert spec.submodule_search_locations is not None, "mlx_lm.models is a package"
    sources = {
        file.stem: file.read_text(encoding="utf-8")
        for folder in spec.submodule_search_locations
        for file in Path(folder).glob("*.py")
    }
    trees = {name: ast.parse(source) for name, source in sources.items()}
    models = {name for name, tree in trees.items() if _has_model(tree)}
    found = {name for name in models if "expert" in sources[name].lower()}
    while more := {name for name in models - found if _imported_siblings(trees[name]) & found}:
        found |= more
    return found


def _has_model(tree: ast.Module) -> bool:
    """Whether a file defines or imports the class that mlx-lm asks each definition for."""
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    imported = {name.name for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names}
    return "Model" in defined | imported


def _imported_siblings(tree: ast.Module) -> set[str]:
    """The files of its own package that a model file imports from."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        module = node.module or ""
        if node.level == 1 or module == "mlx_lm.models" or module.startswith("mlx_lm.models."):
            inside = module.removeprefix("mlx_lm.models").lstrip(".")
            names |= {inside.partition(".")[0]} if inside else {alias.name for alias in node.names}
    return names


def _heads(qkvg: mx.array, first: int, heads: int, width: int) -> mx.array:
    return qkvg[..., first * width : (first + heads) * width].reshape(*qkvg.shape[:-1], heads, width)


def _qk_norm(qkvg: mx.array, *, n_heads: int, n_kv_heads: int, head_dim: int, eps: float, query_scale: float) -> Any:
    queries = _heads(qkvg, 0, n_heads, head_dim)
    keys = _heads(qkvg, n_heads, n_kv_heads, head_dim)
    return query_scale * mx.fast.rms_norm(queries, None, eps), mx.fast.rms_norm(keys, None, eps)


def _qk_norm_rope(qkvg: mx.array, *, rope_base: float, offset: int, **sizes: Any) -> Any:
    def rotated(x: mx.array) -> mx.array:
        x = x.swapaxes(1, 2)
        x = mx.fast.rope(x, x.shape[-1], traditional=True, base=rope_base, scale=1.0, offset=offset)
        return x.swapaxes(1, 2)

    queries, keys = _qk_norm(qkvg, **sizes)
    return rotated(queries), rotated(keys)


def _expert_routing(
    logits: mx.array, expert_bias: mx.array, *, top_k: int, multiplier: float, score_eps: float, route_scale: float
) -> Any:
    scores = mx.sigmoid(multiplier * logits)
    experts = mx.argpartition(-(scores + expert_bias), kth=top_k - 1, axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, experts, axis=-1)
    return experts, route_scale * weights / (weights.sum(axis=-1, keepdims=True) + score_eps)


def _post_expert_norm_combine(experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float) -> mx.array:
    return (mx.fast.rms_norm(norm_weight * experts, None, eps) * weights[..., None]).sum(axis=-2)


def _rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    normed = mx.fast.rms_norm(x, None, eps)
    return normed.swapaxes(1, 2).reshape(gate.shape) * mx.sigmoid(gate)


def _norm_add_norm(
    branch: mx.array, stream: mx.array, *, alpha: mx.array, beta: mx.array, post_weight: mx.array | None,
    post_eps: float, next_norm: Callable[[mx.array], mx.array] | None,
) -> Any:  # fmt: skip
    scaled = branch if post_weight is None else post_weight * branch
    stream = alpha * stream + beta * mx.fast.rms_norm(scaled, None, post_eps)
    return stream, None if next_norm is None else next_norm(stream)


# What stands in, by the kernels' names in mlx_lm.models.muse_spark. They take and return the same shapes and do about
# the same; that is enough where two runs of the same definition are compared.
MUSE_SPARK_KERNELS: dict[str, Callable[..., Any]] = {
    "qk_norm": _qk_norm,
    "qk_norm_rope": _qk_norm_rope,
    "expert_routing": _expert_routing,
    "post_expert_norm_combine": _post_expert_norm_combine,
    "rms_norm_sigmoid_gate": _rms_norm_sigmoid_gate,
    "norm_add_norm": _norm_add_norm,
}
