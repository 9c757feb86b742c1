"""A second start takes a model from its files and the record of the first, and notices what does not fit."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from worker.conftest import CONFIGS

from worker_service import cache, model_record
from worker_service.config import WorkerConfig
from worker_service.errors import UnsupportedModelError
from worker_service.model import load_model

QUICK = """
import sys
from worker_service.config import WorkerConfig
from worker_service.model import load_model
model = load_model(WorkerConfig(model=sys.argv[1], attention_backend="reference"), lambda share, detail: None)
print(model.fingerprint, model.module is None, "transformers" in sys.modules)
"""


@pytest.fixture(autouse=True)
def records(monkeypatch, tmp_path):
    """The folder of records, empty at first."""
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "records"


@pytest.fixture
def folder(tiny_model, tmp_path):
    """A model's folder that a test may change."""
    return shutil.copytree(tiny_model("llama"), tmp_path / "model")


def load(folder, progress=lambda share, detail: None, **options):
    return load_model(WorkerConfig(model=str(folder), attention_backend="reference", **options), progress)


def was_recorded(model) -> bool:
    """Whether it was made without transformers."""
    return model.module is None


def packed(model):
    """All that the fused decoder computes with."""
    decoder = model.forward._decoder
    matrices = [matrix for layer in decoder._layers for matrix in layer.matrices]
    norms = [layer.input_norm for layer in decoder._layers] + [layer.key_norm for layer in decoder._layers]
    decoder._rotary.addresses(100)
    tensors = [
        t for matrix in (*matrices, decoder._logits) for t in (matrix.panels, matrix.scales, matrix.bias)
    ]
    tensors += [
        *norms,
        decoder._final_norm,
        decoder._embedding,
        decoder._rotary._cosines,
        decoder._rotary._sines,
    ]
    return [t.view(torch.uint8) if t.dtype == torch.bfloat16 else t for t in tensors if t is not None]


def description(model):
    return {
        name: getattr(model, name)
        for name in (
            *("name", "decoder_name", "device", "dtype", "backend_name", "layers", "vocab_size"),
            *("max_model_len", "eos_token_ids", "fingerprint", "tokenizer"),
        )
    }


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}),
        ("llama", {"dtype": "bfloat16"}),
        ("llama", {"quantization": "int8", "max_model_len": 30}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_a_second_start_has_the_same_model(architecture, options, tiny_model):
    first, second = (load(tiny_model(architecture), **options) for _ in range(2))
    assert (was_recorded(first), was_recorded(second)) == (False, True)
    assert description(second) == description(first)
    expected, found = packed(first), packed(second)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_second_start_reads_shards_and_shared_embeddings(tmp_path):
    config = CONFIGS["llama"](tie_word_embeddings=True)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    first, second = (load(tmp_path / "sharded") for _ in range(2))
    assert was_recorded(second)
    assert description(second) == description(first)
    assert all(torch.equal(a, b) for a, b in zip(packed(first), packed(second), strict=True))


def test_a_second_start_imports_no_transformers_and_tells_how_far_it_is(folder):
    fingerprint = load(folder).fingerprint
    told = subprocess.run(
        [sys.executable, "-c", QUICK, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.split() == [fingerprint, "True", "False"]
    seen = []
    load(folder, lambda share, detail: seen.append((share, detail)))
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert sum(detail.startswith("packing weights") for _, detail in seen) > 2


def change_mtime(folder):
    os.utime(folder / "model.safetensors", ns=(1, 1))


def change_configuration(folder):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 0.5}))


def add_eos(folder):
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [2, 7]}))


@pytest.mark.parametrize("change", [change_mtime, change_configuration, add_eos])
def test_a_record_holds_for_the_files_that_it_was_made_of(change, folder):
    load(folder)
    change(folder)
    again = load(folder)
    assert not was_recorded(again)
    assert again.eos_token_ids == ((2, 7) if change is add_eos else (2,))


def test_an_adapter_beside_the_weights_is_left_to_transformers(folder):
    before = model_record.record_file(WorkerConfig(model=str(folder)), folder)
    (folder / "adapter_config.json").write_text("{}")
    assert model_record.record_file(WorkerConfig(model=str(folder)), folder) != before


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"max_model_len": 50}])
def test_a_record_holds_for_the_options_that_it_was_made_with(options, folder):
    load(folder)
    assert not was_recorded(load(folder, **options))
    assert was_recorded(load(folder, **options))
    assert was_recorded(load(folder, block_size=8))


def test_weights_that_answer_otherwise_are_asked_of_transformers(folder, caplog):
    first = load(folder)
    path = folder / "model.safetensors"
    before = path.stat()
    other = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight.mul_(-1)
    other.save_pretrained(folder)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    with caplog.at_level(logging.WARNING):
        again = load(folder)
    assert "not as recorded" in caplog.text
    assert not was_recorded(again)
    assert again.fingerprint == first.fingerprint
    assert was_recorded(load(folder))  # that is recorded in its turn


