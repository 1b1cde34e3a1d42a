import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ssd.errors import SettingsError, SetupError
from ssd.observability.metrics import ROUNDS_TOTAL
from ssd.types import Mode, SpeculationStatistics
from ssd_bench import identity
from ssd_bench.__main__ import main
from ssd_bench.metrics import Continuation
from ssd_bench.peers import command, environments
from ssd_bench.peers.contenders import PEERS, Contender, Drafting, contenders
from ssd_bench.peers.engines import Setup, answer_of, own_deployment
from ssd_bench.peers.measure import Case, Row, num_steps, shortage_of
from ssd_bench.peers.report import ResultsFile, markdown, records, rows_of
from ssd_bench.peers.workers.wire import Batch

PLAIN = Contender(peer="ssd")
SSD = replace(PLAIN, drafting="ssd", lookahead=6)


def offered(*peers: str, dtypes: tuple[str, ...] = ("float32",)) -> list[Contender]:
    return contenders(peers, dtypes=dtypes, lookaheads=[3, 5], threads=[1, 2], ssd_lookahead=6)


def setup_in(folder: Path, *cpus: int, batch: int = 1) -> Setup:
    folders: dict[str, Any] = dict.fromkeys(("target", "draft", "environments", "scratch"), folder)
    return Setup(**folders, cpus=cpus, batch=batch)


def row(
    contender: Contender, *speeds: float, texts: list[list[list[int] | str]] | None = None
) -> Row:
    return Row(
        contender,
        tokens_per_second=list(speeds),
        other_cpus=[0.01] * len(speeds),
        texts=texts or [[[1, 2]] for _ in speeds],
    )


def test_each_number_of_cpus_has_plain_decoding_and_each_lookahead() -> None:
    found = offered("openvino-genai")
    assert [(each.threads, each.drafting, each.lookahead) for each in found] == [
        (1, "none", 0),
        (2, "none", 0),
        (1, "draft", 3),
        (1, "draft", 5),
        (2, "draft", 3),
        (2, "draft", 5),
    ]


def test_ssd_has_one_target_cpu_and_its_own_lookahead() -> None:
    ssd = [each for each in offered("ssd", "vllm") if each.drafting == "ssd"]
    assert [(each.peer, each.threads, each.lookahead) for each in ssd] == [
        ("ssd", 1, 6),
        ("vllm", 1, 6),
    ]
    assert ssd[0].name == "ssd, SSD, K=6, float32, 1 + 1 CPUs"


def test_names_are_unique() -> None:
    found = offered(*PEERS, dtypes=("float32", "bfloat16", "int8", "int4"))
    assert len({each.name for each in found}) == len(found)


def test_what_an_engine_does_not_offer_is_left_out() -> None:
    found = offered("transformers", "vllm", dtypes=("float32", "int8", "int4"))
    assert {each.dtype for each in found} == {"float32"}


def test_int4_is_the_format_of_target_and_draft(tmp_path: Path) -> None:
    found = offered("ssd", "openvino-genai", dtypes=("int4",))
    assert {each.peer for each in found} == {"ssd", "openvino-genai"}
    deployment = own_deployment(found[0], setup_in(tmp_path, 3, 4))
    assert deployment.common_flags[2:4] == ("--dtype", "float32")
    assert "int4" in deployment.target_flags
    assert deployment.draft_flags[:2] == ("--weights", "int4")


def test_the_engine_of_the_authors_needs_cuda_and_has_gpus_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = offered("ssd-paper", dtypes=("float32", "bfloat16"))
    assert [(each.drafting, each.lookahead, each.devices) for each in found] == [
        ("none", 0, "1 GPU"),
        ("draft", 3, "1 GPU"),
        ("draft", 5, "1 GPU"),
        ("ssd", 6, "1 + 1 GPU"),
    ]
    monkeypatch.setattr(environments, "DEVICES", tmp_path)
    with pytest.raises(SetupError, match="ssd-paper needs CUDA: this machine has no NVIDIA GPU"):
        environments.check_gpu("ssd-paper")
    (tmp_path / "nvidia0").touch()
    environments.check_gpu("ssd-paper")


