"""Small random checkpoints in the real formats: config.json, safetensors, tokenizer.

The weights are random, so the answers are random words; what counts is that two ways of
computing them agree.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB = 512
_WORD_PARTS = ("ka", "lo", "mi", "ren", "su", "tor", "vi", "zen")


def quantize_1x32(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] -> e4m3 [N, K], uint8 [N, K/32]."""
    n, k = weight.shape
    blocks = weight.float().view(n, k // 32, 32)
    exponent = (blocks.abs().amax(-1) / 448).log2().ceil()
    q = (blocks / exponent.exp2().unsqueeze(-1)).to(torch.float8_e4m3fn)
    return q.view(n, k), (exponent + 127).to(torch.uint8)


def quantize_32x32(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] -> e4m3 [N, K], uint8 [N/32, K/32]."""
    n, k = weight.shape
    blocks = weight.float().view(n // 32, 32, k // 32, 32)
    exponent = (blocks.abs().amax((1, 3)) / 448).log2().ceil()
    q = (blocks / exponent.exp2()[:, None, :, None]).to(torch.float8_e4m3fn)
    return q.view(n, k), (exponent + 127).to(torch.uint8)


class _Writer:
    def __init__(self, block32: tuple[str, ...], quantized: bool, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.block32 = block32
        self.quantized = quantized
        self.tensors: dict[str, torch.Tensor] = {}

    def random(self, *shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator) * scale

    def linear(self, name: str, n: int, k: int) -> None:
        # Rows and columns of unlike size, so that every scale byte matters.
        rows = torch.exp2(self.random(n, 1, scale=1.0))
        columns = torch.exp2(self.random(1, k, scale=1.0))
        weight = self.random(n, k, scale=0.5 / math.sqrt(k)) * rows * columns
        if not self.quantized:
            self.tensors[f"{name}.weight"] = weight.bfloat16()
            return
        blocks = any(part in name for part in self.block32)
        q, scale = (quantize_32x32 if blocks else quantize_1x32)(weight)
        self.tensors[f"{name}.weight"] = q
        self.tensors[f"{name}.weight_scale"] = scale

    def norm(self, name: str, size: int) -> None:
        self.tensors[f"{name}.weight"] = (1 + self.random(size, scale=0.1)).bfloat16()

    def save(self, folder: Path, config: dict, ignore: list[str]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        if self.quantized:
            method = "mxfp8_block32" if self.block32 else "modelopt"
            config["quantization_config"] = {
                "quant_method": method,
                "quant_algo": "MXFP8",
                "ignore": ignore,
                **({"block32": list(self.block32)} if self.block32 else {}),
            }
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        save_file(self.tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_tokenizer(folder)
        return folder


def write_llama(
    folder: Path,
    *,
    block32: tuple[str, ...] = (),
    quantized: bool = True,
    hidden: int = 256,
    intermediate: int = 512,
    layers: int = 2,
    seed: int = 0,
) -> Path:
    """A Llama of 4 heads (2 KV heads) of 64. ``block32``: name parts of the linears that
    get 32x32 blocks; () makes a plain ModelOpt MXFP8 export."""
    out = _Writer(block32, quantized, seed)
    out.tensors["model.embed_tokens.weight"] = out.random(VOCAB, hidden, scale=1.0).bfloat16()
    for i in range(layers):
        prefix = f"model.layers.{i}"
        out.linear(f"{prefix}.self_attn.q_proj", 256, hidden)
        out.linear(f"{prefix}.self_attn.k_proj", 128, hidden)
        out.linear(f"{prefix}.self_attn.v_proj", 128, hidden)
        out.linear(f"{prefix}.self_attn.o_proj", hidden, 256)
        out.linear(f"{prefix}.mlp.gate_proj", intermediate, hidden)
        out.linear(f"{prefix}.mlp.up_proj", intermediate, hidden)
        out.linear(f"{prefix}.mlp.down_proj", hidden, intermediate)
        out.norm(f"{prefix}.input_layernorm", hidden)
        out.norm(f"{prefix}.post_attention_layernorm", hidden)
    out.norm("model.norm", hidden)
    out.tensors["lm_head.weight"] = out.random(VOCAB, hidden, scale=0.2).bfloat16()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return out.save(folder, config, ["lm_head"])


def write_deepseek_v2(folder: Path, *, layers: int = 2, seed: int = 0) -> Path:
    """A DeepSeek-V2 with multi-head latent attention and dense MLPs, all 1x32."""
    out = _Writer((), True, seed)
    hidden, intermediate, heads, rank, rope, nope, v_dim = 256, 512, 4, 512, 64, 128, 128
    out.tensors["model.embed_tokens.weight"] = out.random(VOCAB, hidden, scale=1.0).bfloat16()
    for i in range(layers):
        prefix = f"model.layers.{i}"
        out.linear(f"{prefix}.self_attn.q_proj", heads * (nope + rope), hidden)
        out.linear(f"{prefix}.self_attn.kv_a_proj_with_mqa", rank + rope, hidden)
        out.norm(f"{prefix}.self_attn.kv_a_layernorm", rank)
        out.linear(f"{prefix}.self_attn.kv_b_proj", heads * (nope + v_dim), rank)
        out.linear(f"{prefix}.self_attn.o_proj", hidden, heads * v_dim)
        out.linear(f"{prefix}.mlp.gate_proj", intermediate, hidden)
        out.linear(f"{prefix}.mlp.up_proj", intermediate, hidden)
        out.linear(f"{prefix}.mlp.down_proj", hidden, intermediate)
        out.norm(f"{prefix}.input_layernorm", hidden)
        out.norm(f"{prefix}.post_attention_layernorm", hidden)
    out.norm("model.norm", hidden)
    out.tensors["lm_head.weight"] = out.random(VOCAB, hidden, scale=0.2).bfloat16()
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "moe_intermediate_size": 128,
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope,
        "v_head_dim": v_dim,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return out.save(folder, config, ["lm_head"])


def write_tokenizer(folder: Path) -> None:
    """One made-up word per token id, split at spaces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    base = len(_WORD_PARTS)
    words = ["".join(_WORD_PARTS[i // base**d % base] for d in (2, 1, 0)) for i in range(VOCAB)]
    vocab = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *words[3:]])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names})
    )
