"""Models are loaded whole, described rightly, and refused with a reason where they can't be right."""

import json
import shutil

import pytest
import torch
import transformers
from worker.conftest import CONFIGS, MAX_MODEL_LEN, VOCAB_SIZE, WINDOW

import tidegate_kernels.reference
from worker_service import model_checks
from worker_service.config import WorkerConfig
from worker_service.errors import UnsupportedModelError
from worker_service.kv_memory import LayerShape
from worker_service.model import load_model

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}


def load(folder, progress=lambda share, detail: None, **options):
    settings = {"attention_backend": "reference", "decoder": "generic", **options}
    return load_model(WorkerConfig(model=str(folder), **settings), progress)


def save(config, folder):
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def test_layers_tell_their_shapes_and_windows(loaded):
    full, sliding = LayerShape(2, 16, None), LayerShape(2, 16, WINDOW)
    assert loaded("llama").layers == (full, full)
    assert loaded("mistral").layers == (sliding, sliding)
    assert loaded("gemma3").layers == (sliding, full)


def test_a_loaded_model_describes_itself(tiny_model):
    seen = []
    model = load(tiny_model("llama"), lambda share, detail: seen.append((share, detail)), dtype="bfloat16")
    assert model.name == tiny_model("llama").name
    assert (model.vocab_size, model.max_model_len) == (VOCAB_SIZE, MAX_MODEL_LEN)
    assert model.eos_token_ids == (2,)
    assert (model.dtype, model.backend_name) == (torch.bfloat16, "reference")
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert any(detail.startswith("loading weights") for _, detail in seen)


def test_the_fingerprint_tells_models_apart(tiny_model, loaded, tmp_path):
    same = load(shutil.copytree(tiny_model("llama"), tmp_path / "copy"))
    assert same.fingerprint == loaded("llama").fingerprint
    assert load(tiny_model("llama"), dtype="bfloat16").fingerprint != same.fingerprint
    assert loaded("qwen2").fingerprint != same.fingerprint


