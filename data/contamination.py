"""Prompts of evaluation sets, looked for in what is to be trained on.

A conversation is contaminated where it shares n words in a row with an evaluation prompt, or is nearly equal to one.
"""

from collections.abc import Callable
from types import MappingProxyType

import numpy as np
from datasketch import MinHash, MinHashLSH

from draftsmith.core.config import Config
from draftsmith.core.conversations import Conversation, Skipped, text_of
from draftsmith.core.errors import UserError
from draftsmith.core.revisions import Revisions, pinned
from draftsmith.core.sources import read_conversations, source_name
from draftsmith.data.similarity import Signer, bands, ngram_hashes, word_hashes


class Contamination:
    """The evaluation sets' n-grams and signatures.

    Args:
        config: `data.contamination` and `eval.sets` name the sets.
        decode: text of token ids, for rows that hold ids alone.
        revisions: commits of the sets that lie on the hub.

    Raises:
        UserError: a set is missing or holds no prompt.
    """

    def __init__(
        self, config: Config, decode: Callable[[list[int]], str], revisions: Revisions = MappingProxyType({})
    ) -> None:
        self._decode = decode
        self._longest, self._threshold = config.data.contamination.ngram, config.data.dedup.threshold
        self._places: list[str] = []
        self._minhash = MinHash(config.data.dedup.permutations)
        params = bands(self._threshold, config.data.dedup.permutations)
        self._near = MinHashLSH(num_perm=config.data.dedup.permutations, params=params)
        self._signatures: list[np.ndarray] = []
        signer = Signer(config.data.dedup)
        found: dict[int, dict[int, int]] = {}
        for path in contamination_sets(config):
            before = len(self._places)
            for row in read_conversations(pinned(path, revisions), roles=config.data.roles):
                if isinstance(row, Skipped):
                    continue
                for text in self._texts(row):
                    self._add(text, found, f"{source_name(path)} ({row.place})", signer)
            if len(self._places) == before:
                raise UserError(
                    f"evaluation set `{path}`: no prompt could be read.", "Check data.contamination.sets and eval.sets."
                )
        self._grams = {
            n: (np.array(sorted(grams), dtype=np.uint64), [grams[h] for h in sorted(grams)])
            for n, grams in found.items()
        }

    def match(self, conversation: Conversation, signature: np.ndarray) -> str | None:
        """Where the evaluation prompt stands that the conversation gives away; None where there is none.

        Args:
            conversation: as read.
            signature: uint32 [P] of its prompt.
        """
        if not self._places:
            return None
        for text in self._texts(conversation):
            words = word_hashes(text, signs=False)
            for n, hashes in ngram_hashes(words, self._grams):
                known, places = self._grams[n]
                at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
                hits = np.flatnonzero(known[at] == hashes)
                if len(hits):
                    return f"{n} words in a row of {self._places[places[at[hits[0]]]]}"
        self._minhash.hashvalues = signature
        for i in self._near.query(self._minhash):
            if (self._signatures[i] == signature).mean() >= self._threshold:
                return f"nearly equal to {self._places[i]}"
        return None

    def _texts(self, row: Conversation) -> list[str]:
        """The user turns, each a prompt of its own."""
        if row.tokens:
            return [self._decode(row.tokens[0].prompt_ids)]
        return [text_of(row.messages[i]) for i in row.user_turns]

    def _add(self, text: str, found: dict[int, dict[int, int]], place: str, signer: Signer) -> None:
        number = len(self._places)
        self._places.append(place)
        self._signatures.append(signer.sign(word_hashes(text)))
        self._minhash.hashvalues = self._signatures[-1]
        self._near.insert(number, self._minhash)
        words = word_hashes(text, signs=False)
        if len(words) * 2 < self._longest:
            return  # a few common words: only a prompt that is nearly equal gives it away
        for n, hashes in ngram_hashes(words, [min(self._longest, len(words))]):
            found.setdefault(n, {}).update(dict.fromkeys(hashes.tolist(), number))


def contamination_sets(config: Config) -> list[str]:
    """Sources that must not be trained on, each once."""
    return list(dict.fromkeys([*config.data.contamination.sets, *config.eval.sets]))
