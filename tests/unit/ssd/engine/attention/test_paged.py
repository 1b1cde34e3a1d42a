"""Attention to pages against attention to each sequence on its own."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.paged_attention import PagedCase, compare_paged, paged_cases
from torch import Tensor
from torch.fx import GraphModule

from ssd.engine import static_execution
from ssd.engine.attention import dense, paged_flex
from ssd.engine.attention.dense import PagedReference, attend_beside, attend_dense
from ssd.engine.attention.paged import PagedAttention, make_paged, num_visible
from ssd.engine.attention.paged_flex import PagedFlex
from ssd.engine.config import LARGEST_PAGE, EngineConfig, ModelConfig
from ssd.engine.parallel.group import ALONE
from ssd.errors import SettingsError
from ssd.testing.fake_device import fake_device

pytestmark = pytest.mark.usefixtures("compiler")

BACKENDS: dict[str, PagedAttention] = {
    "reference": PagedReference(),
    "flex": PagedFlex(is_compiled=False),
    "flex-deterministic": PagedFlex(is_compiled=False, is_deterministic=True),
}
ON_CPU = pytest.mark.parametrize("backend", list(BACKENDS.values()), ids=list(BACKENDS))


@pytest.fixture(autouse=True)
def untraced_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager FlexAttention traces each shape by default, which takes most of the time."""
    flex = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    monkeypatch.setattr(flex, True)


def differs_by(backend: PagedAttention, case: PagedCase, dtype: torch.dtype) -> float:
    difference = compare_paged(backend, case, dtype, "cpu")
    return max(difference.out, difference.log_sum_exp)


@ON_CPU
@pytest.mark.parametrize("case", list(paged_cases(16)))
def test_attention_to_pages_equals_attention_to_each_sequence(
    backend: PagedAttention, case: str
) -> None:
    assert differs_by(backend, paged_cases(backend.block_size)[case], torch.float32) < 1e-5


@ON_CPU
def test_results_have_the_dtype_of_the_queries(backend: PagedAttention) -> None:
    case = PagedCase(lengths=(3, 200), num_queries=7, is_causal=True)
    assert differs_by(backend, case, torch.bfloat16) < 2e-2


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_position_less(lengths_B: Tensor, num_queries: int, *, is_causal: bool) -> Tensor:
        return num_visible(lengths_B, num_queries, is_causal=is_causal) - 1

    monkeypatch.setattr(dense, "num_visible", one_position_less)
    case = PagedCase(lengths=(100, 200), num_queries=7, is_causal=True)
    difference = compare_paged(PagedReference(), case, torch.float32, "cpu")
    assert difference.out > 0.01
    assert difference.log_sum_exp > 0.01


@ON_CPU
@pytest.mark.parametrize("num_queries", [7, 300])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_pass_is_prepared_without_waiting_for_the_device(
    backend: PagedAttention, num_queries: int, *, is_causal: bool
) -> None:
    with fake_device() as device:
        backend.prepare(
            torch.empty((4, 3), dtype=torch.int32, device=device.name),
            torch.empty(4, dtype=torch.int32, device=device.name),
            num_queries=num_queries,
            num_pages=9,
            is_causal=is_causal,
        )
        assert device.num_reads == 0


def test_a_draft_attends_without_waiting_for_the_device() -> None:
    """FlexAttention does not accept the device; ``fullgraph`` refuses what would wait."""
    with fake_device() as device:

        def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device.name)

        trunk = PagedReference().prepare(
            of(4, 3, dtype=torch.int32),
            of(4, dtype=torch.int32),
            num_queries=7,
            num_pages=9,
            is_causal=False,
        )(of(4, 7, 8, 64), of(9, 16, 2, 64), of(9, 16, 2, 64))
        visible = of(4, 7, 5, dtype=torch.bool)
        out = attend_beside(trunk, of(4, 7, 8, 64), of(4, 5, 2, 64), of(4, 5, 2, 64), visible)
        assert (out.shape, out.dtype) == ((4, 7, 8, 64), torch.bfloat16)
        assert trunk[1].dtype == torch.float32
        assert out.device == torch.device(device.name)
        assert device.num_reads == 0