def test_on_gpus_the_products_target_and_draft_have_one_each(tmp_path: Path) -> None:
    setup = setup_in(tmp_path, 3, 4, 5)
    (plain, *_, ssd) = offered("ssd-cuda", dtypes=("bfloat16",))
    assert (plain.devices, ssd.devices) == ("1 GPU", "1 + 1 GPU")
    found = own_deployment(ssd, setup)
    assert found.target_flags[-2:] == ("--device", "cuda:0")
    assert found.draft_flags[-2:] == ("--device", "cuda:1")
    assert found.allowed_cpus == (3, 4, 5)
    (*_, on_cpus) = offered("ssd")
    assert own_deployment(on_cpus, setup).allowed_cpus == (3, 4)


@pytest.mark.parametrize("drafting", ["none", "draft"])
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_a_target_without_draft_processes_runs_on_as_many_cpus_as_its_label_has(
    drafting: Drafting, threads: int, tmp_path: Path
) -> None:
    setup = setup_in(tmp_path, 3, 5, 7, 9)
    contender = replace(PLAIN, drafting=drafting, lookahead=3, threads=threads)
    found = own_deployment(contender, setup)
    flags = dict(zip(found.target_flags[::2], found.target_flags[1::2], strict=True))
    cpus = ",".join(map(str, setup.cpus[:threads]))
    assert (flags["--cpus"], flags["--io-cpus"], flags["--threads"]) == (cpus, cpus, f"{threads}")
    if threads <= 2:
        assert (found.plan().target, found.plan().others) == (cpus, cpus), "as without the flags"


def test_target_and_draft_reserve_memory_for_the_measured_batch_alone(tmp_path: Path) -> None:
    (*_, ssd) = offered("ssd")
    found = own_deployment(ssd, setup_in(tmp_path, 3, 4, batch=2))
    assert found.target_flags[-2:] == ("--max-num-seqs", "2")
    assert found.draft_flags == ("--weights", "same", "--max-sessions", "2")


def test_the_table_compares_with_plain_decoding_of_the_same_engine() -> None:
    rows = [
        replace(row(PLAIN, 99.0), case=Case(batch=8)),
        row(PLAIN, 10.0, 12.0, 11.0),
        row(SSD, 20.0, 24.0, 22.0, texts=[[[1, 2]], [[1, 3]], [[1, 2]]]),
        row(replace(PLAIN, peer="vllm"), 5.0),
    ]
    plain, ssd, other = markdown(rows, "conditions", str).splitlines()[-3:]
    assert "| 11 (10.5–11.5) |  |  |" in plain
    assert "| 22 (21–23) | 2.00 | 1/3 |" in ssd
    assert "| 5 (5–5) |  |  |" in other


def test_the_hit_rate_is_of_all_repetitions_and_empty_without_lookups() -> None:
    plain, ssd = row(PLAIN, 10.0, 12.0), row(SSD, 20.0, 24.0)
    plain.hits, plain.looked_up = [0, 0], [0, 0]
    ssd.hits, ssd.looked_up = [8, 1], [10, 6]
    assert [record["hit_rate"] for record in records([plain, ssd])] == [None, 9 / 16]
    (title, _, of_plain, of_ssd) = markdown([plain, ssd], "", str).splitlines()[-4:]
    assert "| different | hit rate | memory |" in title
    assert of_plain.endswith("|  |  |  |")
    assert of_ssd.endswith("| 0/2 | 0.562 |  |")


