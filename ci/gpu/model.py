"""DeepSeek-V3-like checkpoints whose drafter agrees with the target often, but not always.

Random weights accept nothing and equal ones everything; neither tests a verify pass. Here the
layers move the residual stream only a little, so that the next token is nearly a function of
the last one. The MTP layer passes the embedding on, disturbed by its own attention and by a
random map of the target's hidden state. Accept length: 1.9 to 2.3 of 3 (H200, 2026-11-29).

The other drafter is an EAGLE-3 layer with MLA and a reduced vocabulary (``d2t``), as Kimi-K2.5
has one. There an embedding reaches the output through attention alone, so that its latent
carries it, in a target whose embeddings are no wider than that.

``sure`` is such a pair with leads that rounding does not turn over. Its target's attention carries
the embedding too: all layers and heads together say the next token, the stream without them says
the same token again. So most tokens change where every layer misses half of its heads. The
smallest lead of 2,048 tokens is 1.59, the median 2.95 (transformers, float32, CPU). The drafter is
wrong where its vocabulary lacks the token, a quarter of the time; and where it cannot see its own
input, as all its drafts but the first in stock SGLang 0.5.23 (H200, 2026-11-30).
"""

import json
from functools import partial
from pathlib import Path

HIDDEN, VOCAB, LAYERS, HEADS, EXPERTS = 1024, 32000, 8, 16, 16
MOE, DENSE, Q_LORA, KV_LORA, NOPE, ROPE, V_HEAD = 512, 2048, 512, 512, 128, 64, 128
#: Logits of the sure model, about: of the next token, of the same one, and the random part's std.
NEXT, SAME, NOISE = 7.5, 4.25, 0.1

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": DENSE,
    "moe_intermediate_size": MOE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": Q_LORA,
    "kv_lora_rank": KV_LORA,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": V_HEAD,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "moe_layer_freq": 1,
    "attention_bias": False,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


class _Weights(dict):
    """Named tensors. Scales are root mean squares of what a unit-RMS input gives."""

    def __init__(self, device):
        import torch

        super().__init__()
        self.torch, self.device = torch, device

    def random(self, name, rows, columns, scale=1.0):
        weight = self.torch.randn(rows, columns, device=self.device) * (scale / columns**0.5)
        self[name] = weight.bfloat16().cpu()

    def ones(self, name, size):
        self[name] = self.torch.ones(size, dtype=self.torch.bfloat16)

    def ffn(self, prefix, width, scale):
        self.random(f"{prefix}gate_proj.weight", width, HIDDEN)
        self.random(f"{prefix}up_proj.weight", width, HIDDEN)
        self.random(f"{prefix}down_proj.weight", HIDDEN, width, scale / 0.6)  # silu(g) * u: 0.6

    def layer(self, prefix, attention, mlp, *, dense):
        self.ones(f"{prefix}input_layernorm.weight", HIDDEN)
        self.ones(f"{prefix}post_attention_layernorm.weight", HIDDEN)
        own = f"{prefix}self_attn."
        self.random(f"{own}q_a_proj.weight", Q_LORA, HIDDEN)
        self.ones(f"{own}q_a_layernorm.weight", Q_LORA)
        self.random(f"{own}q_b_proj.weight", HEADS * (NOPE + ROPE), Q_LORA, 3.0)  # peaked
        self.random(f"{own}kv_a_proj_with_mqa.weight", KV_LORA + ROPE, HIDDEN)
        self.ones(f"{own}kv_a_layernorm.weight", KV_LORA)
        self.random(f"{own}kv_b_proj.weight", HEADS * (NOPE + V_HEAD), KV_LORA)
        self.random(f"{own}o_proj.weight", HIDDEN, HEADS * V_HEAD, attention)
        if dense:
            self.ffn(f"{prefix}mlp.", DENSE, mlp)
            return
        self.random(f"{prefix}mlp.gate.weight", EXPERTS, HIDDEN)
        self[f"{prefix}mlp.gate.e_score_correction_bias"] = self.torch.zeros(EXPERTS)
        for expert in range(EXPERTS):
            self.ffn(f"{prefix}mlp.experts.{expert}.", MOE, mlp)
        self.ffn(f"{prefix}mlp.shared_experts.", MOE, mlp)

    def look(self, own, columns, gain, row=0):
        """Attention that hands the embedding on: queries and keys are the same maps of it, so that
        a token looks at its like, itself above all. What it sees there, turned by ``turn`` and
        back, goes with ``gain`` squared to ``row`` and the KV_LORA - 1 after it."""
        torch = self.torch
        keys = torch.randn(HEADS, NOPE, KV_LORA) / KV_LORA**0.5
        turn = torch.linalg.qr(torch.randn(HEADS * V_HEAD, KV_LORA)).Q
        values = gain * turn.view(HEADS, V_HEAD, KV_LORA)
        output = torch.zeros(HIDDEN, HEADS * V_HEAD)
        output[row : row + KV_LORA] = gain * turn.T
        queries = torch.cat([keys, torch.zeros(HEADS, ROPE, KV_LORA)], 1)
        for name, matrix in {
            "q_a_proj": torch.eye(Q_LORA, columns),
            "kv_a_proj_with_mqa": torch.eye(KV_LORA, columns).repeat(2, 1)[: KV_LORA + ROPE],
            "q_b_proj": queries.flatten(0, 1),
            "kv_b_proj": torch.cat([keys, values], 1).flatten(0, 1),
            "o_proj": output,
        }.items():
            self[f"{own}{name}.weight"] = matrix.bfloat16().contiguous()

    def successors(self, tokens):
        """A head that finds in the embedding's half of the stream the same token again and, with
        a higher logit, in the half that attention fills the next one of a cycle through all."""
        order = self.torch.randperm(VOCAB)
        head = tokens[:, :KV_LORA] * (SAME / KV_LORA)
        after = self.torch.empty_like(head)
        after[order.roll(-1)] = tokens[order, :KV_LORA] * (NEXT / KV_LORA)
        noise = self.torch.randn(VOCAB, HIDDEN) * (NOISE / HIDDEN**0.5)
        self["lm_head.weight"] = (noise + self.torch.cat([head, after], 1)).bfloat16()


