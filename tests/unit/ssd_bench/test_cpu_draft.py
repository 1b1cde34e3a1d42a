"""What the measured steps of a draft predict, and the command's errors."""

import pytest

from ssd.engine.known_shapes import KNOWN_SHAPES
from ssd.engine.pass_time import WEIGHTS, Cpu, cpu_pass_time
from ssd_bench.__main__ import main
from ssd_bench.cpu_draft import rates, shape_of_step

MODEL = KNOWN_SHAPES["qwen3-0.6b"]
TIMES = {1: 0.080, 8: 0.090, 24: 0.110}


@pytest.mark.parametrize("rows", TIMES)
def test_the_rates_of_a_measurement_predict_it(rows: int) -> None:
    found = rates(MODEL, "int8", TIMES, num_cores=2)
    cpu = Cpu(num_cores=2, bandwidth=1e15)
    predicted = cpu_pass_time(MODEL, cpu, shape_of_step(rows), found)
    assert predicted == pytest.approx(TIMES[rows], rel=0.06)
    assert found.bytes_per_weight == WEIGHTS["int8"].bytes_per_weight


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--models", "gpt-5"], "--models 'gpt-5': choose of llama-3.1-70b"),
        (["--weights", "int2"], "--weights 'int2': choose of bfloat16, int8, int4"),
    ],
)
def test_an_unknown_model_or_format_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cpu-draft", *flags]) == 2
    assert message in capsys.readouterr().err