def test_flex_is_one_graph_for_all_lengths_and_pages() -> None:
    """On CUDA, torch compiles the graph to a kernel."""
    graphs: list[GraphModule] = []

    def count(graph: GraphModule, _inputs: list[Tensor]) -> GraphModule:
        graphs.append(graph)
        return graph

    backend = PagedFlex(is_compiled=False)
    backend._attend = torch.compile(backend._attend, backend=count, dynamic=False, fullgraph=True)
    for lengths in ((7, 130), (256, 100), (128, 256)):
        case = PagedCase(lengths=lengths, num_queries=7, is_causal=lengths[0] > 7)
        assert differs_by(backend, case, torch.float32) < 1e-5
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("num_queries", "group", "head_size", "element_size", "options"),
    [
        (7, 4, 128, 2, {"num_warps": 4, "num_stages": 3}),
        (24, 4, 64, 4, {"num_warps": 4, "num_stages": 3}),
        (24, 8, 128, 2, {"num_warps": 8, "num_stages": 3, "BLOCK_M": 128}),
        (7, 8, 128, 4, {"num_warps": 4, "num_stages": 1}),
        (7, 4, 256, 2, {"num_warps": 4, "num_stages": 1}),
        (7, 5, 128, 2, {}),
        (128, 4, 128, 2, {}),
    ],
)
def test_blocks_of_the_decoding_kernel_fit_the_mask_and_the_registers(
    num_queries: int, group: int, head_size: int, element_size: int, options: dict[str, int]
) -> None:
    """Compiled for sm_90 with these numbers, no kernel spilled."""
    assert paged_flex.kernel_options(num_queries, group, head_size, element_size) == options


