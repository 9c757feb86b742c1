"""Model folders that are damaged, incomplete or contradict themselves are refused by name, known or not."""

import json
import logging
import os
import shutil
import struct

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from worker.conftest import CONFIGS

from worker_service.config import WorkerConfig
from worker_service.errors import UnsupportedModelError
from worker_service.model import load_model
from worker_service.model_files import find_files

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def _cold(monkeypatch, tmp_path):
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tiny_model, tmp_path):
    return shutil.copytree(tiny_model("llama"), tmp_path / "model")


@pytest.fixture
def shards(tmp_path):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.float32)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    return tmp_path / "sharded"


def load(folder, **options):
    config = WorkerConfig(model=str(folder), attention_backend="reference", **options)
    return load_model(config, lambda share, detail: None)


def refusal(folder) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        load(folder)
    return str(caught.value)


def configure(folder, **settings):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def edit_header(folder, name, **settings):
    """Changes what the header tells of a tensor, and nothing behind it."""
    whole = (folder / WEIGHTS).read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + size])
    header[name] |= settings
    told = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(told)) + told + whole[8 + size :])


CUTS = {
    "one byte is missing": (
        lambda b: b[:-1],
        r"model\.safetensors has [\d,]+ of [\d,]+ bytes\. Fetch it again",
    ),
    "one byte too many": (lambda b: b + b"x", r"model\.safetensors \([\d,]+ bytes\) is damaged"),
    "empty": (lambda b: b"", r"model\.safetensors \(0 bytes\) is damaged"),
    "noise": (lambda b: b"\xa5" * 5000, r"\(5,000 bytes\) is damaged: .*header too large"),
    "a header longer than the file": (lambda b: struct.pack("<Q", 99_000_000) + b[8:], "is damaged"),
    "a pointer of Git": (lambda b: b"version https://git-lfs.github.com/spec/v1\noid", "run `git lfs pull`"),
}


@pytest.mark.parametrize("known", [False, True], ids=["first start", "later start"])
@pytest.mark.parametrize("case", CUTS)
def test_a_damaged_file_of_weights_is_named(case, known, folder):
    damage, told = CUTS[case]
    if known:
        load(folder)
    path = folder / WEIGHTS
    before = path.stat()
    path.write_bytes(damage(path.read_bytes()))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UnsupportedModelError, match=told):
        load(folder)


def test_what_is_cut_short_is_told_in_bytes(folder):
    size = (folder / WEIGHTS).stat().st_size
    os.truncate(folder / WEIGHTS, size - 1234)
    assert f"has {size - 1234:,} of {size:,} bytes" in refusal(folder)


def test_a_header_that_contradicts_itself_is_refused(folder):
    edit_header(folder, UP, data_offsets=[0, 64])
    assert "model.safetensors" in refusal(folder)


def test_whole_numbers_where_weights_should_be_are_refused(folder):
    edit_header(folder, UP, dtype="I32")
    assert refusal(folder).endswith(f"its config.json tells no quantization: {UP} is I32")


def test_weights_that_are_no_numbers_are_told_from_a_wrong_forward(folder):
    tensors = load_file(folder / WEIGHTS)
    tensors[UP][3, 3] = float("nan")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    assert "NaN or infinite: weights are damaged, or too large for float32" in refusal(folder)


def test_missing_shards_are_named(shards):
    names = sorted(path.name for path in shards.glob("*.safetensors"))
    (shards / names[1]).unlink()
    assert refusal(shards).startswith(
        f"1 of the {len(names)} files that its {INDEX} names are missing: {names[1]}"
    )


