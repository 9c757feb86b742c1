"""Options come from flags, environment and file, in that order of weight, and are explained and checked."""

import pytest
from pydantic import ValidationError

from worker_service.config import WorkerConfig, load_config


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in WorkerConfig.model_fields:
        for prefix in ("TIDEGATE_", "TIDEGATE_WORKER_"):
            monkeypatch.delenv(f"{prefix}{name.upper()}", raising=False)


@pytest.mark.parametrize(
    ("name", "content"), [("w.yaml", "model: file\nport: 5\n"), ("w.toml", 'model = "file"\nport = 5\n')]
)
def test_flag_beats_environment_beats_file_beats_default(name, content, tmp_path, monkeypatch):
    file = tmp_path / name
    file.write_text(content)
    assert load_config(["--config", str(file)]).port == 5
    assert load_config(["--config", str(file)]).model == "file"
    assert load_config(["--config", str(file)]).block_size == 16
    monkeypatch.setenv("TIDEGATE_WORKER_PORT", "6")
    assert load_config(["--config", str(file)]).port == 6
    monkeypatch.setenv("TIDEGATE_WORKER_PORT", "7")
    assert load_config([f"--config={file}"]).port == 7
    assert load_config(["--config", str(file), "--port", "8"]).port == 8
    monkeypatch.setenv("TIDEGATE_WORKER_CONFIG", str(file))
    assert load_config([]).model == "file"


def test_variables_of_all_services_count_but_not_where_the_scheduler_is(monkeypatch):
    monkeypatch.setenv("TIDEGATE_MAX_NUM_SEQS", "3")
    for name, value in (("HOST", "10.0.0.1"), ("PORT", "50051"), ("CONFIG", "scheduler.yaml")):
        monkeypatch.setenv(f"TIDEGATE_{name}", value)
    config = load_config(["--model", "m"])
    assert (config.max_num_seqs, config.host, config.port) == (3, "127.0.0.1", 50061)
    monkeypatch.setenv("TIDEGATE_WORKER_MAX_NUM_SEQS", "4")
    assert load_config(["--model", "m"]).max_num_seqs == 4


def test_values_are_read_as_people_write_them():
    config = load_config(["--model", "owner/name", "--kv-memory", "2GiB", "--offline"])
    assert (config.kv_memory, config.offline, config.model_name) == (2 << 30, True, "name")
    assert load_config(["--model", "x", "--served-model-name", "y"]).model_name == "y"


def test_keywords_alone_read_nothing_else(monkeypatch):
    monkeypatch.setenv("TIDEGATE_WORKER_PORT", "7")
    assert WorkerConfig(model="m").port == 50061


@pytest.mark.parametrize(
    "arguments",
    [
        ["--block-size", "0"],
        ["--gpu-memory-utilization", "1.5"],
        ["--scheduler", "nowhere"],
        ["--scheduler", "host:99999"],
        ["--advertise-address", ":5"],
        ["--max-num-seqs", "many"],
        ["--device", "tpu"],
        ["--kv-memory", "2 parsecs"],
        ["--num-blocks", "1"],
    ],
)
def test_values_out_of_range_are_refused_by_name(arguments):
    with pytest.raises((ValidationError, SystemExit)) as caught:
        load_config(["--model", "m", *arguments])
    if isinstance(caught.value, ValidationError):
        assert caught.value.errors()[0]["loc"] == (arguments[0].removeprefix("--").replace("-", "_"),)
    else:
        assert caught.value.code == 2


def test_a_model_is_required():
    with pytest.raises(ValidationError, match="model"):
        load_config([])


def test_unknown_options_are_refused(tmp_path):
    with pytest.raises(SystemExit):
        load_config(["--model", "m", "--max-num-seq", "4"])
    file = tmp_path / "w.yaml"
    file.write_text("model: m\nmax_num_seq: 4\n")
    with pytest.raises(ValidationError, match="max_num_seq"):
        load_config(["--config", str(file)])
    with pytest.raises(FileNotFoundError, match="absent"):
        load_config(["--config", str(tmp_path / "absent.yaml")])


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in WorkerConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description is not None
        assert field.description in text


@pytest.mark.parametrize("size", [0, 12, 48, 512])
def test_a_block_size_that_is_no_power_of_two_up_to_256_is_refused(size):
    with pytest.raises(ValidationError, match=r"power of two|greater than or equal|less than or equal"):
        WorkerConfig(model="m", block_size=size)


@pytest.mark.parametrize("size", [1, 16, 256])
def test_powers_of_two_are_fine(size):
    assert WorkerConfig(model="m", block_size=size).block_size == size


@pytest.mark.parametrize("name", ["none", "int8"])
def test_quantization_is_taken_by_its_name(name, monkeypatch):
    assert load_config(["--model", "m", f"--quantization={name}"]).quantization == name
    monkeypatch.setenv("TIDEGATE_WORKER_QUANTIZATION", name)
    assert load_config(["--model", "m"]).quantization == name