def test_deterministic_splits_do_not_depend_on_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 128 and 129 tokens, a text has one page more; the sums of its first token stay."""
    given: list[tuple[list[int], int]] = []
    real: Any = torch.nn.attention.flex_attention.flex_attention

    def record(*tensors: Tensor, **options: Any) -> Any:
        mask, splits = options["block_mask"], options["kernel_options"]["SPLIT_KV"]
        given.append((mask.kv_num_blocks.flatten().tolist(), splits))
        return real(*tensors, **options)

    monkeypatch.setattr(paged_flex, "flex_attention", record)
    for length in (128, 129, 1100):
        lengths_B = torch.tensor([length], dtype=torch.int32)
        PagedFlex(is_compiled=False, is_deterministic=True).prepare(
            torch.arange(1, 11, dtype=torch.int32)[None],
            lengths_B,
            num_queries=1,
            num_pages=11,
            is_causal=True,
        )(torch.zeros(1, 1, 4, 16), *torch.zeros(2, 11, 128, 2, 16))
    assert given == [([10], 3)] * 3


@pytest.mark.parametrize(
    ("num_queries", "num_heads", "pages_read", "splits"),
    [(1, 4, [300], 32), (1, 6, [2], None), (130, 4, [1, 2], None)],
    ids=["decoding", "group of 3", "prefill"],
)
def test_passes_without_splits_read_the_pages_that_they_see(
    num_queries: int,
    num_heads: int,
    pages_read: list[int],
    splits: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[tuple[list[int], int | None]] = []

    def record(queries: Tensor, *_: Tensor, **options: Any) -> Any:
        blocks = options["block_mask"].kv_num_blocks.flatten().tolist()
        given.append((blocks, options["kernel_options"].get("SPLIT_KV")))
        return queries, SimpleNamespace(lse=queries[..., 0])

    monkeypatch.setattr(paged_flex, "flex_attention", record)
    pages = torch.zeros(2, 1, 128, 2, 16).expand(2, 301, 128, 2, 16)
    PagedFlex(is_compiled=False, is_deterministic=True).prepare(
        torch.arange(1, 301, dtype=torch.int32)[None],
        torch.tensor([130], dtype=torch.int32),
        num_queries=num_queries,
        num_pages=301,
        is_causal=True,
    )(torch.zeros(1, num_queries, num_heads, 16), *pages)
    assert given == [(pages_read, splits)]


def segments(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3, 5, 8, 16), (3, 40, 2, 16), (3, 40, 2, 16))
    queries, keys, values = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    visible_BQS = torch.rand((3, 5, 40), generator=generator) < 0.3
    visible_BQS[..., 39] = True
    return queries, keys, values, visible_BQS


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_dense_attention_equals_torchs_own(dtype: torch.dtype, tolerance: float) -> None:
    queries, keys, values, visible = segments(2, dtype)
    out, mass = attend_dense(queries, keys, values, visible)
    queries_BHQE = queries.double().transpose(1, 2)
    keys_BHSE, values_BHSE = (
        tensor.double().transpose(1, 2).repeat_interleave(4, dim=1) for tensor in (keys, values)
    )
    mask = visible[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries_BHQE, keys_BHSE, values_BHSE, attn_mask=mask
    )
    scores = (queries_BHQE @ keys_BHSE.mT / 4).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(out.double(), expected.transpose(1, 2), atol=tolerance, rtol=0)
    torch.testing.assert_close(mass.double(), scores.logsumexp(-1), atol=tolerance, rtol=0)
    assert out.dtype == dtype


def test_dense_attention_to_nothing_is_zero_without_mass() -> None:
    queries, keys, values, visible = segments(3, torch.float32)
    visible[1, 2] = False
    out, mass = attend_dense(queries, keys, values, visible)
    assert out[1, 2].eq(0).all()
    assert mass[1, :, 2].eq(-torch.inf).all()
    assert out.isfinite().all()


def test_a_trunk_in_pages_and_entries_beside_it_equal_attention_to_all() -> None:
    """Sequences of 16, 20 and 0 trunk entries in pages of 16, then 8 entries of their own."""
    queries, keys, values, visible = segments(4, torch.float32)
    lengths = torch.tensor([16, 20, 0], dtype=torch.int32)
    visible[:, :, :32] = torch.arange(32) < lengths[:, None, None]
    pages = (tensor[:, :32].reshape(6, 16, 2, 16) for tensor in (keys, values))
    attend = PagedReference().prepare(
        torch.arange(6, dtype=torch.int32).view(3, 2),
        lengths,
        num_queries=5,
        num_pages=6,
        is_causal=False,
    )
    trunk = attend(queries, *pages)
    out = attend_beside(trunk, queries, keys[:, 32:], values[:, 32:], visible[:, :, 32:])
    whole, _ = attend_dense(queries, keys, values, visible)
    torch.testing.assert_close(out, whole, atol=1e-6, rtol=0)


def flash_attn_with_kvcache(  # noqa: PLR0913 - flash-attn's own signature
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    causal: bool,
    num_splits: int,
    return_softmax_lse: bool,
) -> tuple[Tensor, Tensor]:
    """The contract of flash-attn 2.8: what it refuses, and the signs of infinity."""
    split_counts.append(num_splits)
    assert num_splits <= 128
    assert return_softmax_lse
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert block_table.dtype == cache_seqlens.dtype == torch.int32
    assert k_cache.shape[1] % 256 == 0
    _, num_queries, *_ = q.shape
    attend = PagedReference().prepare(
        block_table,
        cache_seqlens,
        num_queries=num_queries,
        num_pages=len(k_cache),
        is_causal=causal,
    )
    out, mass = attend(q, k_cache, v_cache)
    return out, mass.masked_fill(mass == -torch.inf, torch.inf)


split_counts: list[int] = []
"""``num_splits`` of the calls."""
ADAPTER = "ssd.engine.attention.paged_flash_attn"


@pytest.fixture
def adapter_is_new() -> Iterator[None]:
    """The adapter is imported again, and afterwards by the next test."""
    sys.modules.pop(ADAPTER, None)
    yield
    sys.modules.pop(ADAPTER, None)


@pytest.fixture
def with_flash_attn(adapter_is_new: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of this name, since the real one needs CUDA."""
    package = ModuleType("flash_attn")
    package.__dict__["flash_attn_with_kvcache"] = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn", package)


