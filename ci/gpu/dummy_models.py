"""Configurations of the models of ``h200.toml``; their weights are random (``load-format dummy``).

usage: python3 dummy_models.py FOLDER
"""

import json
import sys
from pathlib import Path

from model import CONFIG

BASE = {
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
MODELS = {
    "llama": LLAMA | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 24},
    "llama_eagle3": LLAMA
    | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": 32000,
    },
    "dsv3": CONFIG,
    "deep": CONFIG | {"num_hidden_layers": 48},
}


def main() -> None:
    for name, own in MODELS.items():
        folder = Path(sys.argv[1]) / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(BASE | own))


if __name__ == "__main__":
    main()
