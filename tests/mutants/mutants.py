"""Small mistakes in the code of speculation, and the fastest tests that should fail for each.

A mutant replaces a text that occurs exactly once in its file. It must import and run. It has a
wrong token, position, length or identity.
"""

from tests.mutants.mutant import Mutant

VERIFICATION = "tests/unit/ssd/speculation/test_verification.py"
NOISE = "tests/unit/ssd/speculation/test_noise.py"
TABLE = "tests/unit/ssd/speculation/test_table.py"
FAN_OUT = "tests/unit/ssd/speculation/test_fan_out.py"
BACKUP = "tests/unit/ssd/speculation/test_backup.py"
CHOOSE = "tests/unit/ssd/engine/sampling/test_choose.py"
STORAGE = "tests/unit/ssd/engine/kv_cache/test_storage.py"
NOT_FINITE = "tests/unit/ssd/engine/test_not_finite.py"
PASSES = "tests/unit/ssd/engine/test_draft_passes.py"
LAW = "tests/exactness/test_coupled_law.py"
LOOP = "tests/unit/ssd_target/decoding/test_decode_loop.py"
SCHEDULER = "tests/unit/ssd_target/decoding/test_scheduler.py"
BLOCKS = "tests/unit/ssd/engine/kv_cache/test_block_pool.py"
SYNCHRONOUS = "tests/unit/ssd_target/decoding/test_sequential_drafter.py"
POOL = "tests/unit/ssd_target/test_pool.py"
SESSIONS = "tests/unit/ssd_draft/test_sessions.py"
WORKER = "tests/unit/ssd_draft/test_worker.py"
COLUMNS = "tests/unit/ssd_draft/test_columns.py"
TREE = "tests/unit/ssd_draft/test_tree_on_a_model.py"
PAIR = (
    "tests/integration/test_target_drafts.py::"
    "test_a_draft_with_the_targets_weights_has_no_misses_and_no_rejections"
)