@pytest.fixture
def without_flash_attn(adapter_is_new: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import fails, also where it is installed."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)


@pytest.mark.usefixtures("with_flash_attn")
@pytest.mark.parametrize("case", ["a verify around page boundaries", "a trunk"])
def test_flash_attn_receives_its_arguments_and_its_infinities_are_turned(case: str) -> None:
    choice = make_paged("flash_attn", "cuda", "bfloat16", head_size=64)
    assert choice.attention.block_size == LARGEST_PAGE == 256
    assert differs_by(choice.attention, paged_cases(256)[case], torch.bfloat16) < 2e-2


@pytest.mark.usefixtures("with_flash_attn")
@pytest.mark.parametrize(("num_pages", "expected"), [(1, 1), (2, 1), (3, 2), (16, 8), (512, 32)])
def test_splits_of_flash_attn_follow_only_the_table_in_passes_of_targets(
    num_pages: int, expected: int
) -> None:
    def count(num_sequences: int, *, is_deterministic: bool) -> int:
        choice = make_paged(
            "flash_attn", "cuda", "bfloat16", head_size=64, is_deterministic=is_deterministic
        )
        attend = choice.attention.prepare(
            torch.zeros((num_sequences, num_pages), dtype=torch.int32),
            torch.full((num_sequences,), 2, dtype=torch.int32),
            num_queries=1,
            num_pages=1,
            is_causal=True,
        )
        pages = torch.zeros((1, 256, 1, 16), dtype=torch.bfloat16)
        attend(torch.zeros((num_sequences, 1, 1, 16), dtype=torch.bfloat16), pages, pages)
        return split_counts.pop()

    assert [count(each, is_deterministic=True) for each in (1, 16)] == [expected] * 2
    assert count(1, is_deterministic=False) == 0


@pytest.mark.usefixtures("with_flash_attn")
def test_auto_is_flash_attn_where_it_is_installed_and_has_the_dtype() -> None:
    choice = make_paged("auto", "cuda:1", "bfloat16", head_size=64)
    assert (choice.attention.name, choice.reason) == ("flash_attn", "flash-attn is installed")
    choice = make_paged("auto", "cuda:1", "float32", head_size=64)
    assert choice.attention.name == "flex"
    assert "the dtype is float32" in choice.reason


@pytest.mark.usefixtures("with_flash_attn")
def test_flash_attn_is_not_used_for_heads_for_which_it_copies_all_pages() -> None:
    assert make_paged("auto", "cuda", "bfloat16", head_size=96).attention.name == "flash_attn"
    choice = make_paged("auto", "cuda", "bfloat16", head_size=100)
    assert choice.attention.name == "flex"
    assert "heads of 100" in choice.reason
    with pytest.raises(SettingsError, match="heads of 100"):
        make_paged("flash_attn", "cuda", "bfloat16", head_size=100)


@pytest.mark.usefixtures("without_flash_attn")
def test_auto_is_flex_where_flash_attn_cannot_be_imported() -> None:
    choice = make_paged("auto", "cuda", "bfloat16", head_size=64)
    assert choice.attention.name == "flex"
    assert choice.reason.startswith("not flash_attn: it cannot be imported: import of flash_attn")
    with pytest.raises(SettingsError, match=r"flash_attn cannot be imported: .*; set attention to"):
        make_paged("flash_attn", "cuda", "bfloat16", head_size=64)


def test_auto_is_the_reference_without_cuda() -> None:
    choice = make_paged("auto", "cpu", "bfloat16", head_size=64)
    assert choice.attention.name == "reference"
    assert choice.reason == "the kernels for pages need CUDA, not cpu"


@pytest.mark.parametrize(("branches", "is_exact"), [(0, True), (6, False)])
def test_a_token_of_a_target_has_the_same_bits_in_each_column(
    branches: int, *, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def make(*_: str, head_size: int, is_deterministic: bool) -> None:
        assert head_size == 64
        asked.append(is_deterministic)
        raise SettingsError("the load ends here")

    monkeypatch.setattr(static_execution, "make_paged", make)
    engine = EngineConfig(engine="static", max_model_len=64, branches=branches)
    model = cast(ModelConfig, SimpleNamespace(head_size=64))
    with pytest.raises(SettingsError, match="the load ends here"):
        static_execution.load(Path(), model, engine, lambda _: None, ALONE)
    assert asked == [is_exact]
