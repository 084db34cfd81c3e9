"""The model of a group of cross attention: blocks for what the encoder gives, filled once, that are neither cached nor
grown."""

from __future__ import annotations

from collections.abc import Sequence

from .admission import Seq
from .batches import Match, Plan
from .model import Model
from .store import Row, Walk
from .tiers import Block, Prompt


class Cross(Model):
    """Its sequences count tokens as those of other groups do; their blocks stay what they are."""

    matches = False

    def longest(self, prompt: Prompt, limit: int) -> int:
        return limit

    def walk(self, prompt: Prompt, usable: int, limit: int) -> Walk:
        return Walk(list[Row | None](), None, 0)

    def new_columns(self, plan: Plan, tokens: int | None = None) -> Sequence[int]:
        return range(self._ceil(plan.encoder_tokens))

    def _name_admitted(self, plan: Plan, i: int, block: Block | None) -> None:
        pass

    def _count_admission(self, plan: Plan, match: Match, missed: int) -> None:
        """What is counted are prompts."""

    def _growth(self, live: Sequence[Seq], counts: Sequence[int]) -> int:
        return 0

    def _copies(self, seq: Seq, refs: int) -> bool:
        return False

    def _open_column(self, seq: Seq) -> None:
        pass

    def _name(self, seq: Seq, i: int) -> None:
        pass

    def _waits(self, seq: Seq, i: int) -> bool:
        return False

    def _give_passed(self, seq: Seq) -> None:
        pass

    def has_passed(self, seq: Seq, length: int) -> bool:
        return False

    def _written(self, seq: Seq, count: int, path: Sequence[int]) -> range:
        return range(0)

    def _cut(self, seq: Seq, length: int) -> tuple[list[Block | None], list[Block], Block | None]:
        return seq.blocks, [], None

    def _release_block(self, seq: Seq, index: int, store: bool) -> None:
        block = seq.blocks[index]
        assert block is not None
        self.drop_ref(block)
