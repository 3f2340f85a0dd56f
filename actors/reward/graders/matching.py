"""Graders that compare a response with its label as text: exactly, by position or by words."""

import re
import string
from collections import Counter

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})


def exact_match(response: str, label: str) -> float:
    """1 if response and label are equal after stripping whitespace, else 0."""
    return float(response.strip() == label.strip())


def positional_match(response: str, label: str, *, truncated: bool = False) -> float:
    """Share of positions with the right character: matching positions / length of the longer text.

    A truncated response scores 0; otherwise a response without an end would score as high as one with an end. Two
    empty texts score 1.
    """
    if truncated:
        return 0.0
    response, label = response.strip(), label.strip()
    longer = max(len(response), len(label))
    if longer == 0:
        return 1.0
    return sum(ours == theirs for ours, theirs in zip(response, label, strict=False)) / longer


def f1(response: str, label: str) -> float:
    """F1 score of the words that response and label share.

    Words are compared in lower case, without punctuation and articles. If either text is yes, no or noanswer, the
    two must be equal.

    Source:
        SQuAD's evaluation (arXiv 1606.05250), with HotpotQA's rule for closed answers (arXiv 1809.09600).
    """
    ours, theirs = _words(response), _words(label)
    closed = _CLOSED_ANSWERS.intersection((" ".join(ours), " ".join(theirs)))
    if closed and ours != theirs:
        return 0.0
    num_shared = sum((Counter(ours) & Counter(theirs)).values())
    if num_shared == 0:
        return 0.0
    precision, recall = num_shared / len(ours), num_shared / len(theirs)
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
