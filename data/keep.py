"""Replies that the target has written already: one row for each, with prompt and reply as they were served.

The prompt of every row is the render of the messages before the reply, so reasoning that the template strips from
earlier turns is stripped there. Where prompt and reply cannot be told apart exactly, the reply is refused and counted
(`split_reply.py` says when); the conversation's other replies are still used. Pre-tokenised turns pass through as
they are.
"""

from collections.abc import Iterable, Iterator

from draftsmith.core.config import Config
from draftsmith.core.conversations import Conversation, Skipped
from draftsmith.core.errors import UserError
from draftsmith.core.reasoning import ClientView
from draftsmith.core.target import Target, end_token_ids, load_tokenizer
from draftsmith.data.merge import merge
from draftsmith.data.rows import Row
from draftsmith.data.split_reply import Refused, ReplySplitter

UNKNOWN_AUTHOR = "unknown"


def keep(config: Config, target: Target, conversations: Iterable[Conversation]) -> Iterator[Row | Skipped]:
    """Rows of every conversation, in order; what cannot be used is yielded as skipped.

    Raises:
        UserError: the target has no tokenizer or chat template.
    """
    tokenizer = load_tokenizer(target, config.target)
    end_ids = end_token_ids(target, tokenizer)
    view = ClientView(config.target, tokenizer)
    splitter = ReplySplitter(tokenizer, end_ids, config.target.chat_template_kwargs, view)
    for number, conversation in enumerate(conversations):
        rows: list[Row] = []
        found = _token_rows(conversation, end_ids) if conversation.tokens else _text_rows(conversation, splitter)
        for turn, ids, finish_reason in found:
            if isinstance(ids, Skipped):
                yield ids
                continue
            prompt, reply = ids
            span = (len(prompt), len(prompt) + len(reply))
            author = conversation.author or UNKNOWN_AUTHOR
            rows.append(Row(number, turn, prompt + reply, [span], finish_reason, author))
        yield from merge(rows, config.data.max_length)


_Found = tuple[int, tuple[list[int], list[int]] | Skipped, str]


def _text_rows(conversation: Conversation, splitter: ReplySplitter) -> Iterator[_Found]:
    replies = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    if not replies:
        yield 0, _skipped(conversation, "no_reply", "data.replies=keep needs one"), ""
    for turn, at in enumerate(replies):
        finish_reason = dict(enumerate(conversation.finish_reasons)).get(turn, "stop")
        try:
            yield turn, splitter.split(conversation, at, finish_reason), finish_reason
        except Refused as refused:
            reason, detail = refused.args
            yield turn, _skipped(conversation, reason, f"reply {turn + 1}: {detail}"), ""
        except UserError as error:
            yield turn, _skipped(conversation, "template_refused", error.what), ""


def _token_rows(conversation: Conversation, end_ids: list[int]) -> Iterator[_Found]:
    for turn, given in enumerate(conversation.tokens):
        if not given.reply_ids:
            yield turn, _skipped(conversation, "no_reply", f"turn {turn + 1} has no reply ids"), ""
            continue
        ended = given.reply_ids[-1] in end_ids
        said = dict(enumerate(conversation.finish_reasons)).get(turn, "stop" if ended else "length")
        if said == "stop" and not ended:
            detail = f"turn {turn + 1} says `stop` and ends in token {given.reply_ids[-1]}"
            yield turn, _skipped(conversation, "no_end_token", detail), ""
        else:
            yield turn, (given.prompt_ids, given.reply_ids), said


def _skipped(conversation: Conversation, reason: str, detail: str) -> Skipped:
    return Skipped(conversation.place, reason, detail, conversation.source)