def make_model(folder: Path, embedding: int = HIDDEN, *, sure: bool = False) -> None:
    """Write the checkpoint and a token map of 24,000 ids (``hot.pt``) unless they are there.
    Embeddings are 0 past their first ``embedding`` elements; ``sure`` wants KV_LORA of them."""
    import torch
    from safetensors.torch import save_file

    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    # The sure one is made where its leads were looked at.
    weights = _Weights("cuda" if torch.cuda.is_available() and not sure else "cpu")
    tokens = torch.randn(VOCAB, HIDDEN, device=weights.device)
    tokens[:, embedding:] = 0
    weights["model.embed_tokens.weight"] = tokens.bfloat16().cpu()
    if sure:
        weights.successors(tokens)
    else:
        weights.random("lm_head.weight", VOCAB, HIDDEN)
    weights.ones("model.norm.weight", HIDDEN)
    for number in range(LAYERS):
        layer = f"model.layers.{number}."
        weights.layer(layer, 0.04, 0.025, dense=number == 0)
        if sure:
            weights.look(f"{layer}self_attn.", HIDDEN, LAYERS**-0.5, KV_LORA)
    mtp = f"model.layers.{LAYERS}."
    weights.layer(mtp, 0.2, 0.025, dense=False)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights.ones(f"{mtp}{norm}.weight", HIDDEN)
    disturbance = torch.randn(HIDDEN, HIDDEN, device=weights.device) * (0.05 / HIDDEN**0.5)
    both = torch.cat([torch.eye(HIDDEN, device=weights.device), disturbance], 1)
    weights[f"{mtp}eh_proj.weight"] = both.bfloat16().cpu()
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(list(range(24000)), folder / "hot.pt")
    (folder / "config.json").write_text(json.dumps(CONFIG))  # last: it marks the rest complete


def make_eagle3(folder: Path, *, sure: bool = False) -> None:
    """Write ``target`` and ``drafter``, whose 24,000 token ids are strewn over the target's."""
    import torch
    from safetensors.torch import load_file, save_file

    target, drafter = folder / "target", folder / "drafter"
    make_model(target, KV_LORA, sure=sure)
    if (drafter / "config.json").exists():
        return
    drafter.mkdir(parents=True, exist_ok=True)
    weights = _Weights("cpu")
    kept = torch.randperm(VOCAB)[:24000].sort().values
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    weights["lm_head.weight"] = head[kept].contiguous()
    weights["d2t"] = kept - torch.arange(len(kept))
    weights.random("fc.weight", HIDDEN, 3 * HIDDEN, 0.3)
    layer = "layers.0."
    weights.ffn(f"{layer}mlp.", DENSE, 0.025)
    for norm, size in (
        ("norm", HIDDEN),
        (f"{layer}input_layernorm", HIDDEN),
        (f"{layer}hidden_norm", HIDDEN),
        (f"{layer}post_attention_layernorm", HIDDEN),
        (f"{layer}self_attn.q_a_layernorm", Q_LORA),
        (f"{layer}self_attn.kv_a_layernorm", KV_LORA),
    ):
        weights.ones(f"{norm}.weight", size)
    weights.look(f"{layer}self_attn.", 2 * HIDDEN, 2, KV_LORA if sure else 0)
    save_file(dict(weights), drafter / "model.safetensors", metadata={"format": "pt"})
    own = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "num_hidden_layers": 1,
        "draft_vocab_size": len(kept),
        "norm_output": True,  # or the last token would be as loud as this one
    }
    (drafter / "config.json").write_text(json.dumps(CONFIG | own))


if __name__ == "__main__":
    import sys

    make = {"mtp": make_model, "eagle3": make_eagle3, "sure": partial(make_eagle3, sure=True)}
    make[sys.argv[1]](Path(sys.argv[2]))
