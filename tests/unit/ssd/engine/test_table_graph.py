import numpy as np
import pytest
import torch
from openvino import opset15

from ssd.engine.config import EngineConfig
from ssd.engine.openvino_engine.decoder import compile_graph
from ssd.engine.openvino_engine.table_graph import filter_inputs, lowered
from ssd.engine.sampling.soft_filters import SoftFilters, num_groups_of
from ssd.engine.sampling.soft_filters import lowered as lowered_by_torch

N, V = 3, 1003
ENGINE = EngineConfig(max_model_len=64, max_num_seqs=1, num_columns=2, dtype="float32")


@pytest.mark.parametrize("num_ids", [V, 1000])
def test_a_graph_lowers_the_logits_that_torch_lowers(num_ids: int) -> None:
    """Of a session after another one: with top-k, min-p, both and none of them."""
    logits_NV = torch.randn((N, V), generator=torch.Generator().manual_seed(2)) * 3
    inputs = {"logits": opset15.parameter([N, V], np.float32), **filter_inputs()}
    output = lowered(inputs["logits"], inputs, num_ids)
    (request,) = compile_graph([output], inputs, ENGINE)
    filters = SoftFilters(1, "cpu")
    for top_k, min_p in ((20, 0.0), (0, 0.1), (0, 0.0), (20, 0.4), (1, 0.0)):
        filters.assign(0, 1.0, top_k, min_p)
        of_rows = filters.of_rows(np.zeros(N, dtype=np.int64), num_ids)
        values = {"logits": logits_NV.numpy(), "is_filtered": np.array([of_rows is not None])}
        values |= {"rank": np.zeros(1, np.int32), "min_logit": np.zeros(1, np.float32)}
        expected_NV = logits_NV[:, :num_ids]
        if of_rows is not None:
            values |= {"rank": of_rows.ranks_R[:1].astype(np.int32)}
            values |= {"min_logit": of_rows.min_logit_R[:1]}
            ranks_R = torch.from_numpy(of_rows.ranks_R)
            expected_NV = lowered_by_torch(
                expected_NV, ranks_R, torch.from_numpy(of_rows.min_logit_R)
            )
        found_NV = torch.from_numpy(request.infer(values)[0])[:, :num_ids]
        is_kept_NV = expected_NV == logits_NV[:, :num_ids]
        assert is_kept_NV.all() == (of_rows is None)
        assert torch.equal(found_NV[is_kept_NV], expected_NV[is_kept_NV])
        torch.testing.assert_close(found_NV, expected_NV)


def test_a_rank_beyond_the_groups_lowers_nothing_in_a_small_vocabulary() -> None:
    """Such a rank counts the padding of the vocabulary."""
    num_ids = 20
    assert num_groups_of(num_ids) == num_ids
    inputs = {"logits": opset15.parameter([1, V], np.float32), **filter_inputs()}
    (request,) = compile_graph([lowered(inputs["logits"], inputs, num_ids)], inputs, ENGINE)
    logits_1V = np.random.default_rng(1).normal(size=(1, V)).astype(np.float32) + 9
    values = {
        "logits": logits_1V,
        "is_filtered": np.array([True]),
        "rank": np.array([num_ids + 3], dtype=np.int32),
        "min_logit": np.array([-np.inf], dtype=np.float32),
    }
    assert np.array_equal(request.infer(values)[0][:, :num_ids], logits_1V[:, :num_ids])