def test_a_checkpoint_that_became_incomplete_is_refused_as_ever(folder):
    load(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    kept = {k: v for k, v in model.state_dict().items() if "layers.1.mlp.up_proj" not in k}
    model.save_pretrained(folder, state_dict=kept)
    with pytest.raises(UnsupportedModelError, match=r"lacks 1 of its weights: .*up_proj"):
        load(folder)


@pytest.mark.parametrize(
    "damage", [lambda b: b"", lambda b: b[:-20], lambda b: b.replace(b'"vocab_size":1', b'"vocab_size":2')]
)
def test_a_damaged_record_is_made_anew(damage, folder, records):
    vocab_size = load(folder).vocab_size
    (path,) = records.iterdir()
    whole = path.read_bytes()
    assert damage(whole) != whole
    path.write_bytes(damage(whole))
    again = load(folder)
    assert (was_recorded(again), again.vocab_size) == (False, vocab_size)
    assert path.read_bytes() == whole
    assert was_recorded(load(folder))


def test_nothing_is_recorded_of_models_that_need_transformers(tiny_model, records):
    load(tiny_model("llama"), decoder="generic")
    load(tiny_model("glm"))
    assert not records.exists()


def test_nothing_is_recorded_of_weights_that_transformers_renames(tmp_path, records):
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"](tie_word_embeddings=True))
    model.model.save_pretrained(tmp_path / "base")  # its tensors' names lack "model."
    for _ in range(2):
        loaded = load(tmp_path / "base")
        assert (loaded.decoder_name, was_recorded(loaded)) == ("fused", False)
    assert not records.exists()


def test_a_cache_that_cannot_be_written_is_no_obstacle(folder, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.INFO):
        load(folder)
    assert "no record is kept" in caplog.text


def test_only_the_newest_records_are_kept(folder, records, monkeypatch):
    load(folder)
    (path,) = records.iterdir()
    record = model_record.read_record(path)
    path.unlink()
    monkeypatch.setattr(model_record, "_MOST_RECORDS", 3)
    for index in range(5):
        model_record.keep_record(records / f"{index}.json", record)
        os.utime(records / f"{index}.json", (1e9 + index, 1e9 + index))
    assert sorted(file.name for file in records.iterdir()) == ["2.json", "3.json", "4.json"]


def as_pipe(path):
    path.unlink()
    os.mkfifo(path)


def as_device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def as_another_users(path):
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    os.chown(path, 65_534, -1)


@pytest.mark.parametrize("replace", [as_pipe, as_device, as_another_users])
def test_what_is_no_record_of_this_user_is_not_read(replace, folder, records):
    load(folder)
    (path,) = records.iterdir()
    replace(path)
    assert not was_recorded(load(folder))
    assert was_recorded(load(folder))  # it was replaced in its turn
    assert path.stat().st_uid == os.geteuid()


def test_a_full_disk_is_no_obstacle(folder, records):
    """Files of this process may have no more bytes than some, as on a disk that fills up."""
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n" + QUICK
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(folder)]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split()[1:] == ["False", "True"]
    assert list(records.iterdir()) == []


def test_a_user_without_a_home_needs_none(monkeypatch):
    told = cache.cache_folder()
    monkeypatch.setattr("worker_service.cache.Path.home", raise_no_home)
    assert cache.cache_folder() == told
    monkeypatch.delenv("TIDEGATE_CACHE")
    assert cache.cache_folder() == Path("/.cache/tidegate")


def raise_no_home():
    raise RuntimeError("Could not determine home directory.")


@pytest.fixture
def read_only_sources(monkeypatch, tmp_path):
    """As where somebody else installed the worker. Gives the place of temporary files."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    writable = cache._writable
    monkeypatch.setattr(cache, "_writable", lambda path: path not in cache._sources() and writable(path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    yield tmp_path / "temporary"
    os.environ.pop("NUMBA_CACHE_DIR", None)


def test_compiled_code_has_a_place_beside_records_where_sources_cannot_be_written(
    read_only_sources, tmp_path
):
    cache.place_compiled_code()
    assert os.environ["NUMBA_CACHE_DIR"] == str(tmp_path / "cache" / "compiled")
    assert (tmp_path / "cache" / "compiled").stat().st_mode & 0o777 == 0o700


def test_compiled_code_is_not_shared_with_who_could_change_it(read_only_sources, tmp_path):
    (tmp_path / "cache" / "compiled").mkdir(parents=True)
    (tmp_path / "cache" / "compiled").chmod(0o777)
    cache.place_compiled_code()
    assert os.environ["NUMBA_CACHE_DIR"] == str(read_only_sources / f"tidegate-compiled-{os.geteuid()}")
    os.environ.pop("NUMBA_CACHE_DIR")
    (read_only_sources / f"tidegate-compiled-{os.geteuid()}").chmod(0o777)
    with pytest.raises(PermissionError, match=r"no place for compiled code: .*Set TIDEGATE_CACHE"):
        cache.place_compiled_code()


def test_compiled_code_stays_beside_the_sources_where_it_can(monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    cache.place_compiled_code()
    assert "NUMBA_CACHE_DIR" not in os.environ
