"""Converters of the sidekick's weights: from the form in which they are published to the form that its programs load.

Both work in place on a folder that nobody else sees yet. Called by `runtime.convert`, in a process of its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from runtime.engines.torchvision_operators import declare_missing_operators
from runtime.errors import WeightsError

GGUF_FILE = "model.gguf"
WHOLE_VOICE_FILE = "heart.onnx"
TALKER_FILE = "talker.onnx"
CODE2WAV_FILE = "code2wav.onnx"

LATENTS_TENSOR = "/Concat_43_output_0"
"""Where the voice is cut: after the prosody, before the convolutions that make spectra. Earlier cuts move the pitch
when the second half runs in chunks; from here on the network is purely convolutional."""
TALKER_INPUTS = ["ids", "speed"]
CODE2WAV_OUTPUTS = ["lh", "theta", "ln", "lr", "phi"]


def thinker(folder: Path) -> None:
    """Replace `model.gguf` by a transformers checkpoint: config, bfloat16 safetensors, tokenizer, chat template.

    bfloat16 holds what the published weights know (they were trained in it and then quantized to 4 bits) in half the
    space of float32, and is loaded as either.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    declare_missing_operators()
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF_FILE, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    _forget_quantization(model)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / GGUF_FILE).unlink()


def _forget_quantization(model: Any) -> None:
    """WHY: transformers keeps calling a dequantized model quantized and then refuses to save it.

    SCOPE: transformers 5.19, GgufConfig(dequantize=True). REMOVE WHEN: save_pretrained works right after loading.
    """
    for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.is_quantized = False


def voice(folder: Path) -> None:
    """Cut `heart.onnx` into `talker.onnx` (ids, speed -> latents, f0) and `code2wav.onnx` (latents -> five spectra).

    No node is changed, so the two together compute bit for bit what the whole does.
    """
    import onnx
    from onnx.utils import Extractor

    whole = onnx.shape_inference.infer_shapes(onnx.load(folder / WHOLE_VOICE_FILE))
    if not any(LATENTS_TENSOR in node.output for node in whole.graph.node):
        raise WeightsError(f"{WHOLE_VOICE_FILE}: has no tensor {LATENTS_TENSOR!r} to cut at; it is another export")
    extractor = Extractor(whole)
    talker = extractor.extract_model(TALKER_INPUTS, [LATENTS_TENSOR, "f0"])
    code2wav = extractor.extract_model([LATENTS_TENSOR], CODE2WAV_OUTPUTS)
    for half, name in ((talker, TALKER_FILE), (code2wav, CODE2WAV_FILE)):
        _rename_tensor(half.graph, LATENTS_TENSOR, "latents")
        onnx.checker.check_model(half)
        onnx.save(half, folder / name)
    (folder / WHOLE_VOICE_FILE).unlink()


def _rename_tensor(graph: Any, old: str, new: str) -> None:
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.name == old:
            value.name = new
