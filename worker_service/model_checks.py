"""Owns the refusals: which models can't be served rightly, told from their configuration and by running them.

The last check, `probe.py`, compares the model's paged forward with its own plain one, so that what no rule
foresaw (state between tokens, an unusual mask) is still found before a request meets it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from worker_service import attention
from worker_service.attention import ATTENTION_NAME, AttentionStep, RecordingStep
from worker_service.checkpoint import stored_shapes, stored_types
from worker_service.errors import UnsupportedModelError
from worker_service.kv_memory import LayerShape
from worker_service.logs import log_event
from worker_service.probe import Probe

AttentionInterface.register(ATTENTION_NAME, attention.attend)  # models are made with this name

_LOGGER = logging.getLogger(__name__)
_WHOLE_NUMBERS = ("I", "U", "BOOL")  # how the names of such types begin in safetensors files
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_PROBE_LENGTHS = (40, 23)  # tokens of two sequences in one batch
_ROWS_AT_ONCE = 2048  # of a matrix that is widened, so that the copy stays small


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turns whatever transformers raises over a model's files into UnsupportedModelError that begins `what`.

    Each of its checks has an exception of its own, and what it does not check fails anywhere in its code.
    """
    try:
        yield
    except (UnsupportedModelError, OSError):
        raise
    except Exception as error:
        told = " ".join(str(error).split())
        raise UnsupportedModelError(f"{what}: {type(error).__name__}: {told}") from error


