"""What fits into a message of a step."""

import torch

from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig
from ssd.engine.parallel.step import Operation, StepMessage

ENGINE = EngineConfig(max_model_len=200, max_num_seqs=5, num_columns=7, prefill_chunk=32)


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 1 << 40, shape, generator=generator)


def test_a_chunk_of_a_prompt_with_a_wide_table_fits() -> None:
    message = StepMessage(ENGINE)
    chunk = PagedBatch(random(1, 32), random(1), random(1), random(1, 40))
    message.write_pass(Operation.PREFILL, chunk, 5000)
    header = message.read_header()
    assert (header.operation, header.deadline_ms) == (Operation.PREFILL, 5000)
    found = message.read_pass()
    assert torch.equal(found.tokens_BP, chunk.tokens_BP)
    assert torch.equal(found.block_tables_BJ, chunk.block_tables_BJ[:, :13])
