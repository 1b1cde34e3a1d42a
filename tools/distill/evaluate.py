"""Measure a pair on held-out text: ``python -m tools.distill.evaluate TARGET DRAFT``.

Tokens per round need no loop over rounds. With greedy and with coupled sampling, the text does not
depend on the draft. The accepted length of a proposal is therefore the number of consecutive
positions, from its start, at which the draft's choice after the true prefix is the true token. One
pass of the draft computes all of them.
"""

import argparse
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tools.distill.model import KeyValues, TrainableLlama, load_model
from tools.distill.training import divergence
from tools.distill.vocabulary import encode_modules, load_tokenizer
from torch import Tensor
from torch.nn import functional

from ssd.demo.corpus import held_out_modules, held_out_prompts

logger = logging.getLogger(__name__)

LOOKAHEAD = 6
NUM_PROMPTS = 48
PROMPT_TOKENS = 128
NEW_TOKENS = 192
TEMPERATURES = (0.0, 0.6, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Results on held-out modules; losses and divergence in nats per token.

    Attributes:
        target_loss: Cross entropy of the target.
        draft_loss: Cross entropy of the draft.
        kl: KL divergence from the distribution of the target to that of the draft.
        agreement: Share of positions of held-out text at which both have the same greedy choice.
        tokens_per_round: Mean accepted length plus one by temperature, with ``LOOKAHEAD``.
        bytes_per_token: Bytes of held-out text per token.
        lookahead: Tokens in a full proposal (K).
        num_prompts: Number of prompts from held-out modules.
        prompt_tokens: Length of each.
        new_tokens: Number of tokens that the target generates after each.
    """

    target_loss: float
    draft_loss: float
    kl: float
    agreement: float
    tokens_per_round: dict[str, float]
    bytes_per_token: float
    lookahead: int = LOOKAHEAD
    num_prompts: int = NUM_PROMPTS
    prompt_tokens: int = PROMPT_TOKENS
    new_tokens: int = NEW_TOKENS


def tokens_per_round(agrees_BS: Tensor, lookahead: int) -> float:
    """Return tokens per round over texts that the target generated.

    Args:
        agrees_BS: bool, whether the draft's choice after the true prefix is the true token.
        lookahead: Tokens in a full proposal.

    Returns:
        Committed tokens ÷ rounds. A round that would run past the end of a text is not counted.
    """
    rounds = tokens = 0
    for agrees_S in agrees_BS.tolist():
        start = 0
        while start + lookahead < len(agrees_S):
            accepted = 0
            while accepted < lookahead and agrees_S[start + accepted]:
                accepted += 1
            rounds += 1
            tokens += accepted + 1
            start += accepted + 1
    return tokens / rounds


@torch.no_grad()
def write_text(
    target: TrainableLlama, prompts_BS: Tensor, temperature: float, noise_SBV: Tensor
) -> Tensor:
    """Generate continuations of prompts with given noise.

    Args:
        target: The model.
        prompts_BS: int64, equally long prompts.
        temperature: 0 for the greedy choice.
        noise_SBV: Gumbel noise of every new token; its first size is their number.

    Returns:
        int64, prompt and new tokens.
    """
    tokens_BS, fresh_BS = prompts_BS, prompts_BS
    past: KeyValues | None = None
    for noise_BV in noise_SBV:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits_BSV, past = target.extend(fresh_BS, past)
        scores_BV = logits_BSV[:, -1].float() + temperature * noise_BV
        fresh_BS = scores_BV.argmax(dim=-1, keepdim=True)
        tokens_BS = torch.cat((tokens_BS, fresh_BS), dim=1)
    return tokens_BS


@torch.no_grad()
def agreement_with(
    draft: TrainableLlama, tokens_BS: Tensor, start: int, noised_SBV: Tensor
) -> Tensor:
    """Return where the draft's choice is the true token, bool [B, S] from position ``start`` on.

    Args:
        draft: The model that proposes.
        tokens_BS: int64, prompts and the tokens that the target generated.
        start: Length of the prompts.
        noised_SBV: Temperature times noise, the same as for the target.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits_BSV: Tensor = draft(tokens_BS[:, :-1])[:, start - 1 :]
    chosen_BS = (logits_BSV.float() + noised_SBV.transpose(0, 1)).argmax(dim=-1)
    return chosen_BS == tokens_BS[:, start:]


@torch.no_grad()
def text_losses(
    target: TrainableLlama, draft: TrainableLlama, tokens_BS: Tensor
) -> tuple[float, float, float, float]:
    """Return both cross entropies, the KL divergence and the greedy agreement on given text."""
    sums_4 = torch.zeros(4)
    for first in range(0, len(tokens_BS), 8):
        piece_BS = tokens_BS[first : first + 8]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            wanted_BSV = target(piece_BS[:, :-1]).float()
            logits_BSV = draft(piece_BS[:, :-1]).float()
        goal_R = piece_BS[:, 1:].flatten()
        sums_4 += len(piece_BS) * torch.stack(
            (
                functional.cross_entropy(wanted_BSV.flatten(0, 1), goal_R),
                functional.cross_entropy(logits_BSV.flatten(0, 1), goal_R),
                divergence(wanted_BSV, logits_BSV),
                (wanted_BSV.argmax(-1) == logits_BSV.argmax(-1)).float().mean(),
            )
        )
    target_loss, draft_loss, kl, agreement = (sums_4 / len(tokens_BS)).tolist()
    return target_loss, draft_loss, kl, agreement


def prompt_ids(tokenizer: Tokenizer, count: int, length: int) -> Tensor:
    """Return the last ``length`` tokens of held-out prompts, int64 [count, length]."""
    texts = held_out_prompts(2 * count)
    rows = [encoding.ids[-length:] for encoding in tokenizer.encode_batch(texts)]
    return torch.tensor([row for row in rows if len(row) == length][:count])


def evaluate(
    target_folder: Path, draft_folder: Path, tokenizer_folder: Path, *, seed: int = 0
) -> Evaluation:
    """Measure a pair; about two minutes on two cores."""
    target, draft = load_model(target_folder).eval(), load_model(draft_folder).eval()
    tokenizer = load_tokenizer(tokenizer_folder)
    modules = held_out_modules()
    stream_S = encode_modules(tokenizer, modules)
    num_bytes = sum(len(module.text.encode()) for module in modules)
    windows_BS = stream_S.unfold(0, 513, 512)[::3]
    target_loss, draft_loss, kl, agreement = text_losses(target, draft, windows_BS)
    logger.info("losses %.3f and %.3f, KL %.3f", target_loss, draft_loss, kl)
    prompts_BS = prompt_ids(tokenizer, NUM_PROMPTS, PROMPT_TOKENS)
    generator = torch.Generator().manual_seed(seed)
    uniform_SBV = torch.empty(NEW_TOKENS, len(prompts_BS), target.shape.vocab_size)
    noise_SBV = -uniform_SBV.exponential_(generator=generator).log()
    found: dict[str, float] = {}
    for temperature in TEMPERATURES:
        tokens_BS = write_text(target, prompts_BS, temperature, noise_SBV)
        logger.info("T=%s: %r", temperature, tokenizer.decode(tokens_BS[0, -NEW_TOKENS:].tolist()))
        agrees_BS = agreement_with(draft, tokens_BS, PROMPT_TOKENS, temperature * noise_SBV)
        found[str(temperature)] = round(tokens_per_round(agrees_BS, LOOKAHEAD), 3)
        logger.info("T=%s: %.2f tokens per round", temperature, found[str(temperature)])
    return Evaluation(
        target_loss=round(target_loss, 4),
        draft_loss=round(draft_loss, 4),
        kl=round(kl, 4),
        agreement=round(agreement, 4),
        tokens_per_round=found,
        bytes_per_token=round(num_bytes / len(stream_S), 3),
    )


def main() -> None:
    """Parse the command line, measure the pair and log the results as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.distill.evaluate", description="Measure a pair on held-out modules."
    )
    parser.add_argument("target", type=Path, help="folder of the target, with its tokenizer")
    parser.add_argument("draft", type=Path, help="folder of the draft")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(options.threads)
    found = evaluate(options.target, options.draft, options.target)
    logger.info("%s", json.dumps(asdict(found), indent=2))


if __name__ == "__main__":
    main()
