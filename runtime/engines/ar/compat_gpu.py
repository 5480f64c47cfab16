"""The mixins of compat_runner.py in vLLM's V1 model runner for GPUs. Imported only where a stage has a GPU."""

from __future__ import annotations

from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from runtime.engines.ar.compat_runner import HiddenTap, RowInputs


class TappedGPUModelRunner(HiddenTap, GPUModelRunner):
    """The V1 runner on a GPU, with hidden states out."""


class FedGPUModelRunner(RowInputs, GPUModelRunner):
    """The V1 runner on a GPU, with rows in."""


class TappedGPUWorker(gpu_worker.Worker):
    def _make_model_runner(self) -> GPUModelRunner:
        return TappedGPUModelRunner(self.vllm_config, self.device)


class FedGPUWorker(gpu_worker.Worker):
    def _make_model_runner(self) -> GPUModelRunner:
        return FedGPUModelRunner(self.vllm_config, self.device)