def test_a_target_of_this_product_reports_the_lookups_of_all_texts() -> None:
    counts = [{"hits": 4, "misses": 2, "late": 1}, {"hits": 3, "rounds": 9, "paused_rounds": 6}]
    statistics = [SpeculationStatistics(mode=Mode.AUTO, **each) for each in counts]
    found = answer_of([Continuation((5, 6), each) for each in statistics])
    assert (found.texts, found.num_tokens) == ([[5, 6], [5, 6]], 4)
    assert (found.hits, found.looked_up) == (7, 10)


def test_vllm_reports_the_lookups_of_a_batch_if_it_has_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def count(**results: int) -> None:
        for result, number in results.items():
            ROUNDS_TOTAL.labels(result=result).inc(number)

    class Engine:
        def __init__(self, _model: str, *, worker_extension_cls: str = "", **_: object) -> None:
            module, _dot, name = worker_extension_cls.rpartition(".")
            self._worker = getattr(sys.modules[module], name)() if name else None

        def generate(self, prompts: list[object], *_: object, **__: object) -> list[Any]:
            count(hit=3, miss=1, late=1, no_draft=5, none=7)
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5])]) for _ in prompts]

        def collective_rpc(self, method: str) -> list[Any]:
            return [getattr(self._worker, method)()]

    vllm: Any = ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams, vllm.__version__ = Engine, dict, "1"
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    load = import_module("ssd_bench.peers.workers.vllm_worker").load
    config: dict[str, Any] = dict.fromkeys(("target", "dtype", "length", "batch"), "")
    batch: Batch = {"prompts": [[1]], "max_tokens": 16, "temperature": 0.0, "seed": 0}
    count(hit=0, miss=0, late=0)
    _, complete = load(config | {"drafts": ["127.0.0.1:1"], "lookahead": 6})
    complete(batch)
    assert complete(batch) == {"tokens": [[5]], "hits": 3, "looked_up": 5}
    _, complete = load(config)
    assert complete(batch) == {"tokens": [[5]]}


def test_a_busy_machine_and_a_failure_are_visible() -> None:
    busy, failed = row(PLAIN, 10.0), row(SSD)
    busy.other_cpus = [0.5]
    failed.failure = "the process ended with exit code -8"
    table = markdown([busy, failed], "", str)
    assert "10 (10–10), busy" in table
    assert "failed: the process ended with exit code -8" in table


def test_no_contender_is_loaded_without_memory_for_it() -> None:
    assert shortage_of(3 << 30, 3 << 30) == ""
    assert "1.0 GiB of memory are free, and a contender took 2.5" in shortage_of(1 << 30, 5 << 29)


def test_rows_survive_a_file() -> None:
    rows = [row(PLAIN, 1.0, 2.0), replace(row(SSD), case=Case(8, 0.7))]
    assert rows_of(json.loads(json.dumps(records(rows)))) == rows


def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    failed = row(SSD, 1.0)
    failed.failure = "no answer within 600 s"
    file.write_text(json.dumps({"identity": "own", "rows": records([failed])}))
    fresh = [Row(PLAIN), Row(SSD)]
    found = ResultsFile(file, {"identity": "own"}).continued(fresh)
    assert [each.tokens_per_second for each in found] == [[], [1.0]]
    batch: Batch = {"prompts": [[1]], "max_tokens": 16, "temperature": 0.0, "seed": 0}
    assert num_steps(found, {Case(): [batch] * 3}) == 3 + 2, "what failed is tried again"
    busy = row(SSD, 1.0, 2.0, 3.0)
    busy.other_cpus[1] = 0.5
    file.write_text(json.dumps({"identity": "own", "rows": records([busy])}))
    (again,) = ResultsFile(file, {"identity": "own"}).continued([Row(SSD)])
    assert (again.tokens_per_second, again.texts) == ([1.0], [[[1, 2]]]), "and what was busy"


def test_measurements_on_a_busy_machine_and_later_ones_are_forgotten() -> None:
    found = row(SSD, 1.0, 2.0)
    found.hits, found.looked_up, found.texts = [6, 0], [8, 8], [[[1]], [[1]]]
    found.other_cpus = [0.01, 0.5]
    found.forget_busy()
    assert (found.tokens_per_second, found.other_cpus, found.texts) == ([1.0], [0.01], [[[1]]])
    assert (found.hits, found.looked_up) == ([6], [8])


