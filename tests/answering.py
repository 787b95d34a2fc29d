"""Dialogues answered without an engine: what the tests of regeneration share."""


def reply_to(request):
    """Stands for a target: the reply hangs on prompt and seed alone, and ends in the tiny target's end token."""
    return [5 + (sum(request.prompt_ids) + (request.seed or 0)) % 300, 7, 1], "stop"


def answer_all(dialogues, reply=reply_to, most=None):
    """What was asked, until nothing more is or `most` replies are given."""
    asked = []
    while (most is None or len(asked) < most) and (request := dialogues.take()):
        asked.append(request)
        dialogues.accept(request, *reply(request))
    return asked


def rows_of(journal):
    return list(journal.rows(journal.confirmed()))