def check_shapes(config: PretrainedConfig, folder: Path) -> None:
    """Refuses weights of other shapes than the configuration gives them, which transformers tells in its log.

    Raises UnsupportedModelError.
    """
    stored = stored_shapes(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    wrong = [
        f"{name} is {list(stored[name])}, not {list(weight.shape)}"
        for name, weight in model.named_parameters()
        if name in stored and stored[name] != tuple(weight.shape)
    ]
    if wrong:
        shown = ", ".join(wrong[:2]) + (", ..." if len(wrong) > 2 else "")
        raise UnsupportedModelError(
            f"{len(wrong)} weights in its files have other shapes than its config.json tells: {shown}. "
            "Files of two models may be mixed"
        )


def check_types(model: PreTrainedModel, folder: Path) -> None:
    """Refuses weights that are whole numbers in the files, of which transformers makes others without a word.

    Raises UnsupportedModelError.
    """
    stored = stored_types(folder)
    whole = [name for name, _ in model.named_parameters() if stored.get(name, "").startswith(_WHOLE_NUMBERS)]
    if whole:
        raise UnsupportedModelError(
            f"{len(whole)} weights in its files are whole numbers, and its config.json tells no "
            f"quantization: {whole[0]} is {stored[whole[0]]}"
        )


def check_config(config: PretrainedConfig) -> None:
    """Refuses, before any weight is read, what the configuration tells. Raises UnsupportedModelError."""
    text = config.get_text_config()
    if getattr(text, "num_hidden_layers", 1) < 1:
        raise UnsupportedModelError(f"its config.json tells {text.num_hidden_layers} layers")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if config.is_encoder_decoder:
        raise UnsupportedModelError("it is an encoder-decoder model; only decoders are served")
    if model_class is None:
        raise UnsupportedModelError(
            f"transformers knows no causal language model for {type(config).__name__}"
        )
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModelError(f"{model_class.__name__} has no exchangeable attention in transformers")
    layer_types = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if layer_types:
        raise UnsupportedModelError(f"it has layers of type {', '.join(sorted(layer_types))}")
    if getattr(text, "use_bidirectional_attention", False) or not getattr(text, "is_causal", True):
        raise UnsupportedModelError("its attention is not causal")
    if getattr(text, "attention_chunk_size", None):
        raise UnsupportedModelError("its attention is chunked")


def check_loaded(report: dict[str, Any]) -> None:
    """Refuses a checkpoint that lacks weights: transformers makes those up, and only logs it.

    Those that the model has no place for are told in the log. `report` is its loading info. Raises
    UnsupportedModelError.
    """
    unused = sorted(report["unexpected_keys"])
    if unused:
        event = "the model has no place for some of the weights in its files"
        log_event(_LOGGER, logging.WARNING, event, count=len(unused), first=unused[0])
    lacking = sorted(report["missing_keys"])
    if lacking:
        shown = ", ".join(lacking[:3]) + (", ..." if len(lacking) > 3 else "")
        raise UnsupportedModelError(f"its checkpoint lacks {len(lacking)} of its weights: {shown}")


def longest_right_length(config: PretrainedConfig) -> int | None:
    """Tokens up to which positions mean the same for every request of a batch; None: the model sets no limit.

    Two kinds of RoPE change their frequencies with the longest sequence of a batch: "dynamic" beyond
    max_position_embeddings, "longrope" beyond original_max_position_embeddings. Below that they are constant.
    """
    text = config.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    groups = [rope] if "rope_type" in rope else [group for group in rope.values() if isinstance(group, dict)]
    for group in groups:
        original = group.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        if group.get("rope_type") == "longrope" and original:
            limit = min(limit or original, original)
    return limit


def resolve_max_model_len(config: PretrainedConfig, requested: int | None) -> int:
    """Most tokens of a request. Raises UnsupportedModelError for more than the model can have."""
    limit = longest_right_length(config)
    if limit is not None and limit < 1:
        raise UnsupportedModelError(f"its config.json tells a longest context of {limit} tokens")
    if requested is None and limit is None:
        raise UnsupportedModelError("its configuration tells no longest context: set --max-model-len")
    if requested is not None and limit is not None and requested > limit:
        raise UnsupportedModelError(
            f"--max-model-len {requested} is more than the {limit} tokens that it computes rightly in a batch"
        )
    return requested or limit or 0


def record_layers(model: PreTrainedModel) -> tuple[tuple[LayerShape, ...], int]:
    """Shapes of the model's layers and the width of its logits, learned from one forward.

    Raises UnsupportedModelError for attention that no backend computes.
    """
    step = RecordingStep()
    logits = _forward(model, step, torch.zeros(2, dtype=torch.int64), torch.arange(2))
    expected = model.config.get_text_config().num_hidden_layers
    if sorted(step.shapes) != list(range(expected)):
        raise UnsupportedModelError(
            f"only layers {sorted(step.shapes)} of its {expected} use exchangeable attention"
        )
    shapes = tuple(step.shapes[i] for i in range(expected))
    _check_windows(model.config.get_text_config(), shapes)
    return shapes, logits.shape[-1]


def _check_windows(text: Any, shapes: tuple[LayerShape, ...]) -> None:
    """The layers must have told the windows that the configuration promises."""
    layer_types = getattr(text, "layer_types", None)
    if layer_types is None:
        window = getattr(text, "sliding_window", None)
        layer_types = ["sliding_attention" if window else "full_attention"] * len(shapes)
    for index, (kind, shape) in enumerate(zip(layer_types, shapes, strict=True)):
        if (kind == "sliding_attention") != (shape.window is not None):
            raise UnsupportedModelError(
                f"layer {index} is {kind}, but gave attention the window {shape.window}"
            )


def embedding_rows(model: PreTrainedModel) -> int:
    """Number of token ids that the model takes."""
    rows: int = model.get_input_embeddings().weight.shape[0]  # type: ignore[index, assignment]
    return rows


def make_probe(model: PreTrainedModel, max_model_len: int) -> Probe:
    """Asks the model's own forward what a paged one must give."""
    lengths = [min(length, max_model_len) for length in _PROBE_LENGTHS]
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(embedding_rows(model), (length,), generator=generator) for length in lengths]
    model.set_attn_implementation("eager")
    try:
        plain = [_forward(model, None, s, torch.arange(len(s)))[-1] for s in sequences]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return Probe(sequences, torch.stack(plain).float(), model.dtype, model.device)


class _FloatProducts(TorchFunctionMode):
    """Linear layers of 16-bit weights computed in fp32, some rows of a matrix at a time.

    Without AVX-512 torch multiplies bf16 some 30 times slower: most of a small model's start.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Does as `func` does, but for linear layers."""
        if func is not functional.linear or args[0].element_size() != 2 or args[1].dtype != args[0].dtype:
            return func(*args, **(kwargs or {}))
        x, weight = args[:2]
        bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
        wide = x.float()
        product = torch.cat([func(wide, rows.float()) for rows in weight.split(_ROWS_AT_ONCE)], dim=-1)
        return (product if bias is None else product + bias).to(x.dtype)


@torch.inference_mode()
def _forward(model: PreTrainedModel, step: AttentionStep | None, tokens: Tensor, positions: Tensor) -> Tensor:
    """Logits of a flat batch: `[T]`, `[T]` -> `[T, V]`. With no step, the model attends by itself."""
    inputs = {"input_ids": tokens[None].to(model.device), "position_ids": positions[None].to(model.device)}
    with contextlib.ExitStack() as settings:
        if step is not None:
            settings.enter_context(attention.use(step))
        if model.device.type == "cpu":
            settings.enter_context(_FloatProducts())
        logits: Tensor = model(**inputs, use_cache=False).logits[0]
    return logits