def test_eos_ids_come_from_both_configurations_and_exist(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    generation = json.loads((folder / "generation_config.json").read_text())
    generation["eos_token_id"] = [5, 9, VOCAB_SIZE + 1]
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert load(folder).eos_token_ids == (2, 5, 9)


def test_tokenizer_files_are_taken_as_they_are(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    assert load(folder).tokenizer.tokenizer_json == b""
    content = b'{"any": "bytes \xc3\xa9"}'
    (folder / "tokenizer.json").write_bytes(content)
    settings = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "pad_token": None,
        "chat_template": "in",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load(folder).tokenizer
    assert tokenizer.tokenizer_json == content
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.chat_template == "in"
    (folder / "chat_template.jinja").write_text("file")
    assert load(folder).tokenizer.chat_template == "file"


UNSUPPORTED = {
    "attention sinks": (
        transformers.GptOssConfig(**SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1),
        "s_aux",
    ),
    "ALiBi": (transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4), "exchangeable"),
    "state space": (
        transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1),
        "exchangeable",
    ),
    "chunked attention": (
        transformers.Llama4TextConfig(
            **SMALL, head_dim=8, attention_chunk_size=16, intermediate_size_mlp=32, num_local_experts=2
        ),
        "chunked_attention",
    ),
    "keys and values of different sizes": (
        transformers.DeepseekV3Config(
            **SMALL,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=4,
            n_routed_experts=2,
            num_experts_per_tok=1,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
        ),
        "keys of 8 and values of 4",
    ),
    "encoder-decoder": (
        transformers.T5Config(vocab_size=64, d_model=32, d_ff=32, num_layers=1, is_encoder_decoder=True),
        "encoder-decoder",
    ),
    "bidirectional": (
        transformers.Gemma2Config(**SMALL, head_dim=8, use_bidirectional_attention=True),
        "not causal",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_cannot_be_right_is_refused_with_a_reason(case, tmp_path):
    config, reason = UNSUPPORTED[case]
    if config.is_encoder_decoder:
        config.save_pretrained(tmp_path)
    else:
        save(config, tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        load(tmp_path)


def test_a_window_that_layers_do_not_tell_is_refused():
    config = CONFIGS["mistral"]()
    with pytest.raises(UnsupportedModelError, match="layer 1"):
        model_checks._check_windows(config, (LayerShape(2, 16, WINDOW), LayerShape(2, 16, None)))


@pytest.mark.parametrize(
    ("architecture", "wrong"),
    [
        ("mistral", {"window": None}),
        ("gemma2", {"softcap": None}),
        ("llama", {"scale": 0.3}),
    ],
)
def test_the_probe_finds_attention_that_computes_something_else(architecture, wrong, loaded):
    class FakeWrongBackend:
        write_kv = staticmethod(tidegate_kernels.reference.write_kv)

        @staticmethod
        def paged_attention(query, keys, values, batch, **terms):
            return tidegate_kernels.reference.paged_attention(
                query, keys, values, batch, **{**terms, **wrong}
            )

    model = loaded(architecture)
    probe = model_checks.make_probe(model.module, MAX_MODEL_LEN)
    with pytest.raises(UnsupportedModelError, match="differs"):
        probe.check(model.forward, model.layers, FakeWrongBackend(), 16)
    probe.check(model.forward, model.layers, tidegate_kernels.reference, 16)


@pytest.mark.parametrize("max_model_len", [1, 2, 5, 39])
def test_the_probe_fits_short_contexts(max_model_len, loaded):
    model = loaded("llama")
    probe = model_checks.make_probe(model.module, max_model_len)
    probe.check(model.forward, model.layers, tidegate_kernels.reference, 16)


@pytest.mark.parametrize(
    ("architecture", "options", "name"),
    [
        ("llama", {"decoder": "auto"}, "fused"),
        ("qwen3", {"decoder": "fused"}, "fused"),
        ("llama", {"decoder": "auto", "quantization": "int8"}, "fused"),
        ("llama", {"decoder": "generic"}, "generic"),
        ("llama", {"decoder": "auto", "dtype": "float16"}, "generic"),
        ("llama", {"decoder": "auto", "dtype": "float16", "quantization": "int8"}, "fused"),
        ("glm", {"decoder": "auto"}, "generic"),
    ],
)
def test_the_decoder_is_fused_where_it_can_be(architecture, options, name, tiny_model):
    assert load(tiny_model(architecture), **options).decoder_name == name


@pytest.mark.parametrize(
    ("architecture", "options", "why"),
    [
        ("glm", {"decoder": "fused"}, "GlmForCausalLM is not one of"),
        ("llama", {"decoder": "fused", "dtype": "float16"}, "are float16, and it packs float32 and bfloat16"),
        ("glm", {"decoder": "auto", "quantization": "int8"}, "GlmForCausalLM is not one of"),
        ("llama", {"decoder": "generic", "quantization": "int8"}, "needs --decoder fused"),
    ],
)
def test_a_decoder_that_cannot_be_is_refused(architecture, options, why, tiny_model):
    with pytest.raises(UnsupportedModelError, match=why):
        load(tiny_model(architecture), **options)


def with_rope(**parameters):
    return transformers.LlamaConfig(**SMALL, rope_parameters={"rope_theta": 10000.0, **parameters})


def test_max_model_len_stops_where_rope_would_change_with_the_batch():
    assert model_checks.longest_right_length(with_rope(rope_type="default")) == 64
    assert model_checks.longest_right_length(with_rope(rope_type="dynamic", factor=4.0)) == 64
    longrope = with_rope(
        rope_type="longrope",
        factor=2.0,
        short_factor=[1.0] * 4,
        long_factor=[2.0] * 4,
        original_max_position_embeddings=32,
    )
    assert model_checks.longest_right_length(longrope) == 32
    assert model_checks.resolve_max_model_len(longrope, None) == 32
    assert model_checks.resolve_max_model_len(longrope, 20) == 20
    with pytest.raises(UnsupportedModelError, match=r"33 is more than the 32 tokens"):
        model_checks.resolve_max_model_len(longrope, 33)


def test_missing_and_strange_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no model at"):
        load(tmp_path / "nothing")
    strange = tmp_path / "model.bin"
    strange.write_bytes(b"x")
    with pytest.raises(UnsupportedModelError, match=r"not a \.gguf"):
        load(strange)


def test_an_absent_hub_model_is_refused_offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(OSError, match="cache"):
        load("nobody/nothing", offline=True)


def test_cuda_is_refused_where_there_is_none(tiny_model):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(UnsupportedModelError, match="no CUDA device"):
        load(tiny_model("llama"), device="cuda")
