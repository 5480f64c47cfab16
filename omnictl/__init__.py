"""The tool. Never imports torch, vllm or diffusers."""
