"""A message that one rank writes is the one that another rank reads."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig
from ssd.engine.parallel.step import Operation, StepMessage

ENGINE = EngineConfig(max_model_len=200, max_num_seqs=5, num_columns=7, prefill_chunk=32)


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 1 << 40, shape, generator=generator)


@given(batch=st.integers(1, 5), columns=st.integers(1, 7), blocks=st.integers(1, 13))
def test_a_round_has_its_pass_and_the_keys_of_its_choice(
    batch: int, columns: int, blocks: int
) -> None:
    message, keys_4R = StepMessage(ENGINE), -random(4, batch * columns)
    sent = PagedBatch(random(batch, columns), random(batch), random(batch), random(batch, blocks))
    message.write_pass(Operation.VERIFY_AND_CHOOSE, sent, 5000, keys_4R)
    assert torch.equal(message.read_pass().block_tables_BJ, sent.block_tables_BJ)
    assert torch.equal(message.read_pass().tokens_BP, sent.tokens_BP)
    assert torch.equal(message.read_choice(), keys_4R)


def test_a_chunk_of_a_prompt_with_a_wide_table_fits() -> None:
    message = StepMessage(ENGINE)
    chunk = PagedBatch(random(1, 32), random(1), random(1), random(1, 40))
    message.write_pass(Operation.PREFILL, chunk, 5000)
    header = message.read_header()
    assert (header.operation, header.deadline_ms) == (Operation.PREFILL, 5000)
    found = message.read_pass()
    assert torch.equal(found.tokens_BP, chunk.tokens_BP)
    assert torch.equal(found.block_tables_BJ, chunk.block_tables_BJ[:, :13])
