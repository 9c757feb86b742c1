"""Checkpoints with quantised weights are computed where something here can, else refused with the reason."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from worker.conftest import CONFIGS

from worker_service.config import WorkerConfig
from worker_service.errors import UnsupportedModelError
from worker_service.fused.packing import quantize
from worker_service.model import load_model

COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
    "ignore": ["lm_head"],
}


def load(folder, **options):
    settings = {"attention_backend": "reference", **options}
    return load_model(WorkerConfig(model=str(folder), **settings), lambda share, detail: None)


@pytest.fixture
def marked(tiny_model, tmp_path):
    """A model whose configuration says that its weights are quantised so."""

    def make(**settings):
        folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
        return folder

    return make


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"\(gptq\), on cpu: .*(optimum|gptqmodel|GPU)"),
        ({"quant_method": "awq", "bits": 4}, r"\(awq\), on cpu: .*(gptqmodel|accelerate)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"\(bitsandbytes\), on cpu: .*bitsandbytes"),
        ({"quant_method": "squeezed"}, "'squeezed', which transformers does not know"),
    ],
    ids=["gptq", "awq", "bitsandbytes", "unknown"],
)
def test_a_refusal_says_what_would_be_needed(marked, settings, needed):
    with pytest.raises(UnsupportedModelError, match=needed):
        load(marked(**settings))


def test_quantised_weights_are_not_quantised_again(marked):
    with pytest.raises(
        UnsupportedModelError, match=r"already \(gptq\): --quantization int8 needs plain ones"
    ):
        load(marked(quant_method="gptq", bits=4), quantization="int8")


def test_compressed_tensors_are_computed_as_what_they_stand_for(marked):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    folder = marked(**COMPRESSED)
    plain = load_file(folder / "model.safetensors")
    stored, meant = {}, {}
    for name, tensor in plain.items():
        if "_proj.weight" in name:
            whole, scales = quantize(tensor)
            stored[f"{name}_packed"] = helpers.pack_to_int32(whole, 8)
            stored[f"{name}_shape"] = torch.tensor(whole.shape)
            stored[f"{name}_scale"] = scales[:, None].contiguous()
            meant[name] = whole * scales[:, None]
        else:
            stored[name] = meant[name] = tensor
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})

    model = load(folder)
    assert model.decoder_name == "generic"
    expected = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.float32).eval()
    expected.load_state_dict(meant)
    tokens = torch.arange(3, 40)[None]
    model.module.set_attn_implementation("eager")
    with torch.inference_mode():
        torch.testing.assert_close(model.module(tokens).logits, expected(tokens).logits, atol=1e-4, rtol=1e-4)


def test_a_checkpoint_that_lacks_weights_is_refused(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UnsupportedModelError, match=r"lacks 1 of its weights: model.layers.1.mlp.up_proj.weight"
    ):
        load(folder)
