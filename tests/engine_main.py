"""Subprocess of support.run_engine: one engine, 8 prompts x 32 greedy tokens."""

import json
import sys
from pathlib import Path


def force_vllm_compile() -> None:
    """vLLM's CPU platform replaces VLLM_COMPILE by a mode that never reloads a graph; the
    GPU platforms keep it. Put it back after the platform's check."""
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check(cls, vllm_config):
        original(cls, vllm_config)
        vllm_config.compilation_config.mode = CompilationMode.VLLM_COMPILE
        vllm_config.compilation_config.compile_sizes = []

    CpuPlatform.check_and_update_config = classmethod(check)


def main() -> None:
    spec = json.loads(sys.argv[1])
    if spec["force"]:
        force_vllm_compile()
    from vllm import LLM, SamplingParams

    options = {
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "disable_log_stats": True,
        "enforce_eager": not spec["force"],
    }
    llm = LLM(spec["model"], **{**options, **spec["llm"]})
    prompts = [
        {"prompt_token_ids": [1] + [3 + (i * 37 + j * 11) % 500 for j in range(3 + 2 * i)]}
        for i in range(8)
    ]
    sampling = SamplingParams(
        temperature=0, max_tokens=32, ignore_eos=True, logprobs=0, detokenize=False
    )
    outputs = [r.outputs[0] for r in llm.generate(prompts, sampling, use_tqdm=False)]
    result = {
        "tokens": [list(o.token_ids) for o in outputs],
        "logprobs": [
            [step[t].logprob for t, step in zip(o.token_ids, o.logprobs, strict=True)]
            for o in outputs
        ],
    }
    Path(spec["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
