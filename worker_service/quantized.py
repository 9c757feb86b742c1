"""Owns what is asked of a checkpoint with quantised weights: that something here can compute with them.

transformers' quantizers load such checkpoints and bring the kernels. They say by themselves what they need;
this turns it into a refusal at start. Knows nothing of the worker's own int8, which needs plain weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.quantizers.auto import AutoHfQuantizer

from worker_service.errors import UnsupportedModelError


def quantization_method(config: PretrainedConfig) -> str | None:
    """The name of the method, such as "gptq"; None where weights are plain."""
    settings = _settings(config)
    if settings is None:
        return None
    method = settings.get("quant_method")
    return str(getattr(method, "value", method))


def check_quantized(config: PretrainedConfig, device: torch.device, quantization: str) -> None:
    """Raises UnsupportedModelError for what can't be loaded or computed here, with what would be needed.

    `quantization` is the worker's own, which needs plain weights.
    """
    settings, method = _settings(config), quantization_method(config)
    if settings is None:
        return
    if quantization != "none":
        raise UnsupportedModelError(
            f"its weights are quantised already ({method}): --quantization {quantization} needs plain ones"
        )
    with refusals(config, device):
        if not AutoHfQuantizer.supports_quant_method(settings):  # type: ignore[no-untyped-call]
            raise UnsupportedModelError(
                f"its weights are quantised by {method!r}, which transformers does not know"
            )
        quantizer = AutoHfQuantizer.from_config(dict(settings), pre_quantized=True)
        quantizer.validate_environment(device_map={"": str(device)}, weights_only=True)


@contextlib.contextmanager
def refusals(config: PretrainedConfig, device: torch.device) -> Iterator[None]:
    """Turns what quantizers raise, where something is missing, into UnsupportedModelError."""
    method = quantization_method(config)
    try:
        yield
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        if method is None:
            raise
        told = " ".join(str(error).split())
        raise UnsupportedModelError(
            f"its weights are quantised ({method}), on {device.type}: {told}"
        ) from error


def _settings(config: PretrainedConfig) -> dict[str, Any] | None:
    """The checkpoint's own words on how it is quantised."""
    for place in (config, config.get_text_config()):
        found = getattr(place, "quantization_config", None)
        if found is not None:
            settings: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
            return settings
    return None
