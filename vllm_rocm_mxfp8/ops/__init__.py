"""Torch custom ops of the package, in the namespace ``torch.ops.vllm_rocm_mxfp8``."""
