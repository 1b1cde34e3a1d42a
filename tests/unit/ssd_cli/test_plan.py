"""``ssd plan``: its output, its JSON and its errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from ssd.engine.config import ModelConfig
from ssd.engine.known_shapes import KNOWN_SHAPES
from ssd.engine.sizes import bytes_per_entry, num_weights
from ssd.testing.tiny_folder import write_tiny_folder
from ssd_cli.app import run
from ssd_cli.shapes import shape_of


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> Any:
    assert run(["plan", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_published_pair_fits_on_four_and_one_gpus_and_pays(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = plan(capsys)
    assert found["fits"] is True
    verdicts = found["verdicts"]
    assert verdicts[0] == "the pair fits: 4 GPU(s) for the target and 1 for the draft"
    assert verdicts[1].startswith("batch 1: SSD pays: ")
    memory = found["target_memory"]
    assert memory["weights"] == num_weights(KNOWN_SHAPES["llama-3.1-70b"]) * 2 // 4
    parts = [value for name, value in memory.items() if name != "total"]
    assert memory["total"] == sum(parts)


def test_the_tables_show_predictions_for_each_batch_and_the_assumptions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["plan", "--batch", "1,4"]) == 0
    shown = capsys.readouterr().out
    for part in ("batch 1", "batch 4", "tokens/s SSD", "--acceptance 0.8", "not measurements"):
        assert part in shown


def test_a_model_that_does_not_fit_ends_with_1_and_a_remedy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["plan", "--tp", "1"]) == 1
    shown = capsys.readouterr().out
    assert "the target does not fit: " in shown
    assert "pays" not in shown
    # Two GPUs have too little memory too.
    assert "use --tp 4" in shown


@pytest.mark.parametrize(
    ("flags", "flag", "step"),
    [
        (["--batch", "512"], "--batch", 1),
        (["--batch", "1", "--max-model-len", "131072", "--tp", "2"], "--max-model-len", 256),
    ],
)
def test_a_remedy_for_memory_is_the_largest_value_that_fits(
    flags: list[str], flag: str, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["plan", "--gpu", "A100-80GB", *flags]

    def problem(*changed: str) -> str:
        run([*argv, *changed])
        return capsys.readouterr().out.partition("the target does not fit: ")[2]

    words = f"the largest {flag} that fits is "
    value = int(problem().partition(words)[2].split()[0])
    assert not problem(flag, str(value))
    assert problem(flag, str(value + step))


def test_a_model_that_no_size_can_hold_needs_another_gpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--draft", "llama-3.1-70b", "--gpu", "L40S", "--tp", "8"]
    assert run(["plan", *flags]) == 1
    shown = capsys.readouterr().out
    assert "the draft does not fit: " in shown
    assert "use a GPU with more memory or a smaller draft" in shown


def test_a_table_that_is_too_slow_is_made_faster_by_what_helps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ["plan", "--model", "llama-3.1-8b", "--tp", "1", "--batch", "1"]
    run([*small, "--draft", "llama-3.1-8b"])
    assert "use a smaller draft" in capsys.readouterr().out
    run([*small, "--draft", "llama-3.2-1b", "--lookahead", "16"])
    shown = capsys.readouterr().out
    assert "--lookahead" in shown.partition("takes longer than a verify")[2]


def test_a_miss_gives_one_token_and_a_round_waits_for_no_proposal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (one,) = plan(capsys, "--batch", "1", "--hit-rate", "0", "--overhead-ms", "0")["batches"]
    speed = one["speculative"]
    assert speed["tokens_per_round"] == 1.0
    assert speed["round_seconds"] == one["times"]["verify"]


def test_the_plan_has_the_shapes_of_the_engine_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--batch", "1,12", "--max-model-len", "300")
    (one, twelve) = found["batches"]
    # Plain decoding is a verify, and blocks have the size of flash-attn's.
    assert one["times"]["plain"] == one["times"]["verify"]
    memory = found["target_memory"]
    model = KNOWN_SHAPES["llama-3.1-70b"]
    entries = 256 * (1 + 12 * 2)
    assert memory["kv_cache"] == entries * bytes_per_entry(model, "bfloat16") // 4
    assert twelve["batch"] == 12


def test_a_draft_as_large_as_its_target_does_not_pay(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model", "llama-3.1-8b", "--draft", "llama-3.1-8b", "--tp", "8", "--batch", "1")
    verdicts = plan(capsys, *flags, "--acceptance", "0.2")["verdicts"]
    assert "SSD does not pay" in verdicts[1]
    assert "takes longer than a verify" in verdicts[1]


ON_CPUS = ("--draft-device", "cpu", "--cpus", "32", "--bandwidth", "220")


def test_a_draft_on_cpus_needs_no_gpu_and_its_table_takes_longer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    on_gpu, on_cpus = plan(capsys, "--batch", "1"), plan(capsys, "--batch", "1", *ON_CPUS)
    assert on_cpus["target_memory"] == on_gpu["target_memory"]
    assert (
        on_cpus["verdicts"][0] == "the pair fits: 4 GPU(s) for the target and 32 CPUs for the draft"
    )
    (here,), (there,) = on_cpus["batches"], on_gpu["batches"]
    assert here["times"]["table"] > there["times"]["table"]
    # Neither has more GPUs: that is what SSD on CPUs competes with.
    for name in ("plain", "synchronous"):
        assert here[name] == there[name]


def test_a_draft_on_cpus_has_entries_and_logits_in_float32(
    capsys: pytest.CaptureFixture[str],
) -> None:
    on_gpu, bfloat16, int8 = (
        plan(capsys, "--batch", "16", *flags)["draft_memory"]
        for flags in ((), ON_CPUS, (*ON_CPUS, "--draft-weights", "int8"))
    )
    assert bfloat16["kv_cache"] == int8["kv_cache"] == 2 * on_gpu["kv_cache"]
    assert int8["branch_logits"] == 2 * bfloat16["branch_logits"]


def test_quantised_weights_of_a_draft_on_cpus_take_less_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = []
    for weights in ("bfloat16", "int8", "int4"):
        memory = plan(capsys, *ON_CPUS, "--draft-weights", weights)["draft_memory"]
        sizes.append(memory["weights"])
        assert memory["graphs"] == 0
    assert sizes[0] == 2 * num_weights(KNOWN_SHAPES["llama-3.2-1b"])
    assert sizes[0] > sizes[1] > sizes[2]


def test_cores_with_amx_build_a_table_of_a_bfloat16_draft_sooner(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def table(*flags: str) -> float:
        (one,) = plan(capsys, "--batch", "1", *ON_CPUS, *flags)["batches"]
        return float(one["times"]["table"])

    assert table("--amx") < 0.7 * table()


def test_a_round_uses_the_columns_that_raise_its_speed(capsys: pytest.CaptureFixture[str]) -> None:
    def columns(bandwidth: str) -> int:
        flags = ("--batch", "1", "--draft-device", "cpu", "--cpus", "512", "--bandwidth", bandwidth)
        (one,) = plan(capsys, *flags)["batches"]
        return int(one["columns"])

    assert columns("20") == 1
    assert 1 < columns("250") < 6
    assert columns("4000") == 6


def test_shapes_come_from_folders_and_from_the_embedded_pair(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path)
    assert shape_of(str(folder)) == ModelConfig.from_folder(folder)
    narrow, wide = shape_of("demo://target"), shape_of("demo://target?widen=4")
    assert wide.hidden_size == 4 * narrow.hidden_size
    assert wide.head_size == narrow.head_size
    assert shape_of("Llama-3.1-8B") == KNOWN_SHAPES["llama-3.1-8b"]


def test_models_of_one_tokenizer_may_have_embeddings_with_other_padding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_tiny_folder(tmp_path / "target", vocab_size=320)
    draft = write_tiny_folder(tmp_path / "draft")
    assert plan(capsys, "--model", str(target), "--draft", str(draft), "--tp", "1")["batches"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--gpu", "V100"], "--gpu 'V100' is not known; known: H100, "),
        (["--model", "gpt-5"], "--model gpt-5: there is no such folder"),
        (["--draft", "nope"], "--draft nope: there is no such folder"),
        (["--model", "gpt-5"], "or a known shape: llama-3.1-70b, "),
        (["--model", "hf://org/none"], "hf://org/none: its config.json is not in the hub's cache"),
        (["--draft", "qwen3-0.6b"], "a pair needs the same tokenizer"),
        (["--draft-device", "cpu"], "--cpus and --bandwidth: give all three"),
        (["--cpus", "8"], "--cpus and --bandwidth: give all three"),
        (["--amx"], "--cpus and --bandwidth: give all three"),
        (["--draft-weights", "int4"], "--cpus and --bandwidth: give all three"),
        ([*ON_CPUS[:-1], "1e-310"], "--bandwidth 1e-310: must be at least 0.001"),
        (["--bandwidth", "inf"], "--bandwidth is inf, must be in 0..100000"),
        (["--tp", "3"], "--tp 3 is not one of 1, 2, 4, 8"),
        (["--batch", "1,x"], "--batch '1,x' is not a list of numbers"),
        (["--batch", "0"], "--batch '0' is not a list of numbers"),
        (["--max-model-len", "1000000"], "max_model_len 1000000 is over the model's own 131072"),
    ],
)
def test_a_wrong_input_is_one_line_with_a_hint_and_exit_code_2(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert problem in captured.err
    assert captured.err.count("\n") == 1


def test_heads_that_cannot_be_divided_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_tiny_folder(tmp_path))
    assert run(["plan", "--model", folder, "--draft", folder, "--tp", "8"]) == 2
    assert "error: --tp 8: it does not divide the 4 attention heads" in capsys.readouterr().err