MUTANTS = (
    # Verification and the target's own choice.
    Mutant(
        "the last row gives the bonus token",
        "ssd/speculation/verification.py",
        "chosen[accepted])",
        "chosen[-1])",
        (VERIFICATION,),
    ),
    Mutant(
        "a proposed token is compared with the choice after it",
        "ssd/speculation/verification.py",
        "zip(proposal, chosen, strict=False)",
        "zip(proposal, chosen[1:], strict=False)",
        (VERIFICATION,),
    ),
    Mutant(
        "tokens after the first rejection are accepted",
        "ssd/speculation/verification.py",
        "            break\n",
        "            continue\n",
        (VERIFICATION,),
    ),
    Mutant(
        "all rows of a sequence take the noise of the first",
        "ssd_target/decoding/sampler.py",
        "next_B[active_A] + column)",
        "next_B[active_A])",
        (LAW,),
    ),
    Mutant(
        "the target takes the noise of the position before",
        "ssd_target/decoding/sampler.py",
        "np.array([len(each.tokens) for each in sequences])",
        "np.array([len(each.tokens) - 1 for each in sequences])",
        (LOOP,),
    ),
    Mutant(
        "noise of a sequence instead of its slot",
        "ssd_target/decoding/sampler.py",
        "slots_B[active_A], next_B",
        "active_A, next_B",
        (LAW,),
    ),
    Mutant(
        "the draft on the target's device has no entry of the last accepted token",
        "ssd_target/decoding/sequential_drafter.py",
        "zip(committed, text.run, strict=False)",
        "zip(committed, text.run[:-1], strict=False)",
        (SYNCHRONOUS,),
    ),
    Mutant(
        "the draft on the target's device takes the noise of the position before",
        "ssd_target/decoding/sequential_drafter.py",
        "positions_A = lengths.numpy()[row_A] + step + 1",
        "positions_A = lengths.numpy()[row_A] + max(step, 1)",
        (SYNCHRONOUS,),
    ),
    Mutant(
        "a row of a matrix that is not finite chooses a token",
        "ssd/engine/sampling/choose.py",
        "return np.where(is_token_R, chosen_R, NO_TOKEN)",
        "return chosen_R",
        (CHOOSE,),
    ),
    Mutant(
        "the newest token is verified at the position after its own",
        "ssd_target/decoding/batch_builder.py",
        "first_B = np.array([len(each.tokens) - 1 for each in sequences]",
        "first_B = np.array([len(each.tokens) for each in sequences]",
        (LOOP,),
    ),
    Mutant(
        "a preempted sequence does not store its prompt again",
        "ssd_target/decoding/scheduler.py",
        "sequence.num_stored = 0",
        "sequence.num_stored = sequence.num_prefill",
        (SCHEDULER,),
    ),
    Mutant(
        "the last token of a proposal has no block",
        "ssd_target/decoding/scheduler.py",
        "len(sequence.tokens) + self._engine.num_columns - 1",
        "len(sequence.tokens) + self._engine.num_columns - 2",
        (SCHEDULER,),
    ),
    Mutant(
        "a prefill after a cached beginning is not at a multiple of the chunk",
        "ssd_target/decoding/scheduler.py",
        "lcm(engine.block_size, engine.prefill_chunk)",
        "engine.block_size",
        (SCHEDULER,),
    ),
    Mutant(
        "a block that is filled in part is in the prefix cache",
        "ssd_target/decoding/scheduler.py",
        "min(prefill.last // size, len(sequence.keys))",
        "min(-(-prefill.last // size), len(sequence.keys))",
        (SCHEDULER,),
    ),
    Mutant(
        "the prefix cache ignores the tokens before a block",
        "ssd/engine/kv_cache/block_pool.py",
        "sha256(keys[-1] + text",
        "sha256(salt + text",
        (BLOCKS,),
    ),
    Mutant(
        "a block of several sequences is free after the first of them",
        "ssd/engine/kv_cache/block_pool.py",
        "self._num_owners.get(block, 0) + 1",
        "1",
        (BLOCKS,),
    ),
    Mutant(
        "a row that is not finite chooses a token",
        "ssd/engine/sampling/choose.py",
        "return best_R.where(is_token_R, NO_TOKEN)",
        "return best_R",
        (CHOOSE,),
    ),
    # Noise.
    Mutant(
        "the choice of a request is not part of the noise",
        "ssd/speculation/noise.py",
        "addresses_R4[:, 2] = self._choices_Z[slots_R]",
        "addresses_R4[:, 2] = 0",
        (NOISE,),
    ),
    Mutant(
        "a slot keeps the noise of the sequence before",
        "ssd/speculation/noise.py",
        "self._positions_ZY[slot] = -1",
        "self._positions_ZY[slot, 0] = -1",
        (NOISE,),
    ),
    Mutant(
        "a row of the ring keeps the noise of an older position",
        "ssd/speculation/noise.py",
        "self._positions_ZY[slots_BY, rows_BY] != positions_BY",
        "self._positions_ZY[slots_BY, rows_BY] < 0",
        (NOISE,),
    ),
    # Backup.
    Mutant(
        "n-grams are continued from the oldest match",
        "ssd/speculation/backup.py",
        "start = int(ends_C[-1]) + 1",
        "start = int(ends_C[0]) + 1",
        (BACKUP,),
    ),
    Mutant(
        "the n-gram backup replaces the branch of a hit",
        "ssd/pool/lookup.py",
        "else table.proposal(branch, max_tokens)",
        "else backup(result.sequence.tokens, max_tokens)",
        (LOOP,),
    ),
    # Outcome tables and fan-out.
    Mutant(
        "the bonus token alone finds a branch",
        "ssd/speculation/table.py",
        "if self.accepted_N[index] == outcome.accepted:",
        "if self.accepted_N[index] >= 0:",
        (TABLE,),
    ),
    Mutant(
        "a proposal is one token longer than asked",
        "ssd/speculation/table.py",
        "self.tokens_NK[index, :num_tokens]",
        "self.tokens_NK[index, : num_tokens + 1]",
        (TABLE,),
    ),
    Mutant(
        "the proposed token is a fork",
        "ssd/speculation/fan_out.py",
        "is_there_BPM & ~is_proposed_BPM & is_reached_BP",
        "is_there_BPM & is_reached_BP",
        (FAN_OUT,),
    ),
    Mutant(
        "full acceptance has no branch",
        "ssd/speculation/fan_out.py",
        "is_reached_BP = position_P <= num_proposed_B[:, None]",
        "is_reached_BP = position_P < num_proposed_B[:, None]",
        (FAN_OUT,),
    ),
    Mutant(
        "a position counts its own acceptance as reaching it",
        "ssd/speculation/fan_out.py",
        "np.cumsum(log_accepted_BP, axis=1) - log_accepted_BP",
        "np.cumsum(log_accepted_BP, axis=1)",
        (FAN_OUT,),
    ),
    Mutant(
        "full acceptance is weighed as a rejection",
        "ssd/speculation/fan_out.py",
        "log_rejected_BP[position_P >= num_proposed_B[:, None]] = 0.0",
        "log_rejected_BP[position_P > num_proposed_B[:, None]] = 0.0",
        (FAN_OUT,),
    ),
    # The target's pool.
    Mutant(
        "the tokens of the wrong branch are proposed",
        "ssd/pool/lookup.py",
        "else table.proposal(branch, max_tokens)",
        "else table.proposal(branch - 1, max_tokens)",
        (LOOP,),
    ),
    Mutant(
        "a frame of an older epoch is accepted",
        "ssd/pool/tables.py",
        "if frame.epoch != link.epoch or frame.sequence_number",
        "if frame.epoch > link.epoch or frame.sequence_number",
        (POOL,),
    ),
    Mutant(
        "the table of an earlier round is accepted",
        "ssd/pool/link.py",
        "if table.base_len != self.base_len or num_new <= 0:",
        "if table.base_len > self.base_len or num_new <= 0:",
        (POOL,),
    ),
    Mutant(
        "a table replaces columns that it contradicts",
        "ssd/pool/link.py",
        "elif not table.extends(self.table):",
        "elif table.depth <= self.table.depth:",
        (POOL,),
    ),
    Mutant(
        "the table of the round before is used again",
        "ssd/pool/link.py",
        "        self.base_len = base_len\n        self.table = None\n",
        "        self.base_len = base_len\n",
        (LOOP,),
    ),
    Mutant(
        "the last round of a sequence proposes a token too many",
        "ssd/pool/sequence.py",
        "sequence.num_remaining - 1)",
        "sequence.num_remaining)",
        (LOOP,),
    ),
    Mutant(
        "a commit names the base length after its round",
        "ssd/pool/pool.py",
        "session.number, base_len, result.outcome, lookup.next",
        "session.number, num_tokens, result.outcome, lookup.next",
        (LOOP,),
    ),
    Mutant(
        "a session opens while its sequence carries a proposal",
        "ssd_target/decoding/decode_loop.py",
        "if not each.proposal and self._control.may_open(each)",
        "if self._control.may_open(each)",
        (LOOP, POOL),
    ),
    # The draft's sessions and worker.
    Mutant(
        "a commit of an earlier round is followed",
        "ssd_draft/sessions.py",
        "if commit.base_len != self.num_committed:",
        "if commit.base_len > self.num_committed:",
        (SESSIONS, WORKER),
    ),
    Mutant(
        "more tokens than were proposed may be accepted",
        "ssd_draft/sessions.py",
        "if outcome.accepted > len(self.proposal):",
        "if outcome.accepted > len(self.proposal) + 1:",
        (SESSIONS, WORKER),
    ),
    Mutant(
        "any branch may be named for an outcome",
        "ssd_draft/sessions.py",
        "if self.table is None or index != commit.next.index:",
        "if self.table is None or index is None:",
        (SESSIONS, WORKER),
    ),
    Mutant(
        "explicit tokens adopt the branch of their outcome, whatever they are",
        "ssd_draft/sessions.py",
        "and self.table.proposal(index, len(proposal)) == proposal",
        "and len(proposal) <= len(self.table.proposal(index, len(proposal)))",
        (SESSIONS, WORKER),
    ),
    Mutant(
        "the bonus token is not counted as committed",
        "ssd_draft/sessions.py",
        "num_entries = outcome.accepted + 1",
        "num_entries = outcome.accepted",
        (SESSIONS,),
    ),
    Mutant(
        "of several commits the newest is followed first",
        "ssd_draft/worker.py",
        "session.pending.append(commit)",
        "session.pending.appendleft(commit)",
        (WORKER,),
    ),
    Mutant(
        "the table of a session that is not finite is sent",
        "ssd_draft/worker.py",
        "if each.is_open and each.table and not self._tree.is_broken_X[each.slot]",
        "if each.is_open and each.table",
        (WORKER,),
    ),
    Mutant(
        "the table of a session that was closed as not finite is sent",
        "ssd_draft/worker.py",
        "if each.is_open and each.table and not",
        "if each.table and not",
        (WORKER,),
    ),
    Mutant(
        "every table has all branches",
        "ssd_draft/branch_count.py",
        "return max(self._counts, key=value)",
        "return most",
        (
            "tests/unit/ssd_draft/test_branch_count.py",
            "tests/unit/ssd_draft/test_speed_of_the_draft.py",
        ),
    ),
    Mutant(
        "readers wait until the forward pass has ended",
        "ssd_target/decoding/decode_loop.py",
        "            self._wakeups.flush()\n            logits_BPV",
        "            logits_BPV",
        (LOOP,),
    ),
    # The draft's tree.
    Mutant(
        "a branch takes the noise of the position before",
        "ssd_draft/tree.py",
        "build.lengths_B[:, None] + 2 + build.accepted_BN + step",
        "build.lengths_B[:, None] + 1 + build.accepted_BN + step",
        (WORKER,),
    ),
    Mutant(
        "forks are ranked with the noise of the position before",
        "ssd_draft/tree.py",
        "self._trunk_lengths_X[slots_R] + 1 + column_R",
        "self._trunk_lengths_X[slots_R] + column_R",
        (WORKER,),
    ),
    Mutant(
        "forks are read from the logits of the branch before",
        "ssd_draft/tree.py",
        "self._branch_logits_XNPV[where[0], where[1]]",
        "self._branch_logits_XNPV[where[0], where[1] - 1]",
        (WORKER,),
    ),
    Mutant(
        "forks keep the length of the proposal before",
        "ssd_draft/tree.py",
        "self._num_proposed_X[some_X] = num_proposed_B[rows]",
        "self._num_proposed_X[some_X] = num_proposed_B[rows].clip(self._num_proposed_X[some_X])",
        (WORKER,),
    ),
    Mutant(
        "the trunk grows by the accepted tokens alone",
        "ssd_draft/tree.py",
        "self._trunk_lengths_X[slots_B] += entries_B",
        "self._trunk_lengths_X[slots_B] += entries_B - 1",
        (WORKER,),
    ),
    Mutant(
        "a winning branch keeps the entry of a token that was never run",
        "ssd_draft/tree.py",
        "(num_proposed_B < self._num_steps_X[slots_X])",
        "(num_proposed_B <= self._num_steps_X[slots_X])",
        (COLUMNS,),
    ),
    Mutant(
        "sessions whose tables go on take the rows of those that end",
        "ssd_draft/tree.py",
        "        build.rows_B = build.rows_B[rows]\n",
        "        build.rows_B = build.rows_B[: len(rows)]\n",
        (TREE,),
    ),
    Mutant(
        "accepted tokens of commits that are applied as one are not stored",
        "ssd_draft/sessions.py",
        "skipped = (*self.skipped, self.bonus, *accepted)",
        "skipped = (*self.skipped, self.bonus)",
        (COLUMNS, TREE),
    ),
    # The draft's KV segments.
    Mutant(
        "the KV of accepted tokens is copied one position too far",
        "ssd/engine/kv_cache/storage.py",
        "position_BP = (trunk_lengths_B[:, None] + column_P).clamp_(max=paged_BS.shape[1] - 1)",
        "position_BP = (trunk_lengths_B[:, None] + column_P + 1).clamp_(max=paged_BS.shape[1] - 1)",
        (PASSES, TREE, PAIR),
    ),
    Mutant(
        "the KV of the last accepted token is not copied",
        "ssd/engine/kv_cache/storage.py",
        "is_kept_BP = column_P < num_entries_B[:, None]",
        "is_kept_BP = column_P < num_entries_B[:, None] - 1",
        (PASSES, TREE, PAIR),
    ),
    Mutant(
        "the KV of the branch before becomes the proposal",
        "ssd/engine/kv_cache/storage.py",
        "index_BP1 = branches_B[:, None, None]",
        "index_BP1 = (branches_B[:, None, None] - 1).clamp_min(0)",
        (PASSES, TREE, PAIR),
    ),
    Mutant(
        "branches stand one position too early",
        "ssd/engine/torch_execution.py",
        "batch.trunk_lengths_B[:, None] + 1 + batch.accepted_BN + batch.step",
        "batch.trunk_lengths_B[:, None] + batch.accepted_BN + batch.step",
        (PASSES, TREE, PAIR),
    ),
    Mutant(
        "a branch does not see the last accepted token",
        "ssd/engine/torch_execution.py",
        "torch.arange(columns) <= batch.accepted_BN[:, :, None]",
        "torch.arange(columns) < batch.accepted_BN[:, :, None].clamp_min(1)",
        (PASSES, TREE, PAIR),
    ),
    Mutant(
        "branches see each other",
        "ssd/engine/torch_execution.py",
        "torch.eye(branches, dtype=torch.bool)",
        "torch.ones((branches, branches), dtype=torch.bool)",
        (PASSES, TREE),
    ),
    Mutant(
        "branches of a graph stand one position too early",
        "ssd/engine/openvino_engine/draft.py",
        "batch.trunk_lengths_B[:, None] + 1 + batch.accepted_BN + batch.step",
        "batch.trunk_lengths_B[:, None] + batch.accepted_BN + batch.step",
        (PASSES, TREE, PAIR),
    ),
    Mutant(
        "a branch of a graph does not see the last accepted token",
        "ssd/engine/openvino_engine/draft.py",
        "torch.arange(columns) <= batch.accepted_BN[:, :, None]",
        "torch.arange(columns) < batch.accepted_BN[:, :, None].clamp_min(1)",
        (PASSES, TREE, PAIR),
    ),
    Mutant(
        "branches of a graph see each other",
        "ssd/engine/openvino_engine/draft.py",
        "torch.eye(branches, dtype=torch.bool)",
        "torch.ones((branches, branches), dtype=torch.bool)",
        (PASSES, TREE),
    ),
    Mutant(
        "KV that is not finite is stored",
        "ssd/engine/kv_cache/storage.py",
        "values_RGE.nan_to_num(0.0, 0.0, 0.0)",
        "values_RGE",
        (STORAGE, NOT_FINITE),
    ),
)
