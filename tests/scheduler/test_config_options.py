from __future__ import annotations

import os

import pytest

from scheduler_service.config import ServiceConfig, load_config
from scheduler_service.option_sources import PRESETS, ConfigError


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("TIDEGATE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def yaml_file(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text("max_num_seqs: 30\nmax-num-batched-tokens: 300\nworker: [a:1, 'b:2']\n")
    return path


def test_defaults():
    config = load_config([])
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (2048, 256)
    assert (config.pipeline_depth, config.enable_prefix_caching) == (2, True)
    assert (config.max_num_queued_reqs, config.max_num_queued_tokens) == (None, None)
    assert config.scheduling_policy == "fcfs"
    assert config.worker == ()


def test_flags_win_over_environment_over_file_over_preset(monkeypatch, yaml_file):
    preset = ["--preset", "concurrency"]
    assert load_config(preset).max_num_seqs == 256
    from_file = load_config([*preset, "--config", str(yaml_file)])
    assert (from_file.max_num_seqs, from_file.max_num_batched_tokens) == (30, 300)
    assert (from_file.max_num_queued_reqs, from_file.scheduling_policy) == (512, "priority")
    monkeypatch.setenv("TIDEGATE_MAX_NUM_SEQS", "40")
    assert load_config(["--config", str(yaml_file)]).max_num_seqs == 40
    assert load_config(["--config", str(yaml_file), "--max-num-seqs", "50"]).max_num_seqs == 50


def test_presets_are_the_values_from_practice():
    assert set(PRESETS) == {"concurrency", "long-context"}
    concurrency = load_config(["--preset=concurrency"])
    assert (concurrency.max_num_batched_tokens, concurrency.max_num_seqs) == (16384, 256)
    assert (concurrency.max_num_queued_reqs, concurrency.scheduling_policy) == (512, "priority")
    long_context = load_config(["--preset=long-context"])
    assert (long_context.max_num_batched_tokens, long_context.max_num_seqs) == (4096, 64)
    assert long_context.long_prefill_token_threshold == 8192


def test_preset_and_file_can_come_from_the_environment_and_the_preset_from_the_file(monkeypatch, tmp_path):
    path = tmp_path / "options.toml"
    path.write_text('preset = "long-context"\nport = 0\n')
    monkeypatch.setenv("TIDEGATE_CONFIG", str(path))
    config = load_config([])
    assert (config.max_num_seqs, config.port) == (64, 0)
    monkeypatch.setenv("TIDEGATE_PRESET", "concurrency")
    assert load_config([]).max_num_seqs == 256


def test_workers_can_be_repeated_or_listed(monkeypatch, yaml_file):
    flags = ["--worker", "a:1", "--worker", "b:2,[::1]:3"]
    assert load_config(flags).worker == ("a:1", "b:2", "[::1]:3")
    assert load_config(["--config", str(yaml_file)]).worker == ("a:1", "b:2")
    monkeypatch.setenv("TIDEGATE_WORKER", "c:1, d:2")
    assert load_config([]).worker == ("c:1", "d:2")


def test_flags_may_be_spelt_with_underscores():
    assert load_config(["--max_num_seqs", "7"]).max_num_seqs == 7
    assert load_config(["--max_num_seqs=8"]).max_num_seqs == 8


def test_switches():
    assert not load_config(["--no-enable-prefix-caching"]).enable_prefix_caching
    assert load_config(["--insecure", "--host", "0.0.0.0"]).host == "0.0.0.0"


def test_empty_variables_count_as_unset(monkeypatch):
    monkeypatch.setenv("TIDEGATE_MAX_NUM_QUEUED_REQS", "")
    assert load_config([]).max_num_queued_reqs is None


def test_weights_of_tenants_are_given_by_name():
    core = load_config(["--tenant-weights", "gold=3,basic=0.5", "--scheduling-policy", "fair"]).to_core()
    assert (core.policy, core.tenant_weights) == ("fair", {"gold": 3.0, "basic": 0.5})


@pytest.mark.parametrize("weights", ["gold=0", "gold", "=1", "gold=-1", "gold=much", "gold=inf"])
def test_wrong_weights_of_tenants_are_refused(weights):
    with pytest.raises(ConfigError, match="tenant-weights"):
        load_config(["--tenant-weights", weights])


def test_a_target_between_tokens_is_off_unless_given():
    assert load_config([]).to_core().target_itl_ms is None
    assert load_config(["--target-itl-ms", "0"]).to_core().target_itl_ms is None
    assert load_config(["--target-itl-ms", "40.5"]).to_core().target_itl_ms == 40.5


def test_the_target_can_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("TIDEGATE_TARGET_ITL_MS", "35")
    assert load_config([]).to_core().target_itl_ms == 35


def test_priorities_age_where_an_option_says_how_fast():
    assert load_config([]).to_core().priority_aging_s is None
    flags = ["--priority-aging-s", "2.5", "--scheduling-policy", "priority"]
    assert load_config(flags).to_core().priority_aging_s == 2.5


def test_to_core_carries_every_scheduling_option():
    flags = (
        "--max-num-batched-tokens 100 --max-num-seqs 10 --watermark 0.25 --long-prefill-token-threshold 50"
    )
    flags += " --max-num-queued-reqs 5 --max-num-queued-tokens 500 --no-enable-prefix-caching"
    flags += " --scheduling-policy priority --pipeline-depth 3 --preemption-mode swap --max-preemptions 4"
    core = load_config(flags.split()).to_core()
    assert (core.max_num_batched_tokens, core.max_num_seqs, core.watermark) == (100, 10, 0.25)
    assert (core.long_prefill_token_threshold, core.pipeline_depth) == (50, 3)
    assert (core.max_num_queued_reqs, core.max_num_queued_tokens) == (5, 500)
    assert (core.enable_prefix_caching, core.policy) == (False, "priority")
    assert (core.preemption_mode, core.max_preemptions) == ("swap", 4)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            "--max-num-seqs 0",
            ["--max-num-seqs", "TIDEGATE_MAX_NUM_SEQS", "'0'", "greater than or equal to 1"],
        ),
        ("--max-num-seqs many", ["--max-num-seqs", "'many'", "integer"]),
        ("--watermark 1", ["--watermark", "'1'", "less than 1"]),
        ("--watermark -0.1", ["--watermark", "greater than or equal to 0"]),
        ("--watermark nan", ["--watermark", "'nan'"]),
        ("--queue-timeout 0", ["--queue-timeout", "greater than 0"]),
        ("--target-itl-ms -1", ["--target-itl-ms", "'-1'", "greater than or equal to 0"]),
        ("--target-itl-ms soon", ["--target-itl-ms", "'soon'", "number"]),
        ("--scheduling-policy lifo", ["--scheduling-policy", "'lifo'", "'fair' or 'deadline'"]),
        ("--admission open", ["--admission", "'open'", "'watermark' or 'predicted'"]),
        ("--tenant-weights a=2", ["tenant_weights = {'a': 2.0}", "scheduling_policy = fair", "fcfs"]),
        ("--priority-aging-s 5", ["priority_aging_s = 5.0", "scheduling_policy = priority", "fcfs"]),
        (
            "--max-num-queued-reqs 5 --max-num-queued-reqs-per-tenant 6",
            ["max_num_queued_reqs_per_tenant = 6", "max_num_queued_reqs = 5", "never apply"],
        ),
        (
            "--max-num-queued-tokens 50 --max-num-queued-tokens-per-tenant 60",
            ["max_num_queued_tokens_per_tenant = 60", "max_num_queued_tokens = 50", "never apply"],
        ),
        ("--port 65536", ["--port", "'65536'", "65535"]),
        ("--pipeline-depth 0", ["--pipeline-depth"]),
        ("--preemption-mode copy", ["--preemption-mode", "'copy'", "'auto', 'recompute' or 'swap'"]),
        ("--max-preemptions -1", ["--max-preemptions", "'-1'", "greater than or equal to 0"]),
        ("--max-num-batched-tokens 10 --max-num-seqs 11", ["= 10", "= 11", "at least one token"]),
        ("--host 0.0.0.0", ["'0.0.0.0'", "loopback", "--insecure"]),
        ("--host 127.0.0.1 --admin-host :: --admin-port 1", ["admin_host = '::'", "loopback"]),
        ("--admin-host 127.0.0.1", ["admin_port is not"]),
        ("--worker nowhere", ["--worker", "'nowhere'", "host:port"]),
        ("--worker a:0", ["'0'", "1 to 65535"]),
        ("--worker a:1,a:1", ["twice"]),
        ("--worker ::1:5", ["brackets"]),
        ("--preset fast", ["--preset", "'fast'", "concurrency", "long-context"]),
    ],
)
def test_errors_name_option_value_and_what_is_allowed(flags, parts):
    with pytest.raises(ConfigError) as caught:
        load_config(flags.split())
    for part in parts:
        assert part in str(caught.value)


def test_all_errors_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        load_config(["--max-num-seqs", "0", "--watermark", "2"])
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        (
            "options.yaml",
            "max_num_sequences: 3\n",
            "max_num_sequences: there is no such option; did you mean",
        ),
        ("options.yaml", "- 1\n", "must map option names to values"),
        ("options.yaml", "a: [", "options.yaml"),
        ("options.toml", "a = ", "options.toml"),
        ("options.ini", "", "must end in .yaml, .yml or .toml"),
    ],
)
def test_errors_in_the_file_are_named(tmp_path, name, text, complaint):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        load_config(["--config", str(path)])


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        load_config(["--config", str(tmp_path / "nothing.yaml")])


def test_unknown_flags_end_the_command(capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(["--max-sequences", "3"])
    assert caught.value.code == 2
    assert "--max-sequences" in capsys.readouterr().err


def test_help_explains_every_option_in_one_sentence(capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in ServiceConfig.model_fields.items():
        assert "--" + name.replace("_", "-") in text
        assert " ".join(field.description.split()) in text
