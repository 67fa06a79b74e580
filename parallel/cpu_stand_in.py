"""Stand-in for the CUDA calls that megatron-core makes, so that it runs on CPU with gloo.

`install()` must run before megatron.core is imported. It does nothing where a CUDA device is present. It
changes torch for the whole process: use it in trainer processes only, never beside an inference engine.
Only what dense models and their checkpoints need is replaced; each replacement says why.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
_installed = False


def install() -> bool:
    """Patch torch and megatron-core once; True where the stand-in is active."""
    global _installed
    if torch.cuda.is_available():
        return False
    if not _installed:
        _installed = True
        _provide_weight_gradients()
        _patch_device_calls()
        _patch_factories()
        _patch_type_names()
        _patch_rng()
        _patch_adam_step()
    return True


class _Stream:
    """A stream that is always idle: CPU work is done when its call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _provide_weight_gradients() -> None:
    # Apex's kernel that adds a weight gradient to the gradient buffer within the matrix product. Without it
    # every gradient is written, then read and added: two more passes over all parameters per micro-batch.
    def accumulate(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.addmm_(grad_output.t().to(main_grad.dtype), inputs.to(main_grad.dtype))

    kernels: Any = types.ModuleType("fused_weight_gradient_mlp_cuda")
    kernels.wgrad_gemm_accum_fp32 = accumulate
    sys.modules.setdefault(kernels.__name__, kernels)


def _patch_device_calls() -> None:
    cuda: Any = torch.cuda
    # megatron-core only uses the current device as `device=...`.
    cuda.current_device = lambda: _CPU
    # Schedules, p2p and gradient buffers synchronise around communication.
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    stream = _Stream()
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    cuda.Stream = _Stream
    # The loss and gradient scalers and the embedding all-reduce move tensors to the device.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _patch_factories() -> None:
    # Literal device="cuda" in schedules, optimizers, clipping and checkpoints; pinned memory needs a device.
    for name in ("tensor", "zeros", "empty", "empty_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapped


def _patch_type_names() -> None:
    # The optimizers sort parameters and the clipping checks gradients by the name torch.cuda.FloatTensor.
    original: Callable[..., Any] = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]


def _patch_rng() -> None:
    # The "device" generator is the CPU's; torch's own setter waits for a CUDA start that never comes.
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    cuda: Any = torch.cuda
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    # fork() warns each time that the CPU generator moved; here it is meant to.
    logging.getLogger(random.__name__).addFilter(
        lambda record: "changed within GPU RNG context" not in record.getMessage()
    )


def _patch_adam_step() -> None:
    # torch's Adam keeps `step` in the state of each parameter, `fully_reshardable` checkpoints keep it in the
    # parameter group: without the key the load of a distributed optimizer raises KeyError.
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(original)
    def with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        group, index = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        return original(self, model_param, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step
