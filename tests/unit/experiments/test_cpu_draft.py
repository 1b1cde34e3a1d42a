"""What the measured steps of a draft predict, and the errors of the commands."""

import pytest
from tools.experiments.__main__ import main
from tools.experiments.cpu_draft import rates, shape_of_step

from ssd.engine.known_shapes import KNOWN_SHAPES
from ssd.engine.pass_time import WEIGHTS, Cpu, cpu_pass_time

MODEL = KNOWN_SHAPES["qwen3-0.6b"]
TIMES = {6: 0.060, 24: 0.105}
CPU = Cpu(num_cores=2, bandwidth=25e9)


@pytest.mark.parametrize("rows", TIMES)
def test_the_rates_of_a_measurement_predict_it(rows: int) -> None:
    found = rates(MODEL, "int8", TIMES, CPU)
    predicted = cpu_pass_time(MODEL, CPU, shape_of_step(rows), found)
    assert predicted == pytest.approx(TIMES[rows])
    assert found.bytes_per_weight == WEIGHTS["int8"].bytes_per_weight


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["cpu-draft", "--models", "gpt-5"], "--models 'gpt-5': choose of llama-3.1-70b"),
        (["cpu-draft", "--weights", "int2"], "--weights 'int2': choose of bfloat16, int8, int4"),
        (["auto", "--situations", "x"], "--situations: choose from embedded, widened"),
    ],
)
def test_an_unknown_value_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    assert message in capsys.readouterr().err