@pytest.mark.parametrize(
    "content",
    [
        '{"identity": "another", "rows": []}',
        '{"settings": {}, "rows": []}',
        '{"identity": "own"}',
        '{"identity": "own", "rows": [{}]}',
        '{"identity": "own", "rows": [1',
        "[]",
        "",
    ],
)
def test_results_of_another_run_and_damaged_ones_are_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "peers.json"
    file.write_text(content)
    with pytest.raises(SettingsError, match=r"peers.json .*: choose another --output"):
        ResultsFile(file, {"identity": "own"}).continued([Row(SSD)])
    assert file.read_text() == content


def test_the_command_goes_on_only_with_the_same_prompts_engines_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    async def measure(rows: list[Row], *_: object) -> None:
        for each in rows:
            if not each.tokens_per_second:
                measured.append(each.name)
                each.tokens_per_second.append(1.0)
                each.other_cpus.append(0.0)
                each.texts.append([[1]])

    monkeypatch.setattr(command, "measure", measure)
    data = tmp_path / "set.jsonl"
    data.write_text('{"text": "one"}\n{"text": "two"}\n')
    sizes = ("--threads", "1", "--methods", "none", "--repetitions", "1")
    argv = ["peers", "--peers", "ssd,openvino-genai", "--data", str(data), *sizes]
    argv += ["--environments", str(tmp_path), "--output", str(tmp_path / "output")]
    assert main(argv) == 0
    assert "nothing is left" not in capsys.readouterr().err
    assert main(argv) == 0
    assert "peers.json has all measurements: nothing is left to measure" in capsys.readouterr().err
    assert len(measured) == 2

    def is_refused() -> bool:
        code = main(argv)
        error = capsys.readouterr().err
        return code == 2 and "choose another --output" in error and error.count("\n") == 1

    data.write_text('{"text": "one"}\n{"text": "six"}\n')
    assert is_refused()
    data.write_text('{"text": "one"}\n{"text": "two"}\n')
    with monkeypatch.context() as patch:
        patch.setitem(environments.REQUIREMENTS, "openvino-genai", ("openvino-genai==1",))
        assert is_refused()
    with monkeypatch.context() as patch:
        patch.setattr(identity, "SOURCES", tmp_path)
        (tmp_path / "engine.py").touch()
        assert is_refused()
    assert main(argv) == 0
    assert len(measured) == 2


def test_a_converted_model_is_found_again_by_all_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("openvino", "openvino_genai"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    worker = import_module("ssd_bench.peers.workers.openvino_genai_worker")
    converted: list[Path] = []
    options: list[Sequence[object]] = []

    def convert(words: list[Path], **_options: object) -> None:
        converted.append(words[-1])
        options.append(words[9:-1])
        words[-1].mkdir()

    monkeypatch.setattr(subprocess, "run", convert)
    (tmp_path / "model-1.safetensors").write_text("same")
    found = []
    for weights in ("a", "b", "a"):
        (tmp_path / "model-2.safetensors").write_text(weights)
        found.append(worker.exported(str(tmp_path), "int8", str(tmp_path)))
    assert found == [*converted, converted[0]]
    assert len(set(converted)) == 2
    assert worker.exported(str(tmp_path), "int4", str(tmp_path)) == converted[2]
    assert options[2] == ["--sym", "--group-size", "64", "--group-size-fallback", "adjust"]


@pytest.mark.parametrize(
    "arguments", [["--dtypes", "int8,int4"], ["--batches", "1,17"], ["--temperatures", "hot"]]
)
def test_what_no_engine_offers_is_a_usage_error(arguments: list[str]) -> None:
    assert main(["peers", "--peers", "transformers", *arguments]) == 2