@pytest.mark.parametrize("content", ["{ nope", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_refused(content, shards):
    (shards / INDEX).write_text(content)
    assert f"{INDEX} can't be read" in refusal(shards)


def test_an_index_stays_within_its_folder(shards):
    (shards / INDEX).write_text('{"weight_map": {"lm_head.weight": "../model/model.safetensors"}}')
    assert "outside of the folder" in refusal(shards)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"vocab_size": 9999}, r"^2 weights .*model\.embed_tokens\.weight is \[199, 64\], not \[9999, 64\]"),
        ({"vocab_size": 10**12}, r"not \[1000000000000, 64\]"),  # and nobody allocates that
        ({"intermediate_size": 97}, r"is \[96, 64\], not \[97, 64\]"),
        ({"num_hidden_layers": 3}, "lacks 9 of its weights"),
        ({"num_hidden_layers": 0}, "tells 0 layers"),
        ({"num_key_value_heads": 0}, "can't make it: ZeroDivisionError"),
        ({"max_position_embeddings": 0}, "a longest context of 0 tokens"),
        ({"max_position_embeddings": -1}, "a longest context of -1 tokens"),
        ({"hidden_size": "64"}, "configuration can't be used: .*'hidden_size' expected int"),
        ({"hidden_act": "nonesuch"}, "can't make it: KeyError: 'nonesuch'"),
        ({"rope_parameters": {"rope_type": "nonesuch", "rope_theta": 1.0}}, "can't make it: .*nonesuch"),
        ({"model_type": "nonesuch"}, "configuration can't be used: .*`nonesuch`"),
        ({"dtype": "nonesuch"}, "configuration can't be used: .*nonesuch"),
    ],
)
def test_a_configuration_that_lies_is_refused_with_numbers(settings, told, folder):
    configure(folder, **settings)
    with pytest.raises(UnsupportedModelError, match=told):
        load(folder)


def test_weights_without_a_place_are_told_in_the_log(folder, caplog):
    configure(folder, num_hidden_layers=1)
    with caplog.at_level(logging.WARNING):
        load(folder)
    (told,) = [record.fields for record in caplog.records if "no place" in record.message]
    assert told == {"count": 9, "first": "model.layers.1.input_layernorm.weight"}


def test_code_in_a_folder_is_neither_run_nor_asked_about(folder, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *prompt: pytest.fail("somebody is asked"))
    monkeypatch.setattr("transformers.dynamic_module_utils.signal.signal", lambda *a: pytest.fail("asked"))
    (folder / "own.py").write_text("raise SystemExit('the code of the folder ran')\n")
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    configure(folder, model_type="own", auto_map=classes)
    assert "contains custom code" in refusal(folder)


def test_a_folder_without_configuration_is_no_model(folder):
    (folder / "config.json").unlink()
    with pytest.raises(UnsupportedModelError, match=r"has no config\.json, so it is no model's folder$"):
        find_files(WorkerConfig(model=str(folder)))
    (folder / "some.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModelError, match=r"give its own path, such as .*/model/some\.gguf$"):
        find_files(WorkerConfig(model=str(folder)))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", r"m\.gguf \(0 bytes\) does not begin as GGUF files do"),
        (b"version https://git-lfs.github.com", "run `git lfs pull`"),
        (b"GGUF" + bytes(60), "configuration can't be used"),
    ],
)
def test_a_damaged_gguf_file_is_refused(content, told, tmp_path):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=told):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize(("found", "ids"), [([-1, 2], (2,)), (None, (2,))])
def test_ids_that_are_none_end_no_text(found, ids, folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": found}))
    assert load(folder).eos_token_ids == ids


def test_an_end_of_text_that_is_no_id_is_refused(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    assert refusal(folder) == "its eos_token_id is '</s>', neither an id nor a list of ids"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("tokenizer_config.json", b"{ nope", "tokenizer_config.json is no JSON"),
        ("tokenizer_config.json", b"[]", "is a JSON list, not an object"),
        ("tokenizer_config.json", b'{"eos_token": {"id": 3}}', "no text for eos_token, but {'id': 3}"),
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja is not UTF-8"),
    ],
)
def test_files_of_the_tokenizer_are_refused_by_name(name, content, told, folder):
    (folder / "tokenizer.json").write_text("{}")
    (folder / name).write_bytes(content)
    assert told in refusal(folder)


def test_a_tokenizer_that_cannot_be_converted_is_refused(folder):
    (folder / "tokenizer.model").write_bytes(b"\xa5" * 300)
    assert "can't be converted to a tokenizer.json" in refusal(folder)


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"quant_method": "gptq"}, r"\(gptq\), on cpu: .*'bits'"), ({}, "quant_method")],
)
def test_settings_of_a_quantisation_that_lack_something_are_refused(settings, told, folder):
    configure(folder, quantization_config=settings)
    with pytest.raises(UnsupportedModelError, match=told):
        load(folder)
