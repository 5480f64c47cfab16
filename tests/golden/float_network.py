"""The vocoder's network without its int8 arithmetic: the same weights, multiplied as floats.

Dynamic quantization makes a network's output depend a little on all that is in its input. Without it, decoding in
chunks has to give what decoding the whole gives: that proves the chunks, and tells what the rest is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from runtime.programs.sidekick.code2wav import OnnxNetwork


def float_network(path: Path) -> OnnxNetwork:
    return OnnxNetwork(onnxruntime.InferenceSession(float_model(path).SerializeToString()))


def float_model(path: Path) -> onnx.ModelProto:
    """A model in which each DynamicQuantizeLinear, MatMulInteger, Cast, Mul is one MatMul of dequantized weights."""
    model = onnx.load(path)
    graph = model.graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    producers = {output: node for node in graph.node for output in node.output}
    users = {name: node for node in graph.node for name in node.input}
    replaced: dict[str, onnx.NodeProto] = {}
    removed: set[str] = set()
    for node in graph.node:
        if node.op_type != "MatMulInteger":
            continue
        quantize = producers[node.input[0]]
        cast = users[node.output[0]]
        rescale = users[cast.output[0]]
        scales = producers[next(name for name in rescale.input if name != cast.output[0])]
        scale = constants[next(name for name in scales.input if name not in quantize.output)]
        weights = (constants[node.input[1]].astype(np.float32) - constants[node.input[3]].astype(np.float32)) * scale
        name = f"{node.input[1]}_float"
        graph.initializer.append(numpy_helper.from_array(weights.astype(np.float32), name))
        replaced[rescale.name] = helper.make_node("MatMul", [quantize.input[0], name], rescale.output)
        removed |= {quantize.name, node.name, cast.name, scales.name}
    nodes = [replaced.get(node.name, node) for node in graph.node if node.name not in removed]
    used = {name for node in nodes for name in node.input}
    tensors = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(tensors)
    onnx.checker.check_model(model)
    return model
